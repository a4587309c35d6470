# SPDX-License-Identifier: Apache-2.0
"""`LLM`: a model for plain scripts and notebooks, many prompts at a time."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

from pagoda.concurrency.async_utils import gather_all
from pagoda.concurrency.loop_thread import LoopThread
from pagoda.errors import refuse
from pagoda.llm.async_llm import AsyncLLM, Conversation, Prompt
from pagoda.llm.outputs import BeamSearchOutput, EmbeddingOutput, RequestOutput
from pagoda.messages.sampling_params import SamplingParams
from pagoda.telemetry.tracer import DEFAULT_DIRECTORY
from pagoda.text.beam_search import BeamSearchParams
from pagoda.text.embeddings import EmbeddingOptions
from pagoda.text.text_generator import TextRequest
from pagoda.text.tokenizers.tokenizer import Tokenizer

T = TypeVar("T")
Advance = Callable[[RequestOutput], None]


class LLM:
    """A model behind engine processes, one for each replica, for code without an event loop.

        with LLM() as llm:
            [output] = llm.generate(["Hello"], SamplingParams(max_tokens=8))
            print(output.outputs[0].text)

    All work is done in a thread with an event loop of its own, so it works in notebooks too. The engines end with
    `close`, with the `with` block, or with the program.
    """

    def __init__(
        self, model: str | None = None, *, chat_template: str | Path | None = None, **options: Any
    ) -> None:
        """`model` is a directory, GGUF file or hub id, or None for the embedded one; `chat_template` a Jinja file.

        `options` are those of `AsyncLLM`: the flags of `pagoda serve`.

        Raises ConfigError: there is no such model or option, an option has a value that is not allowed, or the
        model cannot be loaded.
        """
        self._llm = AsyncLLM(model, chat_template=chat_template, **options)
        self._thread = LoopThread("LLM")
        self._end = weakref.finalize(self, _end, self._llm, self._thread)
        try:
            self._thread.run(self._llm.start())
        except BaseException:
            self._end()
            raise

    def close(self) -> None:
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start_profile(self, level: str = "e2e", directory: str | Path = DEFAULT_DIRECTORY) -> None:
        """Traces all processes from now on, as `AsyncLLM.start_profile` does, until `stop_profile` or `close`."""
        self._thread.run(self._llm.start_profile(level, directory))

    def stop_profile(self) -> Path:
        """Ends the trace; returns its file, for ui.perfetto.dev or `pagoda trace report`."""
        return self._thread.run(self._llm.stop_profile())

    def get_tokenizer(self) -> Tokenizer:
        return self._llm.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        return self._llm.get_default_sampling_params()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] | None = None,
        lora_request: str | Sequence[str | None] | None = None,
    ) -> list[RequestOutput]:
        """Answers prompts, in their order.

        A prompt is a string, a list of token ids, `{"prompt": text}` or `{"prompt_token_ids": [...]}`.
        `sampling_params` is for all prompts or one for each; None takes the model's own. `use_tqdm` shows a
        progress bar, where standard error is a terminal or a notebook. `lora_request` names the adapter that
        answers all prompts, or one for each; None is the model alone. An answer that fails has `finish_reason`
        `error` and says why in `error`; the others are complete.

        Raises InvalidRequestError: a prompt or a parameter does not fit the model, or there is one prompt for
        several replicas; nothing was generated.
        """
        several = _prompt_list(prompts)
        self._check_prompts(len(several), "prompts")
        params = _for_each(sampling_params, len(several), "sampling_params")
        priorities = _for_each(priority, len(several), "priority")
        adapters = _adapter_for_each(lora_request, len(several))
        return self._complete_all(several, params, priorities, adapters, use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        lora_request: str | Sequence[str | None] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answers one conversation, or several in their order; `options` are those of `AsyncLLM.render`.

        `lora_request` is as in `generate`.

        Raises InvalidRequestError: a conversation or a parameter does not fit the model, or there is one for
        several replicas; nothing was generated.
        """
        conversations = _conversation_list(messages)
        self._check_prompts(len(conversations), "messages")
        renderings = [self._llm.render(conversation, **options) for conversation in conversations]
        prompts = self._thread.run(gather_all(renderings))
        params = _for_each(sampling_params, len(prompts), "sampling_params")
        adapters = _adapter_for_each(lora_request, len(prompts))
        return self._complete_all(
            prompts, params, [None] * len(prompts), adapters, use_tqdm, add_special_tokens=False
        )

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams
    ) -> list[BeamSearchOutput]:
        """The best beams behind each prompt, one prompt after the other.

        Raises InvalidRequestError: a prompt or a parameter does not fit the model."""

        async def search_all() -> list[BeamSearchOutput]:
            return [await self._llm.beam_search(prompt, params) for prompt in _prompt_list(prompts)]

        return self._thread.run(search_all())

    def embed(
        self, prompts: Prompt | Sequence[Prompt], options: EmbeddingOptions | None = None
    ) -> list[EmbeddingOutput]:
        """The vectors of prompts, in their order. Raises InvalidRequestError: a prompt does not fit the model."""
        several = _prompt_list(prompts)
        return self._thread.run(self._llm.embed(several, options or EmbeddingOptions()))

    def _check_prompts(self, count: int, param: str) -> None:
        if count == 1 and self._llm.num_replicas > 1:
            refuse(
                param,
                "has one entry, which one replica answers while the others of data_parallel_size="
                f"{self._llm.num_replicas} wait; give several, or take data_parallel_size=1",
            )

    def _complete_all(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams | None],
        priorities: Sequence[int | None],
        adapters: Sequence[str | None],
        shows_progress: bool,
        *,
        add_special_tokens: bool = True,
    ) -> list[RequestOutput]:
        llm = self._llm

        async def complete_all(advance: Advance) -> list[RequestOutput]:
            prepared = [
                await llm.prepare(
                    prompt,
                    one,
                    priority=priority or 0,
                    add_special_tokens=add_special_tokens,
                    lora_request=adapter,
                )
                for prompt, one, priority, adapter in zip(
                    prompts, params, priorities, adapters, strict=True
                )
            ]
            limits = llm.generator.endpoint.limits
            # Enough to keep the engine full; more would only wait there, and be refused past its limit.
            gate = asyncio.Semaphore(max(1, min(2 * limits.max_num_seqs, limits.max_num_waiting)))

            async def complete(requests: list[TextRequest]) -> RequestOutput:
                output = await llm.complete(requests, gate)
                advance(output)
                return output

            return await gather_all([complete(requests) for requests in prepared])

        with _progress(len(prompts), shown=shows_progress) as advance:
            return self._thread.run(complete_all(advance))


