# SPDX-License-Identifier: Apache-2.0
"""Workers that say what cannot be: the engine replaces them, and every request gets its whole answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from harness import VOCAB_SIZE, Harness, make_request
from mutated_messages import lies

from pagoda.executor.base import ExecutorEvent, WorkerLost
from pagoda.ipc.clock import VirtualClock
from pagoda.ipc.codec import Codec
from pagoda.messages.frontend import GenerateRequest, Pooling, Work
from pagoda.messages.worker import StepResult, WorkerMessage, WorkerReady
from pagoda.plugins.sim.executor import SimExecutor

MAX_TOKENS = 4
_codec = Codec[WorkerMessage](WorkerMessage)


class LyingExecutor:
    """A simulated executor, one of whose messages is another one: as the group of workers reads it."""

    def __init__(self, inner: SimExecutor, number: int, kind: type, lie: bytes | None) -> None:
        self._inner = inner
        self._left = number
        self._kind = kind
        self._lie = lie
        self.truth: object = None
        self.was_lost = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def poll(self) -> list[ExecutorEvent]:
        return [self._told(event) for event in self._inner.poll()]

    def _told(self, event: ExecutorEvent) -> ExecutorEvent:
        if not isinstance(event, self._kind):
            return event
        self._left -= 1
        if self._left:
            return event
        self.truth = event
        if self._lie is None:
            return event
        try:
            told = _codec.decode(self._lie)
        except msgspec.DecodeError:
            self._inner.close()
            self.was_lost = True
            return WorkerLost("a worker sent what is not a message", suspicion=0)
        assert isinstance(told, StepResult | WorkerReady)
        return told


def requests() -> list[GenerateRequest]:
    """Requests that ask for all that a result may bring."""
    plain = make_request("plain", [1, 2, 3], max_tokens=MAX_TOKENS)
    sampling = msgspec.structs.replace(plain.work.sampling, logprobs=2, prompt_logprobs=1)
    scored = msgspec.structs.replace(plain, request_id="scored", work=Work(sampling))
    nothing = msgspec.structs.replace(plain.work.sampling, max_tokens=0)
    pooled = msgspec.structs.replace(
        plain, request_id="pooled", work=Work(nothing, pooling=Pooling.LAST)
    )
    return [plain, scored, pooled]


def life(number: int, kind: type, lie: bytes | None) -> tuple[Harness, LyingExecutor]:
    made: list[LyingExecutor] = []

    def wrap(inner: SimExecutor, _: VirtualClock) -> LyingExecutor:
        made.append(LyingExecutor(inner, number, kind, lie))
        return made[0]

    harness = Harness(wrap=wrap)  # type: ignore[arg-type]
    for request in requests():
        harness.add(request, steps=False)
    harness.run()
    return harness, made[0]


@pytest.mark.parametrize(
    "change",
    [
        lambda result: result,
        lambda result: msgspec.structs.replace(result, errors={0: "broken"}),
    ],
)
def test_every_request_is_answered_whatever_a_result_says(
    change: Callable[[StepResult], StepResult],
) -> None:
    for number in (1, 2):
        _, executor = life(number, StepResult, None)
        assert isinstance(executor.truth, StepResult)
        restarts = 0
        for lie in lies(change(executor.truth)):
            harness, _ = life(number, StepResult, lie)
            for request in requests():
                end = harness.finished[request.request_id]
                tokens = harness.tokens[request.request_id]
                assert all(0 <= token < VOCAB_SIZE for token in tokens)
                if end.error is None and request.work.pooling is None:
                    assert len(tokens) == MAX_TOKENS
            restarts += harness.core.load().num_worker_restarts
        assert restarts > 100


class _Forgetful:
    """A simulated executor that never gives log-probabilities of what it samples."""

    def __init__(self, inner: SimExecutor) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def poll(self) -> list[ExecutorEvent]:
        return [
            msgspec.structs.replace(event, logprobs={}) if isinstance(event, StepResult) else event
            for event in self._inner.poll()
        ]


def test_a_request_that_no_worker_has_a_right_result_for_fails_alone() -> None:
    def wrap(inner: SimExecutor, _: VirtualClock) -> Any:
        return _Forgetful(inner)

    harness = Harness(wrap=wrap)
    for request in requests():
        harness.add(request, steps=False)
    harness.run()
    errors = {name: end.error for name, end in harness.finished.items()}
    assert errors["scored"]
    assert (errors["plain"], errors["pooled"]) == (None, None)
    assert len(harness.tokens["plain"]) == MAX_TOKENS


def test_a_worker_that_comes_back_as_another_one_is_replaced() -> None:
    harness, executor = life(1, WorkerReady, None)
    assert isinstance(executor.truth, WorkerReady)
    for field in ("num_blocks", "block_size", "vocab_size"):
        wrong = msgspec.structs.replace(executor.truth, **{field: 2})
        made: list[_Returning] = []

        def wrap(
            inner: SimExecutor, _: VirtualClock, wrong: WorkerReady = wrong, made: Any = made
        ) -> _Returning:
            made.append(_Returning(inner, wrong))
            return made[0]  # type: ignore[no-any-return]

        harness = Harness(wrap=wrap)  # type: ignore[arg-type]
        harness.add(requests()[0], steps=False)
        harness.run()
        assert harness.core.load().num_worker_restarts == 2
        assert len(harness.tokens["plain"]) == MAX_TOKENS


class _Returning:
    """A simulated executor whose first worker is lost, and comes back as another one."""

    def __init__(self, inner: SimExecutor, wrong: WorkerReady) -> None:
        self._inner = inner
        self._wrong = wrong
        self._num_readies = 0
        self._num_results = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def poll(self) -> list[ExecutorEvent]:
        events = self._inner.poll()
        for index, event in enumerate(events):
            if isinstance(event, StepResult):
                self._num_results += 1
                if self._num_results == 1:
                    self._inner.close()
                    return [*events[:index], WorkerLost("gone")]
            if isinstance(event, WorkerReady):
                self._num_readies += 1
                if self._num_readies == 2:
                    return [*events[:index], self._wrong]
        return events
