# SPDX-License-Identifier: Apache-2.0
"""`AsyncLLM`: a model as async iterators, in the process that uses it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any, Self

import msgspec

from pagoda.concurrency.async_utils import gather_all, merge
from pagoda.errors import ConfigError, InvalidRequestError, refuse
from pagoda.fleet.fleet import Fleet
from pagoda.fleet.trace_control import (
    TraceControl,
    TraceStateError,
    start_offline,
    stop_into_file,
)
from pagoda.llm.llm_arguments import Configuration, configure
from pagoda.llm.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    EmbeddingOutput,
    GrowingAnswer,
    RequestOutput,
    request_output,
)
from pagoda.messages.sampling_params import SamplingParams, StructuredOutputsParams
from pagoda.telemetry.request_tracker import RequestTracker
from pagoda.telemetry.tracer import DEFAULT_DIRECTORY, LEVELS, Tracer
from pagoda.text.beam_search import BeamSearchParams, beam_search
from pagoda.text.draft import Draft, FieldGrammar
from pagoda.text.embeddings import EmbeddingOptions, embed
from pagoda.text.grammars.constraints import structured_grammar
from pagoda.text.model_text import ModelText, load_text
from pagoda.text.templates.conversation import Messages
from pagoda.text.text_generator import TextGenerator, TextRequest, start_generator
from pagoda.text.tokenizers.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, `{"prompt": text}` or `{"prompt_token_ids": [...]}`."""

Conversation = Sequence[Mapping[str, Any]]


_AS_THE_MODEL_SAYS = EmbeddingOptions()


