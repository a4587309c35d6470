# SPDX-License-Identifier: Apache-2.0
"""Pagoda beside vLLM and llama.cpp: the same model, the same load, in turn on one machine.

`python -m benchmarks.cpu.peers MODEL_DIRECTORY [--vllm COMMAND] [--llama-python PYTHON]`, where the directory is
one that `benchmarks.cpu.random_model` wrote. Each round starts every system afresh, one at a time, and has prompts
of its own; the table has the medians of the rounds. A system that is not there is left out, and a line says why.
"""

from __future__ import annotations

import asyncio
import random
import re
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import App, Parameter

from benchmarks.cpu.processes import (
    NotThereError,
    ServerCommand,
    forget_files,
    resident_bytes,
    running,
)
from benchmarks.cpu.random_model import WEIGHTS_FILE
from pagoda.cli import output
from pagoda.cli.files import write_json
from pagoda.cli.options import GeneralOptions
from pagoda.errors import PagodaError
from pagoda.ipc.amounts import parse_bytes
from pagoda.ipc.machine import available_cores
from pagoda.plugins.bench.compare import CompareOptions, measure_server, prepare_server, problems
from pagoda.plugins.bench.datasets import Sample

Figures = dict[str, float]
"""Figures of one system in one round, by the names below."""
Samples = Mapping[int, Sequence[Sample]]
"""The requests of a round at each concurrency."""

READY, TTFT, TPOT = "ready, s", "TTFT at 1, ms", "TPOT at 1, ms"
MEMORY, OVERHEAD = "memory, GiB", "of weights + KV"
_GGUF_TYPES = ("bf16", "q8_0", "q4_0")
_MODEL_MEMORY = re.compile(r"([\d.]+ \w+) weights, ([\d.]+ \w+) KV cache")
_MAX_MODEL_LEN = 4096
_KV_BYTES_PER_TOKEN = 28 * 2 * 8 * 128 * 2
"""Bytes of Qwen3-0.6B: layers, K and V, heads, their size, bytes of a number."""

_app = App()


