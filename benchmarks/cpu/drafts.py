# SPDX-License-Identifier: Apache-2.0
"""Tokens a second with a drafter of known acceptance, against the times of steps.

`python -m benchmarks.cpu.drafts [--acceptance 0.8] [--most 4]`. An engine in this process and
a worker of its own answer one request with random weights. The answer is known from a run without drafts, so a
drafter can propose it, with each token wrong by chance: what an ideal drafter of that acceptance would win. Steps
with k drafts each are timed. These times, and which drafts are right, say how fast the answer could come with any
fixed k; beside it stands what the engine reaches, which does not know the acceptance and chooses k in each step.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zmq
from cyclopts import App

from benchmarks.drafters import AlwaysPays, FunctionDrafter
from pagoda.cli import output
from pagoda.engine.core import EngineCore
from pagoda.engine.drafting.speculator import Speculator
from pagoda.engine.drafting.step_costs import StepCosts
from pagoda.executor.group import GroupExecutor
from pagoda.executor.launcher import LocalLauncher
from pagoda.ipc.clock import MonotonicClock
from pagoda.ipc.machine import available_cores
from pagoda.ipc.rundir import WORKER_SOCKET, socket_address
from pagoda.messages.engine_config import EngineConfig
from pagoda.messages.frontend import GenerateRequest, TokenChunk, Work
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.worker_config import WorkerConfig

_PROMPT = 64
_SKIPPED = 8
"""First steps of an answer that do not count."""
_app = App()


@_app.default
def main(
    *,
    model: str = "qwen3-0.6b",
    quantization: str = "int8",
    acceptance: float = 0.8,
    most: int = 4,
    tokens: int = 384,
    rounds: int = 3,
) -> None:
    """Measures.

    Args:
        model: A shape preset.
        quantization: Of weights: none, int8 or int4.
        acceptance: Chance that a draft is right if those before it are.
        most: Drafts of a step at most.
        tokens: Of an answer.
        rounds: Runs of each kind, in turn; medians count.
    """
    with tempfile.TemporaryDirectory(prefix="drafts-") as directory:
        engine = _Engine(model, quantization, tokens, Path(directory))
        try:
            _measure(engine, acceptance, most, rounds)
        finally:
            engine.close()


def _measure(engine: _Engine, acceptance: float, most: int, rounds: int) -> None:
    answer, _ = engine.answer(None)
    lots = random.Random(0)
    right = [lots.random() < acceptance for _ in answer]
    proposed = [it if is_right else it + 1 for it, is_right in zip(answer, right, strict=True)]
    fixed: dict[int, list[float]] = {k: [] for k in range(most + 1)}
    plain, reached = list[float](), list[float]()
    for _ in range(rounds):
        plain.append(engine.answer(None)[1])
        for k, times in fixed.items():
            costs = _Timed()
            engine.answer(Speculator(_known(proposed, k), max(1, k), costs))
            times.append(statistics.median(costs.times[_SKIPPED:]))
        speculator = Speculator(_known(proposed, most), most, StepCosts())
        found, rate = engine.answer(speculator)
        if found != answer:
            raise SystemExit("Drafts changed the answer.")
        reached.append(rate)
    seconds = {k: statistics.median(times) for k, times in fixed.items()}
    best = {k: len(answer) / (_num_steps(right, k) * seconds[k]) for k in fixed}
    rows = [
        (
            f"{k} drafts",
            f"{seconds[k] * 1e3:.1f} ms",
            f"{seconds[k] / seconds[0]:.2f}",
            f"{best[k]:.1f}",
        )
        for k in fixed
    ]
    console = output.stdout()
    console.print(output.table("", ("", "step", "t(1 + k) / t(1)", "tokens/s at best"), rows))
    rate, limit = statistics.median(reached), max(best.values())
    console.print(
        f"without drafts {statistics.median(plain):.1f} tokens/s; with {rate:.1f}, {rate / limit:.0%} of the best"
    )


def _num_steps(right: Sequence[bool], most: int) -> int:
    """Steps in which an answer is said whose tokens are drafted rightly or not, with so many drafts in each."""
    place = count = 0
    while place < len(right):
        count += 1
        accepted = 0
        while accepted < most and place + accepted < len(right) and right[place + accepted]:
            accepted += 1
        place += accepted + 1
    return count


class _Timed(AlwaysPays):
    """Keeps the times of steps."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def observe(self, num_tokens: int, seconds: float) -> None:
        super().observe(num_tokens, seconds)
        self.times.append(seconds)


def _known(answer: list[int], most: int) -> FunctionDrafter:
    """Proposes at most `most` tokens of an answer, as far as it is known."""
    return FunctionDrafter(
        lambda request: answer[request.num_output_tokens : request.num_output_tokens + most]
    )


class _Engine:
    def __init__(self, model: str, quantization: str, tokens: int, directory: Path) -> None:
        worker = WorkerConfig(
            model=model,
            load_format="dummy",
            quantization=quantization,
            max_model_len=_PROMPT + tokens + 64,
            max_num_seqs=2,
            num_blocks=(_PROMPT + tokens) // 16 + 16,
            num_threads=available_cores(),
        )
        config = EngineConfig(worker=worker, max_num_seqs=2, enable_prefix_caching=False)
        clock = MonotonicClock()
        executor = GroupExecutor(
            worker,
            LocalLauncher(),
            address=socket_address(directory, WORKER_SOCKET),
            step_timeout_s=config.step_timeout_s,
            clock=clock,
        )
        self._core = EngineCore(config, executor, clock)
        self._num_tokens, self._num_asked = tokens, 0
        while self._core.parts is None:
            self._turn()

    def answer(self, speculator: Speculator | None) -> tuple[list[int], float]:
        """The answer to the one request, and its tokens a second."""
        scheduler = self._core.scheduler
        if scheduler is None:
            raise RuntimeError("The worker is not ready.")
        scheduler.batcher.speculator = speculator
        self._num_asked += 1
        sampling = SamplingParams(seed=1, temperature=1.0, max_tokens=self._num_tokens)
        request = GenerateRequest(
            request_id=str(self._num_asked),
            prompt_token_ids=list(range(_PROMPT)),
            work=Work(sampling),
        )
        answer, stamps = list[int](), list[float]()
        self._core.add(request)
        while len(answer) < self._num_tokens:
            for chunk in self._turn():
                answer.extend(chunk.token_ids)
                stamps.extend([time.perf_counter()] * len(chunk.token_ids))
        rate = (len(answer) - 1 - _SKIPPED) / (stamps[-1] - stamps[_SKIPPED])
        return answer, rate

    def _turn(self) -> list[TokenChunk]:
        """One turn of the engine's loop."""
        sources: list[Any] = self._core.pollables()
        zmq.zmq_poll([(source, zmq.POLLIN) for source in sources], 100)
        return self._core.step()

    def close(self) -> None:
        self._core.close()


if __name__ == "__main__":
    _app()
