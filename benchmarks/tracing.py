# SPDX-License-Identifier: Apache-2.0
"""Cost of tracing: `python -m benchmarks.tracing [span|tiny|large ...] [--rounds N]`.

A span that is off is timed in a loop beside an empty one. Throughput is that of one running server, which
`POST /profile/start` and `stop` have trace or not, in turn: nothing else changes between two runs. A ratio is
taken within a round, so that what else the machine does falls on both alike; the median of all rounds counts, its
quartiles are shown. The processor time of all of the server's processes for a token is compared as well: it tells
small differences better, and says nothing of who waits for whom.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from random import Random

import psutil

from benchmarks.figure import Figure
from pagoda.cli import output
from pagoda.cli.openai_client import OpenAIClient
from pagoda.cli.server_process import ServerProcess, server_process
from pagoda.errors import ConfigError
from pagoda.plugins.bench.compare import CompareOptions, Server, measure_server, prepare_server
from pagoda.telemetry.tracer import TraceLevel, Tracer, TraceSession

_SPANS = 200_000
_TRACED_SPANS = 20_000
_REPEATS = 15
_OFF = "off"
_TARGETS = {"e2e": 0.99, "kernel": 0.97}
"""Least throughput, as a share of that without tracing."""


@dataclass(frozen=True)
class _Setting:
    """A server and what it is asked."""

    what: str
    arguments: Sequence[str]
    load: CompareOptions


_SETTINGS = {
    "tiny": _Setting(
        "pagoda-tiny, 16 streams",
        [],
        CompareOptions(
            concurrency="16", input_len=64, output_len=256, num_prompts=32, num_warmups=8
        ),
    ),
    "large": _Setting(
        "shape of Qwen3-0.6B, 16 streams",
        ["qwen3-0.6b", "--load-format", "dummy", "--max-model-len", "2048"],
        CompareOptions(
            concurrency="16", input_len=64, output_len=32, num_prompts=16, num_warmups=2
        ),
    ),
}


def main() -> None:
    """Measures what is named, by default all, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = ("span", *_SETTINGS)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(names))
    parser.add_argument("--rounds", type=int, default=15, help="of each server (15)")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.names) - set(names))
    if unknown:
        parser.error(f"no measurement {unknown[0]}; there are {', '.join(names)}")
    figures: list[Figure] = []
    for name in arguments.names or names:
        output.stderr().print(f"measuring {name} ...")
        if name == "span":
            figures += _measure_spans()
        else:
            figures += _measure_server(name, arguments.rounds)
    rows = [(f.what, f.measured, f.target, f.command) for f in figures]
    output.stdout().print(output.table("", ("what", "measured", "target", "command"), rows))


# ---- one span


def _measure_spans() -> list[Figure]:
    tracer = Tracer("benchmark")
    off = _cost_of_span(tracer, _SPANS)
    with tempfile.TemporaryDirectory() as directory:
        tracer.start(TraceSession(level=TraceLevel.E2E, directory=directory, run="benchmark"))
        on = _cost_of_span(tracer, _TRACED_SPANS)
        tracer.stop()
    command = "python -m benchmarks.tracing span"
    return [
        Figure("a span while tracing is off", f"{off:.0f} ns", "≤ 100 ns", command),
        Figure("a span while tracing is on", f"{on:.0f} ns", "–", command),
    ]


def _cost_of_span(tracer: Tracer, count: int) -> float:
    """Nanoseconds, without those of the loop around it."""
    empty = min(_time(lambda: _loop(count)) for _ in range(_REPEATS))
    spans = min(_time(lambda: _span_loop(tracer, count)) for _ in range(_REPEATS))
    return (spans - empty) / count * 1e9


def _time(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _loop(count: int) -> None:
    for _ in repeat(None, count):
        pass


def _span_loop(tracer: Tracer, count: int) -> None:
    for _ in repeat(None, count):
        began = tracer.e2e()
        if began:
            tracer.span("span", began, {"step": 1, "tokens": 17})


# ---- a server


@dataclass(frozen=True)
class _Measured:
    """One run."""

    tokens_per_s: float
    processor_s_per_token: float


def _measure_server(name: str, rounds: int) -> list[Figure]:
    setting = _SETTINGS[name]
    with tempfile.TemporaryDirectory() as directory:
        traced = ["--profile-dir", directory, "--log-level", "warning"]
        with server_process([*setting.arguments, *traced]) as server:
            runs = asyncio.run(_take_turns(server, setting.load, rounds))
        _check_fragments(Path(directory))
    command = f"python -m benchmarks.tracing {name}"
    plain = statistics.median(run.tokens_per_s for run in runs[_OFF])
    figures = [Figure(f"{setting.what}, no tracing", f"{plain:,.0f} tokens/s", "–", command)]
    for level, target in _TARGETS.items():
        pairs = list(zip(runs[level], runs[_OFF], strict=True))
        rates = [traced.tokens_per_s / off.tokens_per_s for traced, off in pairs]
        costs = [traced.processor_s_per_token / off.processor_s_per_token for traced, off in pairs]
        figures += [
            Figure(f"{setting.what}, {level}: throughput", _spread(rates), f"≥ {target}", command),
            Figure(f"{setting.what}, {level}: processor time", _spread(costs), "–", command),
        ]
    return figures


async def _take_turns(
    server: ServerProcess, load: CompareOptions, rounds: int
) -> dict[str, list[_Measured]]:
    """Runs at each level; in every round another one is first."""
    rng = Random(0)
    asked = await prepare_server(server.base_url, None, load, rng)
    root = psutil.Process(server.pid)
    processes = [root, *root.children(recursive=True)]
    levels = [_OFF, *_TARGETS]
    runs: dict[str, list[_Measured]] = {level: [] for level in levels}
    for number in range(rounds):
        first = number % len(levels)
        for level in levels[first:] + levels[:first]:
            runs[level].append(await _run(asked, processes, load, rng, level))
    return runs


async def _run(
    server: Server,
    processes: Sequence[psutil.Process],
    load: CompareOptions,
    rng: Random,
    level: str,
) -> _Measured:
    (concurrency,) = load.concurrencies()
    samples = load.samples(load.prompts_at(concurrency), rng)
    async with OpenAIClient(server.base_url) as client:
        if level != _OFF:
            await _order(client, "start", {"level": level})
        before = sum(map(_processor_s, processes))
        report = (await measure_server(server, concurrency, samples, load)).report
        used = sum(map(_processor_s, processes)) - before
        if level != _OFF:
            await _order(client, "stop", {})
    if report.failed:
        raise ConfigError(f"{report.failed} requests failed: {json.dumps(report.errors)}")
    return _Measured(report.output_token_rate, used / report.output_tokens)


async def _order(client: OpenAIClient, what: str, body: dict[str, object]) -> None:
    status, reply = await client.post_raw(f"/profile/{what}", body)
    if status != 200:
        raise ConfigError(f"/profile/{what} gave status {status}: {reply.decode()[:200]}")


def _processor_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _check_fragments(directory: Path) -> None:
    """Raises ConfigError unless every process of the server has left a fragment, so that tracing was measured."""
    roles = ("frontend", "engine", "worker")
    found = [path.name for path in directory.iterdir()]
    missing = [role for role in roles if not any(role in name for name in found)]
    if missing:
        raise ConfigError(f"no trace of {', '.join(missing)} was written")


def _spread(values: Sequence[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.3f}"
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.3f} (quartiles {low:.3f}–{high:.3f}, {len(values)} rounds)"


if __name__ == "__main__":
    main()