class AsyncLLM:
    """A model behind engine processes, one for each replica.

        async with AsyncLLM() as llm:
            async for output in llm.generate("Hello"):
                print(output.outputs[0].text)

    Belongs to the event loop in which it was started.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        chat_template: str | Path | None = None,
        configuration: Configuration | None = None,
        **options: Any,
    ) -> None:
        """`model` is a directory, GGUF file or hub id, or None for the embedded one; `chat_template` a Jinja file.

        `options` are the fields of `EngineOptions`, `ParallelOptions` and `ExecutorOptions`: the flags of
        `pagoda serve`. A `configuration` replaces `model` and `options`.

        Raises ConfigError: there is no such model or option, or an option has a value that is not allowed.
        """
        self._files, self._engine, self._policy = configuration or configure(model, options)
        self._chat_template = None if chat_template is None else Path(chat_template)
        self._fleet: Fleet | None = None
        self._generator: TextGenerator | None = None
        self._tracer = Tracer("frontend")
        self._tracker = RequestTracker(self._tracer.clock_ns)
        self._tracing: TraceControl | None = None
        self._requests: dict[str, list[str]] = {}

    async def start(self) -> None:
        """Returns when the model is ready. Raises ConfigError: it cannot be loaded."""
        fleet = self._fleet = Fleet.of_engines(self._engine, self._policy, tracer=self._tracer)
        try:
            self._generator = await start_generator(fleet, self._load_text, self._tracker)
        except BaseException:
            await self.close()
            raise

    def _load_text(self) -> ModelText:
        return load_text(
            self._files, simulated=self._engine.executor == "sim", chat_template=self._chat_template
        )

    async def close(self) -> None:
        """Ends the engines, and a trace. A second call does nothing."""
        if self._tracing is not None:
            await self.stop_profile()
        fleet, self._fleet, self._generator = self._fleet, None, None
        if fleet is not None:
            await fleet.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def num_replicas(self) -> int:
        return self._engine.worker.parallel.data_parallel_size

    @property
    def generator(self) -> TextGenerator:
        """The generator of a running LLM. Raises RuntimeError before the start and after the end."""
        if self._generator is None:
            raise RuntimeError("The LLM is not running: it was not started, or it was closed.")
        return self._generator

    def get_tokenizer(self) -> Tokenizer:
        return self.generator.text.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's own preferences, from its generation_config.json."""
        return SamplingParams(**self.generator.text.default_sampling)  # type: ignore[arg-type]

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        lora_request: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The answers to `prompt` as they grow; every item has all of the text so far.

        `lora_request` is the name of the adapter that answers; None for the model alone.

        Raises InvalidRequestError: the prompt or a parameter does not fit the model, or a request with this id
        runs; OverloadedError: too many requests are waiting.
        """
        prepare = partial(
            self.prepare, prompt, sampling_params, priority=priority, lora_request=lora_request
        )
        return self._growing(prepare, request_id)

    def chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        lora_request: str | None = None,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The answers to a conversation as they grow; `options` are those of `render`, others of `generate`."""

        async def prepare() -> list[TextRequest]:
            prompt = await self.render(messages, **options)
            return await self.prepare(
                prompt,
                sampling_params,
                priority=priority,
                add_special_tokens=False,
                lora_request=lora_request,
            )

        return self._growing(prepare, request_id)

    async def _growing(
        self, prepare: Callable[[], Awaitable[list[TextRequest]]], request_id: str | None
    ) -> AsyncGenerator[RequestOutput, None]:
        requests = await prepare()
        request_id = request_id or uuid.uuid4().hex
        if request_id in self._requests:
            refuse("request_id", f"{request_id!r} is that of a request that still runs")
        answers = self._answers(requests)
        self._requests[request_id] = [request.request.request_id for request in requests]
        try:
            streams = [self.generator.stream(request) for request in requests]
            async with aclosing(merge(streams)) as deltas:
                async for index, delta in deltas:
                    answers[index].add(delta)
                    yield request_output(request_id, answers, requests[0])
        finally:
            del self._requests[request_id]

    async def abort(self, request_id: str) -> None:
        """Ends a request of `generate`; its last output has the finish reason `abort`. Unknown ids are ignored."""
        for internal_id in self._requests.get(request_id, ()):
            await self.generator.endpoint.abort(internal_id)

    async def start_profile(
        self, level: str = "e2e", directory: str | Path = DEFAULT_DIRECTORY
    ) -> None:
        """Traces all processes from now on, into a directory of which one trace at a time takes the place of the
        last one. `level` is `e2e` (requests and steps), `kernel` (also the operations of each step) or `verbose`
        (also each token).

        Raises ConfigError: there is no such level, or the directory cannot be written; TraceStateError: a trace is
        under way."""
        tracker = self.generator.tracker
        if level not in LEVELS:
            raise ConfigError(f"level must be one of {', '.join(LEVELS)}, got {level!r}.")
        if self._fleet is not None:
            self._tracing = await start_offline(
                self._fleet, self._tracer, tracker, LEVELS[level], Path(directory)
            )

    async def stop_profile(self) -> Path:
        """Ends the trace; returns its file, for ui.perfetto.dev or `pagoda trace report`.
        Raises TraceStateError: none is under way."""
        control, self._tracing = self._tracing, None
        if control is None:
            raise TraceStateError("Tracing is off.")
        return await stop_into_file(control)

    # ---- for whole answers, as `LLM` needs them

    async def complete(self, requests: list[TextRequest], gate: asyncio.Semaphore) -> RequestOutput:
        """The whole answers to one prompt; each goes to the engine when it has passed `gate`."""
        answers = self._answers(requests)

        async def collect(request: TextRequest, answer: GrowingAnswer) -> None:
            async with gate, aclosing(self.generator.stream(request)) as deltas:
                async for delta in deltas:
                    answer.add(delta)

        await gather_all(list(map(collect, requests, answers)))
        return request_output(uuid.uuid4().hex, answers, requests[0])

    async def prepare(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        *,
        priority: int = 0,
        add_special_tokens: bool = True,
        lora_request: str | None = None,
    ) -> list[TextRequest]:
        """The requests of one prompt. An answer too long for the context is shortened to fit, as in vLLM.
        Raises InvalidRequestError: the prompt or a parameter does not fit the model."""
        params = sampling_params or self.get_default_sampling_params()
        generator = self.generator
        if lora_request is not None:
            adapter = generator.adapters.find(lora_request)
            if adapter is None:
                refuse("lora_request", f"names no adapter, got {lora_request!r}")
            generator = generator.with_adapter(adapter)
        sampling = generator.check_sampling(params)
        return await generator.prepare(
            _plain_prompt(prompt),
            sampling,
            Draft(
                add_special_tokens=add_special_tokens,
                clamp_max_tokens=True,
                priority=priority,
                grammar=_grammar(sampling.structured_outputs),
            ),
        )

    async def beam_search(self, prompt: Prompt, params: BeamSearchParams) -> BeamSearchOutput:
        """The best beams behind a prompt. Raises InvalidRequestError: as `prepare`."""
        params = params.checked(self.generator.endpoint.limits.vocab_size)
        sampling = SamplingParams(temperature=0, max_tokens=params.max_tokens, logprobs=0)
        [request] = await self.prepare(prompt, sampling)
        room = request.request.work.sampling.max_tokens or params.max_tokens
        params = msgspec.structs.replace(params, max_tokens=room)
        found = await beam_search(self.generator, request, params)
        return BeamSearchOutput(
            [
                BeamSearchSequence(
                    tokens=[*request.prompt_token_ids, *beam.token_ids],
                    text=delta.text,
                    cum_logprob=beam.cumulative_logprob,
                    score=beam.score,
                    finish_reason=str(delta.finish_reason),
                )
                for beam, delta in found
            ]
        )

    async def embed(
        self, prompts: Sequence[Prompt], options: EmbeddingOptions = _AS_THE_MODEL_SAYS
    ) -> list[EmbeddingOutput]:
        """The vectors of prompts, in their order.
        Raises InvalidRequestError: a prompt does not fit the model."""
        plain = [_plain_prompt(prompt) for prompt in prompts]
        found = await embed(self.generator, plain, options, param="prompt")
        return [EmbeddingOutput(one.vector.tolist(), one.num_tokens) for one in found]

    async def render(
        self,
        messages: Conversation,
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
    ) -> str:
        """The prompt of a conversation, which a thread renders if it is long.
        Raises InvalidRequestError: a message or an option is malformed."""
        try:
            checked = msgspec.convert(messages, Messages)
        except msgspec.ValidationError as error:
            raise InvalidRequestError(f"messages: {error}.", param="messages") from None
        return await self.generator.render(
            checked,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
        )

    def _answers(self, requests: list[TextRequest]) -> list[GrowingAnswer]:
        tokenizer = self.generator.text.tokenizer
        return [GrowingAnswer(request, tokenizer) for request in requests]


def _grammar(constraint: StructuredOutputsParams | None) -> FieldGrammar | None:
    """The grammar of a constraint. Raises InvalidRequestError: it is wrong; names its field."""
    if constraint is None:
        return None
    param = "structured_outputs"
    grammar = structured_grammar(msgspec.structs.asdict(constraint), param)
    return None if grammar is None else FieldGrammar(grammar, param)


def _plain_prompt(prompt: Prompt) -> str | Sequence[int]:
    if isinstance(prompt, Mapping):
        plain: str | Sequence[int] | None = prompt.get("prompt_token_ids", prompt.get("prompt"))
        if plain is None or prompt.keys() - {"prompt", "prompt_token_ids"}:
            raise InvalidRequestError(
                'a prompt given as a dict takes "prompt" or "prompt_token_ids".', param="prompt"
            )
        prompt = plain
    if isinstance(prompt, str):
        return prompt
    token_ids: list[int] = list(prompt)
    if not all(type(token_id) is int for token_id in token_ids):
        raise InvalidRequestError("a prompt is a string or a list of token ids.", param="prompt")
    return token_ids