@dataclass(frozen=True)
class System:
    """One row of the table."""

    name: str
    measure: Callable[[Samples], Figures]
    is_pagoda: bool = False


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Settings that all systems have in common."""

    model: Path
    load: CompareOptions
    kv_gib: int
    logs: Path

    @property
    def files(self) -> list[Path]:
        return [path for path in self.model.iterdir() if path.is_file()]


@_app.default
def main(
    model: Path,
    *,
    pagoda: Annotated[tuple[str, ...], Parameter(negative=())] = (
        "",
        "--quantization int8",
        "--quantization int4",
    ),
    vllm: str | None = None,
    vllm_url: str = "http://127.0.0.1:9001",
    llama_python: str | None = None,
    rounds: int = 3,
    concurrency: str = "1,4,16",
    input_len: int = 256,
    output_len: int = 64,
    kv_gib: int = 1,
    output_file: Annotated[Path | None, Parameter(name=["--output", "--json"])] = None,
) -> None:
    """Measures.

    Args:
        model: A directory that benchmarks.cpu.random_model wrote, for llama.cpp with its GGUF files.
        pagoda: Further flags of a Pagoda server; may be given several times, a server each.
        vllm: The command that starts vLLM's server with this model.
        vllm_url: Where it answers then.
        llama_python: A Python interpreter that has llama-cpp-python.
        rounds: How often each system is started and measured.
        concurrency: Streams at once, separated by commas.
        input_len: Tokens in a prompt.
        output_len: Tokens of an answer.
        kv_gib: Size of the KV cache, in GiB; vLLM is told by VLLM_CPU_KVCACHE_SPACE.
        output_file: Write the figures of all rounds as JSON to this file too.
    """
    GeneralOptions().apply()
    if not (model / WEIGHTS_FILE).exists():
        sys.exit(
            f"{model} has no {WEIGHTS_FILE}; python -m benchmarks.cpu.random_model writes one."
        )
    load = CompareOptions(concurrency=concurrency, input_len=input_len, output_len=output_len)
    with tempfile.TemporaryDirectory(prefix="peers-") as logs:
        setting = Setting(model=model, load=load, kv_gib=kv_gib, logs=Path(logs))
        systems = [
            *(_pagoda(setting, flags) for flags in pagoda),
            _vllm(setting, vllm, vllm_url),
            *(_llama(setting, llama_python, kind) for kind in _GGUF_TYPES),
        ]
        measured = _measure(systems, load, rounds)
    console = output.stdout()
    columns = figure_names(load)
    medians = {system.name: median_figures(measured[system.name]) for system in systems}
    there = [system for system in systems if measured[system.name]]
    console.print(
        output.table(
            f"Medians of {rounds}: {input_len} tokens in, {output_len} out",
            ("", *columns),
            ((system.name, *_cells(medians[system.name], columns)) for system in there),
        )
    )
    console.print(
        output.table(
            "Ratios",
            ("", *columns),
            (
                (f"{ours.name} / {theirs.name}", *_cells(ratio, columns))
                for ours in there
                if ours.is_pagoda
                for theirs in there
                if not theirs.is_pagoda
                for ratio in [ratios(medians[ours.name], medians[theirs.name])]
            ),
        )
    )
    if output_file is not None:
        write_json(output_file, measured)


def _measure(
    systems: Sequence[System], load: CompareOptions, rounds: int
) -> dict[str, list[Figures]]:
    """The figures of each round; a system that fails once is not tried again."""
    measured: dict[str, list[Figures]] = {system.name: [] for system in systems}
    left = list(systems)
    rng = random.Random()
    for number in range(1, rounds + 1):
        samples = {c: load.samples(load.prompts_at(c), rng) for c in load.concurrencies()}
        for system in tuple(left):
            output.stderr().print(f"round {number} of {rounds}: {system.name}")
            try:
                measured[system.name].append(system.measure(samples))
            except PagodaError as error:
                output.stderr().print(f"{system.name} is skipped: {error}")
                left.remove(system)
    return measured


def _pagoda(setting: Setting, flags: str) -> System:
    name = " ".join(["pagoda", *shlex.split(flags)])

    def measure(samples: Samples) -> Figures:
        port = _free_port()
        command = [
            *[sys.executable, "-m", "pagoda", "serve", str(setting.model), "--port", str(port)],
            *["--max-model-len", str(_MAX_MODEL_LEN)],
            *["--kv-cache-memory-bytes", f"{setting.kv_gib}GiB", *shlex.split(flags)],
        ]
        server = ServerCommand(command=command, base_url=f"http://127.0.0.1:{port}")
        return _measure_server(setting, server, samples, _said_in)

    return System(name, measure, is_pagoda=True)


def _said_in(log: str) -> int | None:
    """Bytes of weights and KV cache, as Pagoda's start-up summary says them."""
    said = _MODEL_MEMORY.search(log)
    return sum(map(parse_bytes, said.groups())) if said else None


def _vllm(setting: Setting, command: str | None, base_url: str) -> System:
    weights = (setting.model / WEIGHTS_FILE).stat().st_size

    def measure(samples: Samples) -> Figures:
        if command is None:
            raise NotThereError("--vllm COMMAND says how to start it")
        server = ServerCommand(
            command=shlex.split(command),
            base_url=base_url,
            environment={"VLLM_CPU_KVCACHE_SPACE": str(setting.kv_gib)},
        )
        held = weights + setting.kv_gib * 2**30
        return _measure_server(setting, server, samples, lambda _: held)

    return System("vllm", measure)


def _measure_server(
    setting: Setting,
    server: ServerCommand,
    samples: Samples,
    model_bytes: Callable[[str], int | None],
) -> Figures:
    forget_files(setting.files)
    log = setting.logs / "log"
    with running(server, log) as process:
        figures = {READY: process.ready_s}
        figures |= asyncio.run(_ask(server.base_url, setting.load, samples))
        resident = sum(resident_bytes(process.pid))
    return figures | _memory(resident, model_bytes(log.read_text(errors="replace")))


