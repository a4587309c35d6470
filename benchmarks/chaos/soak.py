# SPDX-License-Identifier: Apache-2.0
"""A long mixed load, after which no process has more memory, descriptors or threads.

`python -m benchmarks.chaos.soak [--minutes M] [--rate R] [--embedded]` runs one of the two servers alone, and
prints a line a minute.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from benchmarks.chaos.load import load_of
from benchmarks.chaos.mixed_load import Counts, mixed_load
from benchmarks.chaos.trial import Outcome, Trial
from benchmarks.chaos.vitals import Vitals, vitals
from pagoda.checkpoints.resolve import resolve_model
from pagoda.cli import output
from pagoda.cli.server_process import server_process

_MINUTES = 60.0
_WARM_UP_SHARE = 1 / 6
"""Share of the time before memory is watched: 10 of 60 minutes."""
_LARGEST_SLOPE = 1.0
"""MiB a minute."""
_SAMPLES = 200
_SETTLING_S = 20.0
"""The longest time that a server may take to close what its clients have left."""
_LATE_THREADS = 8
_LATE_DESCRIPTORS = 4
"""Threads and descriptors that a process may still get: pools begin with the first work of their kind."""


@dataclass(frozen=True)
class Server:
    """A server to be loaded."""

    name: str
    arguments: tuple[str, ...]
    clients: int
    rate: float
    """Requests per second."""
    longer: int = 1
    """Factor of the usual lengths of answers."""


SIMULATED = Server(
    "simulated",
    (
        "--executor",
        "sim",
        "--sim-base-ms",
        "4",
        "--max-num-seqs",
        "320",
        "--num-kv-blocks",
        "16384",
    ),
    clients=320,
    rate=140.0,
    longer=16,
)
EMBEDDED = Server(
    "pagoda-tiny",
    ("--num-kv-blocks", "512", "--kv-host-bytes", "8MiB"),
    clients=64,
    rate=20.0,
)
_LEAST_TOKENS_PER_S = 30_000
"""Tokens per second of the simulated executor."""
_SHORT_S = 2.0
_SHORT_RATE = 40.0


@dataclass(frozen=True)
class Run:
    """Figures of one server under load."""

    server: str
    minutes: float
    answered: int
    tokens_per_s: float
    errors: tuple[str, ...]
    log_problems: tuple[str, ...]
    slopes: dict[str, float]
    """MiB a minute of each process, by least squares, behind the warm-up."""
    kept: tuple[str, ...]
    """Processes that have more descriptors or threads in the end than behind the warm-up."""
    left_over: tuple[str, ...]
    """Processes and temporary files that the server has left behind."""

    @property
    def is_clean(self) -> bool:
        return not (self.errors or self.log_problems or self.kept or self.left_over)

    @property
    def steepest(self) -> tuple[str, float]:
        """The process whose memory grew fastest, and its slope in MiB a minute."""
        return max(self.slopes.items(), key=lambda item: item[1])

    def words(self) -> str:
        """Figures in words, for the table."""
        process, slope = self.steepest
        faults = [*self.errors, *self.log_problems, *self.kept, *self.left_over]
        told = f"; {'; '.join(faults)[:300]}" if faults else ""
        return (
            f"{self.server}: {self.minutes:.0f} minutes, {self.answered:,} answers, "
            f"{self.tokens_per_s:,.0f} tokens/s; steepest memory {slope:+.2f} MiB/min ({process}); "
            f"{len(self.errors)} errors; descriptors and threads {'grew' if self.kept else 'as before'}{told}"
        )


def soak(
    server: Server, seconds: float, rate: float, tell: Callable[[str], None] = lambda _: None
) -> Run:
    """Loads a server of its own for `seconds` and watches it."""
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "log"
        tiers = ["--kv-disk-path", f"{directory}/kv", "--kv-disk-bytes", "64MiB"]
        template = Path(directory) / "template.jinja"
        template.write_text(_template_with_tools(), encoding="utf-8")
        arguments = [*server.arguments, *([] if server is SIMULATED else tiers), "--any-model-name"]
        arguments += ["--response-store-bytes", "2MiB", "--chat-template", str(template)]
        with (
            log.open("wb") as stderr,
            _own_temporary_files(Path(directory, "tmp")) as temporary,
            server_process(arguments, stderr=stderr.fileno()) as process,
        ):
            load = partial(mixed_load, process.base_url, server.clients, rate, server.longer)
            seen = _watch(load, process.base_url, process.pid, seconds, tell)
            children = psutil.Process(process.pid).children(recursive=True)
        _, alive = psutil.wait_procs(children, timeout=5)
        left = [f"process {child.pid} lives" for child in alive]
        left += [f"{path.name} is left" for path in temporary.iterdir()]
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        problems = [line[:200] for line in lines if " ERROR " in line or "Traceback" in line]
    warm = seen.samples[int(len(seen.samples) * _WARM_UP_SHARE) :]
    return Run(
        server=server.name,
        minutes=seconds / 60,
        answered=sum(count.answered for count in seen.counts),
        tokens_per_s=seen.tokens_per_s,
        errors=tuple(error for count in seen.counts for error in count.errors),
        log_problems=tuple(problems[:5]),
        slopes={name: _slope([(at, all_[name]) for at, all_ in warm]) for name in warm[0][1]},
        kept=tuple(_grown(seen.before, seen.after)),
        left_over=tuple(left),
    )


@contextmanager
def _own_temporary_files(directory: Path) -> Iterator[Path]:
    """Processes that start in the context have their run directories and other temporary files in `directory`."""
    before = os.environ.get("TMPDIR")
    directory.mkdir()
    os.environ["TMPDIR"] = str(directory)
    try:
        yield directory
    finally:
        os.environ.pop("TMPDIR")
        if before is not None:
            os.environ["TMPDIR"] = before


def _template_with_tools() -> str:
    """The template of pagoda-tiny, also for the simulated model, whose own knows no tools."""
    config = json.loads(Path(resolve_model(None).model, "tokenizer_config.json").read_bytes())
    return str(config["chat_template"])


_Sample = tuple[float, dict[str, Vitals]]


@dataclass(frozen=True)
class _Seen:
    samples: list[_Sample]
    """Vitals under load, by the minute."""
    counts: list[Counts]
    tokens_per_s: float
    before: dict[str, Vitals]
    """Vitals at rest, behind a first short load."""
    after: dict[str, Vitals]
    """Vitals at rest, in the end."""


def _watch(
    load: Callable[..., AbstractContextManager[Callable[[], Counts]]],
    url: str,
    pid: int,
    seconds: float,
    tell: Callable[[str], None],
) -> _Seen:
    with load(seed=1) as take:
        time.sleep(min(10.0, seconds / 4))
        counts = [take()]
    before = _settled(pid)
    samples: list[_Sample] = []
    with load(seed=2) as take:
        began, generated = time.monotonic(), load_of(url).num_generated_tokens
        told, tokens = began, generated
        while (now := time.monotonic()) - began < seconds:
            samples.append(((now - began) / 60, vitals(pid)))
            counts.append(take())
            if now - told >= 60:
                tokens_before, tokens = tokens, load_of(url).num_generated_tokens
                sizes = ", ".join(
                    f"{name} {one.memory_bytes / 2**20:.1f} MiB {one.num_descriptors} {one.num_threads}"
                    for name, one in samples[-1][1].items()
                )
                rate = (tokens - tokens_before) / (now - told)
                tell(f"{samples[-1][0]:.0f} min: {rate:,.0f} tokens/s; {sizes}; {counts[-1]}")
                told = now
            time.sleep(seconds / _SAMPLES)
        counts.append(take())
        generated = load_of(url).num_generated_tokens - generated
        lasted = time.monotonic() - began
    return _Seen(samples, counts, generated / lasted, before, _settled(pid))


def _settled(pid: int) -> dict[str, Vitals]:
    """The vitals when connections are not being closed any more."""
    deadline, now = time.monotonic() + _SETTLING_S, vitals(pid)
    while time.monotonic() < deadline:
        time.sleep(0.5)
        last, now = now, vitals(pid)
        if all(now[name].num_descriptors == one.num_descriptors for name, one in last.items()):
            break
    return now


def _slope(points: Sequence[tuple[float, Vitals]]) -> float:
    """MiB a minute, by least squares over minutes and memory."""
    minutes = [at for at, _ in points]
    sizes = [one.memory_bytes / 2**20 for _, one in points]
    return statistics.linear_regression(minutes, sizes).slope


def _grown(before: dict[str, Vitals], after: dict[str, Vitals]) -> list[str]:
    if before.keys() != after.keys():
        return [f"processes were {', '.join(before)} and became {', '.join(after)}"]
    grown: list[str] = []
    for name, was in before.items():
        now = after[name]
        if now.num_descriptors > was.num_descriptors + _LATE_DESCRIPTORS:
            grown.append(f"{name}: {was.num_descriptors} descriptors became {now.num_descriptors}")
        if now.num_threads > was.num_threads + _LATE_THREADS:
            grown.append(f"{name}: {was.num_threads} threads became {now.num_threads}")
    return grown


def _run(short: bool) -> Outcome:
    if short:
        runs = [soak(SIMULATED, _SHORT_S, _SHORT_RATE)]
    else:
        runs = [soak(server, 60 * _MINUTES, server.rate) for server in (SIMULATED, EMBEDDED)]
    # Seconds say nothing about a slope.
    flat = short or all(run.steepest[1] <= _LARGEST_SLOPE for run in runs)
    clean = all(run.is_clean for run in runs)
    busy = short or runs[0].tokens_per_s >= _LEAST_TOKENS_PER_S
    holds = clean and flat and busy and all(run.answered for run in runs)
    return Outcome("; ".join(run.words() for run in runs), holds)


SOAK = Trial(
    "soak",
    "60 minutes of mixed load: seven APIs, tools, schemas, long prompts, clients that leave; the simulated "
    "executor, which has no KV tiers, at 30,000 tokens/s, and pagoda-tiny with tiers",
    "no error; memory of every process grows by at most 1 MiB/min after 10 minutes; descriptors and threads "
    "as before; nothing left behind",
    _run,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=_MINUTES)
    parser.add_argument("--rate", type=float, help="requests a second")
    parser.add_argument("--embedded", action="store_true", help="the embedded model")
    options = parser.parse_args()
    server = EMBEDDED if options.embedded else SIMULATED
    tell = output.stdout().print
    run = soak(server, 60 * options.minutes, options.rate or server.rate, tell)
    tell(run.words())
    tell(f"{run.slopes}\n" + "\n".join(run.errors[:20]))


if __name__ == "__main__":
    main()
