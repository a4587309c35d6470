# SPDX-License-Identifier: Apache-2.0
"""The object around the choices of text and chat completions, in one piece and in events."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from pagoda.api.answers.generation import AnswerShape, Generation
from pagoda.api.bodies.fields import GenerationFields, StreamOptions
from pagoda.api.http.sse import DONE, EventTemplate, event
from pagoda.messages.frontend import FinishReason
from pagoda.text.text_generator import TextDelta
from pagoda.version import __version__

_NO_OPTIONS = StreamOptions()


class Choice(AnswerShape, Protocol):
    """An answer as an element of `choices`."""

    def choice(self) -> dict[str, Any]:
        """The element of a response in one piece."""
        ...


class Envelope:
    """The fields around the choices, and what the client asked to be told besides them."""

    def __init__(
        self,
        body: GenerationFields,
        generation: Generation,
        *,
        model: str,
        id_prefix: str,
        kind: str,
        always_usage: bool = False,
        tokens_as_ids: bool = False,
        tells_drafts: bool = False,
    ) -> None:
        """`kind` is the `object` of the response or of its events; `always_usage` gives every stream its usage;
        `tokens_as_ids` is for bodies that do not say how tokens are written; `tells_drafts` adds `metrics`."""
        self.return_token_ids = bool(body.return_token_ids)
        as_ids = body.return_tokens_as_token_ids
        self.tokens_as_ids = tokens_as_ids if as_ids is None else as_ids
        options = body.stream_options or _NO_OPTIONS
        self._sends_usage = bool(options.include_usage) or always_usage
        # vLLM's flag means usage in every event, unless a client says what it wants.
        is_forced = always_usage and body.stream_options is None
        is_continuous = is_forced or bool(options.continuous_usage_stats)
        self.sends_continuous_usage = self._sends_usage and is_continuous
        self.timings: dict[str, float] | None = None
        """Times of the answer that has told its own last, for the end of a stream."""
        self._generation = generation
        self._tells_drafts = tells_drafts
        self._fields = {
            "id": f"{id_prefix}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": f"pagoda-{__version__}",
        }
        if body.service_tier is not None:
            self._fields["service_tier"] = "default"

    def choice(
        self, index: int, content: dict[str, Any], delta: TextDelta, logprobs: object = None
    ) -> dict[str, Any]:
        """The choice of answer `index` with `content` and what `delta` says besides its text."""
        choice = {
            "index": index,
            **content,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if delta.finish_reason is not None:
            choice["matched_stop"] = matched_stop(delta)
        if self.return_token_ids:
            choice["token_ids"] = delta.token_ids
        return choice

    def whole(self, choices: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        """The response in one piece."""
        fields |= self._generation.transfer_fields(self._generation.kv_source)
        return self._around(choices, usage=self.usage(), **fields, **self._metrics())

    def _metrics(self) -> dict[str, Any]:
        """vLLM's field with the drafts of all answers, if it is wanted."""
        if not self._tells_drafts:
            return {}
        return {"metrics": {"speculative_decoding": self._generation.speculation().fields()}}

    def event(self, choice: dict[str, Any], delta: TextDelta | None = None, **fields: Any) -> bytes:
        """An event with one choice. With a `delta`, usage and transfer parameters go with it."""
        if self._sends_usage:
            fields["usage"] = None
        if delta is not None:
            if self.sends_continuous_usage:
                fields["usage"] = self.usage()
            fields.update(self._generation.transfer_fields(delta.kv_source))
        return event(self._around([choice], **fields))

    def begin(self, choice: dict[str, Any], **fields: Any) -> bytes:
        """The first event of an answer, before any of its tokens."""
        if not self.sends_continuous_usage:
            return self.event(choice, **fields)
        usage = {**self.usage(), "completion_tokens": 0}
        usage["total_tokens"] = usage["prompt_tokens"]
        return event(self._around([choice], usage=usage, **fields))

    def template(self, choice: dict[str, Any]) -> EventTemplate:
        """The event with one choice, in which `EventTemplate.PLACE` stands for a text to be filled in."""
        return EventTemplate(self.event(choice))

    def end(self) -> bytes:
        """The last events of a stream."""
        if not self._sends_usage:
            return DONE
        timings = {} if self.timings is None else {"timings": self.timings}
        return event(self._around([], usage=self.usage(), **timings, **self._metrics())) + DONE

    def _around(self, choices: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        return {**self._fields, "choices": choices, **fields}

    def usage(self) -> dict[str, Any]:
        usage = self._generation.usage
        fields: dict[str, Any] = {
            "prompt_tokens": usage.num_prompt_tokens,
            "completion_tokens": usage.num_completion_tokens,
            "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
        }
        if usage.num_reasoning_tokens is not None:
            details = {"reasoning_tokens": usage.num_reasoning_tokens}
            fields["completion_tokens_details"] = details
        return fields


class Choices:
    """The shape of text and chat completions."""

    def __init__(
        self,
        envelope: Envelope,
        answers: Sequence[Choice],
        extra: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        """`extra` gives the fields that a response in one piece has besides the usual ones."""
        self.answers = answers
        self._envelope = envelope
        self._extra = extra

    def whole(self) -> dict[str, Any]:
        choices = [answer.choice() for answer in self.answers]
        return self._envelope.whole(choices, **self._extra())

    def end(self) -> bytes:
        return self._envelope.end()


def matched_stop(delta: TextDelta) -> int | str | None:
    """SGLang's name of `stop_reason`; the model's own end token has its id there."""
    if delta.finish_reason is FinishReason.STOP and delta.stop_reason is None and delta.token_ids:
        return delta.token_ids[-1]
    return delta.stop_reason