async def _ask(base_url: str, load: CompareOptions, samples: Samples) -> Figures:
    server = await prepare_server(base_url, None, load, random.Random())
    figures: Figures = {}
    for concurrency, requests in samples.items():
        run = await measure_server(server, concurrency, requests, load)
        for problem in problems(load, [run]):
            output.stderr().print(problem)
        figures[_rate(concurrency)] = run.report.output_token_rate
        latencies = {TTFT: run.report.ttft_ms.median, TPOT: run.report.tpot_ms.median}
        if concurrency == 1:
            figures |= {name: value for name, value in latencies.items() if value is not None}
    return figures


def _llama(setting: Setting, python: str | None, kind: str) -> System:
    load = setting.load

    def measure(_: Samples) -> Figures:
        if python is None:
            raise NotThereError("--llama-python PYTHON names an interpreter with llama-cpp-python")
        file = next(setting.model.glob(f"*-{kind}.gguf"), None)
        if file is None:
            raise NotThereError(
                f"{setting.model} has no *-{kind}.gguf; benchmarks.cpu.random_model --gguf {kind} writes it"
            )
        forget_files([file])
        said = _run_llama(
            [
                *[python, str(Path(__file__).with_name("llama_stream.py")), str(file)],
                *["--threads", str(available_cores())],
                *["--input-len", str(load.input_len), "--output-len", str(load.output_len)],
                *["--requests", str(load.prompts_at(1))],
            ]
        )
        kv_bytes = (load.input_len + load.output_len) * _KV_BYTES_PER_TOKEN
        return _figures_of_llama(said, load) | _memory(
            said.resident_bytes, file.stat().st_size + kv_bytes
        )

    return System(f"llama.cpp {kind}, without a server", measure)


class _LlamaSaid(msgspec.Struct):
    """Record that llama_stream.py prints."""

    ready_s: float
    requests: list[tuple[float, float]]
    resident_bytes: int


def _run_llama(command: Sequence[str]) -> _LlamaSaid:
    try:
        done = subprocess.run(command, capture_output=True, check=False)
    except OSError as error:
        raise NotThereError(f"{command[0]} cannot be run: {error.strerror}") from error
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["it said nothing"]
        raise NotThereError(f"it ended with code {done.returncode}: {lines[-1]}")
    return msgspec.json.decode(done.stdout, type=_LlamaSaid)


def _figures_of_llama(said: _LlamaSaid, load: CompareOptions) -> Figures:
    firsts, rests = zip(*said.requests, strict=True)
    return {
        READY: said.ready_s,
        _rate(1): load.output_len * len(firsts) / (sum(firsts) + sum(rests)),
        TTFT: 1000 * statistics.median(firsts),
        TPOT: 1000 * statistics.median(rests) / max(1, load.output_len - 1),
    }


def _memory(resident: int, model_bytes: int | None) -> Figures:
    figures = {MEMORY: resident / 2**30}
    if model_bytes:
        figures[OVERHEAD] = resident / model_bytes
    return figures


def _rate(concurrency: int) -> str:
    return f"tokens/s at {concurrency}"


def figure_names(load: CompareOptions) -> list[str]:
    """The columns, in order."""
    return [*map(_rate, load.concurrencies()), TTFT, TPOT, READY, MEMORY, OVERHEAD]


def median_figures(rounds: Sequence[Figures]) -> Figures:
    """The median of each figure over the rounds that have it."""
    names = dict.fromkeys(name for figures in rounds for name in figures)
    return {
        name: statistics.median(figures[name] for figures in rounds if name in figures)
        for name in names
    }


def ratios(ours: Figures, theirs: Figures) -> Figures:
    """Ratios of the figures that both systems have."""
    return {name: value / theirs[name] for name, value in ours.items() if theirs.get(name)}


def _cells(figures: Figures, columns: Sequence[str]) -> list[str]:
    return [f"{figures[name]:,.2f}" if name in figures else "–" for name in columns]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


if __name__ == "__main__":
    _app()