def _end(llm: AsyncLLM, thread: LoopThread) -> None:
    try:
        thread.run(llm.close())
    finally:
        thread.stop()


def _prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    several = list(prompts)
    if several and all(isinstance(item, int) for item in several):
        return [several]  # type: ignore[list-item]
    return several  # type: ignore[return-value]


def _conversation_list(messages: Conversation | Sequence[Conversation]) -> list[Conversation]:
    if messages and isinstance(messages[0], Mapping):
        return [messages]  # type: ignore[list-item]
    return list(messages)  # type: ignore[arg-type]


def _adapter_for_each(names: str | Sequence[str | None] | None, count: int) -> list[str | None]:
    if names is None or isinstance(names, str):
        return [names] * count
    if len(names) != count:
        refuse("lora_request", f"has {len(names)} entries for {count} prompts")
    return list(names)


def _for_each(values: T | Sequence[T] | None, count: int, name: str) -> list[T | None]:
    if not isinstance(values, Sequence):
        return [values] * count
    if len(values) != count:
        refuse(name, f"has {len(values)} entries for {count} prompts")
    return list(values)


@contextmanager
def _progress(total: int, *, shown: bool) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    visible = shown and (console.is_terminal or console.is_jupyter)
    tokens_column = TextColumn("{task.fields[tokens]} tokens")
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), tokens_column)
    with Progress(
        *columns, TimeRemainingColumn(), console=console, disable=not visible
    ) as progress:
        task = progress.add_task("Prompts", total=total, tokens=0)

        def advance(output: RequestOutput) -> None:
            tokens = sum(len(answer.token_ids) for answer in output.outputs)
            done = progress.tasks[0].fields["tokens"] + tokens
            progress.update(task, advance=1, tokens=done)

        yield advance
