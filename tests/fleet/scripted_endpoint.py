# SPDX-License-Identifier: Apache-2.0
"""An endpoint that says what a test tells it to, one byte a token."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import pairwise

import msgspec

from pagoda.errors import DeadlineError
from pagoda.fleet.endpoint import CacheListener, Health, ReplicaState, StepListener
from pagoda.messages.frontend import (
    EngineReady,
    FinishReason,
    GenerateRequest,
    KVSource,
    PromptLogprobs,
    TokenChunk,
    TokenLogprobs,
)
from pagoda.messages.load import LoadReport
from pagoda.messages.worker_config import Role
from pagoda.plugins.sim.model import sim_embedding, sim_logprob
from pagoda.text.model_text import synthetic_model_text

TEXT = synthetic_model_text()
[EOS] = TEXT.eos_token_ids
LIMITS = EngineReady(
    max_model_len=256,
    vocab_size=512,
    num_blocks=64,
    block_size=16,
    max_num_seqs=8,
    max_num_waiting=8,
    max_num_waiting_tokens=2**30,
    summary="scripted",
)


def _scores(request: GenerateRequest) -> PromptLogprobs | None:
    """The simulated model's log-probabilities of a prompt; each token is its only likely one."""
    num_top, prompt = request.work.sampling.prompt_logprobs, request.prompt_token_ids
    if num_top is None or len(prompt) < 2:
        return None
    logprobs = [sim_logprob(one, other) for one, other in pairwise(prompt)]
    return PromptLogprobs(
        1,
        num_top,
        array("i", [1] * len(logprobs)).tobytes(),
        array("i", [i for i in prompt[1:] for _ in range(num_top)]).tobytes(),
        array("f", [value for value in logprobs for _ in range(1 + num_top)]).tobytes(),
    )


class ScriptedEndpoint:
    """Answers with `answer`, then with the end-of-sequence token if there is room for it."""

    def __init__(
        self,
        answer: str | Callable[[GenerateRequest], str] = "ok",
        *,
        max_model_len: int = 256,
        role: Role = Role.NONE,
    ) -> None:
        self.answer = answer
        self.name = ""
        self.limits = msgspec.structs.replace(LIMITS, max_model_len=max_model_len, role=role)
        self.report: LoadReport | None = None
        """Answers `load` if it is set."""
        self.requests: list[GenerateRequest] = []
        self.ended: list[str] = []
        self.aborted: list[str] = []
        self.any_aborted = asyncio.Event()
        self.raises: Exception | None = None
        self.breaks_after: int | None = None
        self.late_after: int | None = None
        """Tokens after which the deadline of an answer has passed."""
        self.breaks_prompts = False
        """Requests without an answer fail."""
        self.num_cached_tokens = 0
        self.pause_after: int | None = None
        """Tokens after which an answer waits for `go_on`."""
        self.paused = asyncio.Event()
        self.go_on = asyncio.Event()
        self.healthy = Health(True)
        self.state = ReplicaState.READY
        self._listeners: list[Callable[[], None]] = []
        self.step_listeners: list[StepListener] = []

    def watch(self, listener: Callable[[], None]) -> Callable[[], None]:
        self._listeners.append(listener)
        return partial(self._listeners.remove, listener)

    def subscribe_cache(self, listener: CacheListener) -> Callable[[], None]:
        """It has none."""
        del listener
        return lambda: None

    def subscribe_steps(self, listener: StepListener) -> Callable[[], None]:
        self.step_listeners.append(listener)
        return partial(self.step_listeners.remove, listener)

    def change(self) -> None:
        """Tells that `state` or `limits` are others."""
        for listener in list(self._listeners):
            listener()

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        if self.raises is not None:
            raise self.raises
        self.requests.append(request)
        try:
            async for chunk in self._chunks(request):
                if chunk.finish_reason is not None:
                    self.ended.append(request.request_id)
                yield chunk
        finally:
            if request.request_id not in self.ended:
                self.aborted.append(request.request_id)
                self.any_aborted.set()

    async def _chunks(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        answer = self.answer if isinstance(self.answer, str) else self.answer(request)
        ids = list(answer.encode())
        if request.work.eos_token_ids:
            ids.append(EOS)
        limit = request.work.sampling.max_tokens
        held = None
        if request.holds_kv:
            limit = 1
            source = KVSource(address="tcp://10.0.0.1:5700", engine_id="e1", transfer_id="t1")
            yield TokenChunk(request.request_id, [], kv_source=source)
            held = msgspec.structs.replace(source, block_ids=(7,))
        scores = _scores(request)
        if scores is not None:  # in two chunks, of which the second repeats a position
            half = max(1, len(request.prompt_token_ids) // 2)
            sizes = 4 * half, 4 * half * scores.num_top, 4 * half * (1 + scores.num_top)
            columns = scores.ranks, scores.top_token_ids, scores.logprobs
            cut = [column[:size] for column, size in zip(columns, sizes, strict=True)]
            early = PromptLogprobs(1, scores.num_top, *cut)
            yield TokenChunk(request.request_id, [], prompt_logprobs=early)
            yield TokenChunk(request.request_id, [], prompt_logprobs=scores.since(half))
        if limit == 0 and self.breaks_prompts:
            yield TokenChunk(request.request_id, [], FinishReason.ERROR, error="It broke.")
            return
        if limit == 0:
            vector = sim_embedding(request.prompt_token_ids) if request.work.pooling else None
            end = FinishReason.LENGTH
            yield TokenChunk(request.request_id, [], end, embedding=vector)
        for count, token_id in enumerate(ids[:limit]):
            if count == self.late_after:
                raise DeadlineError
            if count == self.pause_after:
                self.paused.set()
                await self.go_on.wait()
            if count == self.breaks_after:
                yield TokenChunk(
                    request.request_id,
                    [],
                    FinishReason.ERROR,
                    error="It broke.",
                    blamed_field="" if request.grammar is None else "grammar",
                )
                return
            reason = FinishReason.LENGTH if count + 1 in (limit, len(ids)) else None
            if token_id in (*request.work.eos_token_ids, *request.work.sampling.stop_token_ids):
                reason = FinishReason.STOP
            yield TokenChunk(
                request.request_id,
                [token_id],
                reason,
                token_id if token_id in request.work.sampling.stop_token_ids else None,
                self._logprobs(request, token_id),
                self.num_cached_tokens,
                kv_source=held if reason is not None else None,
            )
            if reason is not None:
                return

    def _logprobs(self, request: GenerateRequest, token_id: int) -> list[TokenLogprobs] | None:
        count = request.work.sampling.logprobs
        if count is None:
            return None
        top = [(token_id + i) % 256 for i in range(count)]
        return [TokenLogprobs(-0.5, 1, top, [-0.5 - i for i in range(count)])]

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def works(self) -> dict[str, int]:
        return {}

    async def load(self) -> LoadReport:
        return self.report or LoadReport(num_running=len(self.requests))

    async def health(self) -> Health:
        return self.healthy

    def hold(self, body: str) -> AbstractContextManager[None]:
        del body
        return nullcontext()

    async def drain(self, timeout_s: float) -> None:
        del timeout_s

    async def close(self) -> None:
        pass
