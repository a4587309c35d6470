# SPDX-License-Identifier: Apache-2.0
"""`POST /v1/fim/completions`: a gap in a text is filled, in the form of Mistral, which editors ask in."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from pagoda.api.http.request_context import RequestContext
from pagoda.api.openai.bodies import FimRequest
from pagoda.api.openai.choices import Choices, Envelope
from pagoda.api.openai.completions import begin_completion
from pagoda.errors import refuse
from pagoda.text.text_generator import TextDelta, joined_deltas


async def fim_completions(context: RequestContext) -> web.StreamResponse:
    body = await context.parse(FimRequest)
    for name in ("echo", "logprobs", "prompt_logprobs"):
        value = getattr(body, name)
        if value is not None and value is not False:
            refuse(name, "is not served here; POST /v1/completions takes it", "not_supported")
    generation, _ = await begin_completion(context.caller, body, default_tokens=None)
    envelope = Envelope(
        body,
        generation,
        model=context.service.name_of(generation.generator),
        id_prefix="fim",
        kind="chat.completion.chunk" if body.stream else "chat.completion",
        always_usage=context.service.config.always_usage,
        tells_drafts=context.service.config.tells_drafts,
    )
    answers = [_FimAnswer(envelope, index) for index in range(len(generation.requests))]
    return await generation.respond(context, Choices(envelope, answers), streams=bool(body.stream))


class _FimAnswer:
    """The text that fills the gap, as a message."""

    is_complete = False

    def __init__(self, envelope: Envelope, index: int) -> None:
        self._envelope = envelope
        self._index = index
        self._deltas: list[TextDelta] = []

    def _choice(self, name: str, delta: TextDelta) -> dict[str, Any]:
        message = {"role": "assistant", "content": delta.text}
        return self._envelope.choice(self._index, {name: message}, delta)

    def add(self, delta: TextDelta) -> None:
        self._deltas.append(delta)

    def choice(self) -> dict[str, Any]:
        return self._choice("message", joined_deltas(self._deltas))

    def events(self, delta: TextDelta) -> bytes:
        return self._envelope.event(self._choice("delta", delta), delta)
