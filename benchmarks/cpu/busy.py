# SPDX-License-Identifier: Apache-2.0
"""Share of the time in which a worker computes: `python -m benchmarks.cpu.busy [--model NAME] [--streams 1 16]`.

The engine's loop runs in this process, the worker in one of its own, as behind `pagoda serve`; there is no
frontend. Requests of 16 prompt tokens begin together and answer without an end. A worker is busy unless it has no
plan (`StepResult.idle_time_s`); it is in its kernels during the forward pass and sampling of a step
(`forward_time_s`, `sample_time_s`). Decoding is watched in windows of equal numbers of steps; medians over windows
are shown with their quartiles.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zmq

from pagoda.checkpoints.resolve import resolve_model
from pagoda.cli import output
from pagoda.engine.core import EngineCore
from pagoda.executor.base import ExecutorEvent
from pagoda.executor.group import GroupExecutor
from pagoda.executor.launcher import LocalLauncher
from pagoda.ipc.clock import MonotonicClock
from pagoda.messages.engine_config import EngineConfig
from pagoda.messages.frontend import GenerateRequest, Grammar, Work
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.worker import StepResult
from pagoda.messages.worker_config import WorkerConfig

_PROMPT = 16
_GREEDY: dict[str, Any] = {"temperature": 0.0}
_SAMPLED: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "top_k": 20}
_KINDS: dict[str, tuple[dict[str, Any], Grammar | None]] = {
    "greedy": (_GREEDY, None),
    "sampled": (_SAMPLED, None),
    "constrained": (_SAMPLED, Grammar("regex", "(?s:.){1,100000}")),
}
_WARM_UP_STEPS = 32


class _Watched(GroupExecutor):
    """Keeps the results of steps, with the times at which they came."""

    results: list[tuple[float, StepResult]]

    def poll(self) -> list[ExecutorEvent]:
        events = super().poll()
        now = time.perf_counter()
        self.results += [(now, event) for event in events if isinstance(event, StepResult)]
        return events


def main() -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=None, help="by default the embedded model")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--kinds", nargs="+", choices=_KINDS, default=list(_KINDS))
    parser.add_argument("--windows", type=int, default=9)
    parser.add_argument("--steps", type=int, default=100, help="steps of a window")
    options = parser.parse_args()
    if options.windows < 2:
        parser.error("--windows must be at least 2, of which there are quartiles")
    with _engine(options) as core:
        rows = [
            (kind, str(streams), *_measure(core, kind, streams, options))
            for kind in options.kinds
            for streams in options.streams
        ]
    columns = (
        "answers",
        "streams",
        "busy",
        "in kernels",
        "tokens/s",
        "step",
        "forward",
        "sampling",
    )
    output.stdout().print(output.table("", columns, rows))


@contextmanager
def _engine(options: argparse.Namespace) -> Iterator[EngineCore]:
    model = resolve_model(options.model, load_format=options.load_format).model
    worker = WorkerConfig(
        model=str(model),
        load_format=options.load_format,
        dtype=options.dtype,
        quantization=options.quantization,
        num_threads=options.threads,
        max_model_len=2048,
        num_blocks=64 * 64,
        max_num_seqs=max(options.streams),
    )
    config = EngineConfig(
        worker=worker, max_num_seqs=max(options.streams), enable_prefix_caching=False
    )
    with tempfile.TemporaryDirectory() as directory:
        executor = _Watched(
            worker,
            LocalLauncher(),
            address=f"ipc://{Path(directory) / 'worker'}",
            step_timeout_s=60,
            clock=(clock := MonotonicClock()),
        )
        executor.results = []
        core = EngineCore(config, executor, clock)
        try:
            while not core.is_worker_ready:
                _turn(core)
            yield core
        finally:
            core.close()


def _turn(core: EngineCore) -> int:
    """One turn of an engine's loop; returns the tokens that came."""
    wakeup = core.next_wakeup()
    timeout = -1 if wakeup is None else max(0, math.ceil((wakeup - time.monotonic()) * 1e3))
    sources: list[Any] = list(core.pollables())
    zmq.zmq_poll([(source, zmq.POLLIN) for source in sources], timeout)
    chunks = core.step()
    for chunk in chunks:
        if chunk.error is not None:
            raise RuntimeError(chunk.error)
    return sum(len(chunk.token_ids) for chunk in chunks)


def _measure(
    core: EngineCore, kind: str, streams: int, options: argparse.Namespace
) -> tuple[str, ...]:
    changes, grammar = _KINDS[kind]
    for number in range(streams):
        sampling = SamplingParams(seed=number, max_tokens=2000, ignore_eos=True, **changes)
        prompt = [1 + (number * 7 + i) % 200 for i in range(_PROMPT)]
        request = GenerateRequest(
            request_id=str(number), prompt_token_ids=prompt, work=Work(sampling), grammar=grammar
        )
        if refusal := core.add(request):
            raise RuntimeError(f"A request was refused: {refusal}")
    executor = core.executor
    if not isinstance(executor, _Watched):
        raise TypeError("The engine is not watched.")
    executor.results.clear()
    core.step()
    while len(executor.results) < _WARM_UP_STEPS:
        _turn(core)
    busy, in_kernels, rates, steps, forward, sampling_times = [], [], [], [], [], []
    for _ in range(options.windows):
        executor.results.clear()
        tokens, began = 0, time.perf_counter()
        while len(executor.results) < options.steps:
            tokens += _turn(core)
        rates.append(tokens / (time.perf_counter() - began))
        (first, _), (last, _) = executor.results[0], executor.results[-1]
        results = [result for _, result in executor.results[1:]]
        forward.append(statistics.median(result.forward_time_s for result in results) * 1e6)
        sampling_times.append(statistics.median(result.sample_time_s for result in results) * 1e6)
        computed = sum(result.forward_time_s + result.sample_time_s for result in results)
        idle = sum(result.idle_time_s for result in results)
        busy.append(1 - idle / (last - first))
        in_kernels.append(computed / (last - first))
        steps.append((last - first) / len(results) * 1e6)
    for number in range(streams):
        core.abort(str(number))
    while core.scheduler is not None and core.scheduler.in_flight:
        _turn(core)
    return (
        _spread(busy, "{:.3f}"),
        _spread(in_kernels, "{:.3f}"),
        _spread(rates, "{:,.0f}"),
        _spread(steps, "{:,.0f} µs"),
        _spread(forward, "{:,.0f} µs"),
        _spread(sampling_times, "{:,.0f} µs"),
    )


def _spread(values: list[float], form: str) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{form.format(middle)} ({form.format(low)}–{form.format(high)})"


if __name__ == "__main__":
    main()
