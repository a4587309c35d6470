# SPDX-License-Identifier: Apache-2.0
"""Fragments as a server would write them: a few processes that live by a script, each with a clock of its own.

True time is in nanoseconds; a process's clock is ahead of it by what the test says.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from pagoda.telemetry.fragments import ProcessHeader

MS = 1_000_000
BOOT_NS = 1_000_000_000 * MS
"""The start of the script, by a clock that is right."""
WALL_NS = 1_900_000_000_000 * MS
"""The start of the script, in nanoseconds since 1970."""

OPERATIONS = {
    "names": ["embedding", "layers.0.qkv", "layers.0.attention", "norm"],
    "kinds": ["embedding", "linear", "attention", "norm"],
    "weight_bytes": [0, 6_000_000, 0, 4_000],
    "flops_per_token": [0, 6_000_000, 0, 0],
}
MODEL = {"weight_bytes": 6_004_000, "flops_per_token": 6_000_000, "kv_bytes_per_token": 1_000}


@dataclass
class ScriptedProcess:
    """One process: what it emits, and the fragment that it leaves."""

    role: str
    uid: str
    pid: int = 100
    host: str = "host-a"
    clock_id: str = ""
    parent_uid: str = ""
    run: str = "run"
    ahead_ns: int = 0
    """Nanoseconds by which the clock is ahead of a right one."""
    began_ms: float = 0.0
    lines: list[dict[str, Any]] = field(default_factory=list)
    num_rows: int = 0

    def __post_init__(self) -> None:
        self._name_row(0, "main")

    def own(self, at_ms: float) -> int:
        """The time that the process's clock shows."""
        return BOOT_NS + round(at_ms * MS) + self.ahead_ns

    def open_row(self, name: str) -> int:
        self.num_rows += 1
        self._name_row(self.num_rows, name)
        return self.num_rows

    def _name_row(self, row: int, name: str) -> None:
        self.describe("thread_name", {"name": name}, row)

    def describe(self, name: str, args: Mapping[str, Any], row: int = 0) -> None:
        self.lines.append({"ph": "M", "name": name, "tid": row, "args": dict(args)})

    def span(self, name: str, began_ms: float, ended_ms: float, row: int = 0, **args: Any) -> None:
        began, ended = self.own(began_ms), self.own(ended_ms)
        event = {"ph": "X", "name": name, "ts": began / 1000, "dur": (ended - began) / 1000}
        self.lines.append({**event, "tid": row, **({"args": args} if args else {})})

    def spans(self, row: int, *spans: tuple[str, float, float], **args: Any) -> None:
        """Spans of one row; the last one has the arguments."""
        *inner, last = spans
        for span in inner:
            self.span(*span, row)
        self.span(*last, row, **args)

    def instant(self, name: str, at_ms: float, **args: Any) -> None:
        event = {"ph": "i", "name": name, "ts": self.own(at_ms) / 1000, "tid": 0, "s": "t"}
        self.lines.append({**event, "args": args})

    def counter(self, name: str, at_ms: float, **values: float) -> None:
        event = {"ph": "C", "name": name, "ts": self.own(at_ms) / 1000, "tid": 0}
        self.lines.append({**event, "args": values})

    def compare_clock(
        self, peer: ScriptedProcess, error_ns: int = 0, round_trip_ns: int = 1000
    ) -> None:
        """Measures how far the peer's clock is ahead, and errs by so much."""
        offset_ns = peer.ahead_ns - self.ahead_ns + error_ns
        clock = {"peer": peer.uid, "offset_ns": offset_ns, "round_trip_ns": round_trip_ns}
        self.lines.append({"clock": clock})

    @property
    def header(self) -> ProcessHeader:
        return ProcessHeader(
            uid=self.uid,
            pid=self.pid,
            role=self.role,
            host=self.host,
            clock_id=self.clock_id,
            parent_uid=self.parent_uid,
            run=self.run,
            level="kernel",
            clock_ns=self.own(self.began_ms),
            wall_ns=WALL_NS + round(self.began_ms * MS),
        )

    def data(self) -> bytes:
        header = {"fragment": msgspec.to_builtins(self.header)}
        return b"".join(json.dumps(line).encode() + b"\n" for line in (header, *self.lines))

    def write(self, directory: Path) -> Path:
        path = directory / self.header.file_name
        path.write_bytes(self.data())
        return path


@dataclass
class Life:
    """A request's life, in milliseconds of true time."""

    request: str
    arrived: float
    prompt_tokens: int
    output_tokens: int
    waits: float = 1.0
    preempted_for: float = 0.0
    """The pause after half of the answer; 0 for none."""


def serve(
    lives: Sequence[Life],
    *,
    clocks: Sequence[int] = (0, 0, 0, 0),
    pids: Sequence[int] = (100, 101, 102, 103),
    worker_dies: bool = False,
    step_ms: float = 10.0,
) -> list[ScriptedProcess]:
    """A frontend, an engine and a worker, in that order; a second worker where the first one dies.

    Every request is computed in steps of its own, which do not overlap: one for the prompt, one for each token.
    """
    frontend = ScriptedProcess("frontend", "f" * 16, pids[0], ahead_ns=clocks[0])
    engine = ScriptedProcess("engine dp0", "e" * 16, pids[1], ahead_ns=clocks[1])
    role = "worker dp0 tp0 pp0"
    workers = [ScriptedProcess(role, "a" * 16, pids[2], ahead_ns=clocks[2])]
    if worker_dies:
        workers.append(ScriptedProcess(role, "b" * 16, pids[3], ahead_ns=clocks[3], began_ms=50))
    engine.parent_uid = frontend.uid
    engine.compare_clock(frontend)
    for worker in workers:
        worker.parent_uid = engine.uid
        worker.compare_clock(engine)
        worker.describe("forward_ops", OPERATIONS)
        worker.describe("model", MODEL)
    script = _Script(frontend, engine, workers, step_ms)
    for number, life in enumerate(lives):
        script.live(life, dies=worker_dies and number == 0)
    return [frontend, engine, *workers]


@dataclass
class _Script:
    frontend: ScriptedProcess
    engine: ScriptedProcess
    workers: list[ScriptedProcess]
    step_ms: float
    num_steps: int = 0
    free_at: float = 0.0

    def __post_init__(self) -> None:
        self.steps_rows = [self.engine.open_row(f"steps {number}") for number in range(2)]
        self.worker = self.workers[0]

    def live(self, life: Life, *, dies: bool) -> None:
        row = self.engine.open_row(f"request {life.request}")
        added = life.arrived + 2.0
        at = admitted = max(added + life.waits, self.free_at)
        phases = [("queued", added, admitted)]
        phase, began, first_token = "prefill", admitted, 0.0
        for token in range(life.output_tokens):
            at = self._step(at, row, life.prompt_tokens if token == 0 else 1)
            if token == 0:
                first_token = at
            if phase == "prefill":
                phases.append((phase, began, at))
                phase, began = "decode", at
            if token == life.output_tokens // 2 and (life.preempted_for or dies):
                phases.append((phase, began, at))
                pause = "recovering" if dies else "preempted"
                self._interrupt(life.request, at, dies=dies)
                phases.append((pause, at, at + (life.preempted_for or 20.0)))
                at = phases[-1][2]
                phase, began = "prefill", at
        if began < at:
            phases.append((phase, began, at))
        self.free_at = at
        self._write_rows(life, row, phases, first_token, at)

    def _interrupt(self, request: str, at: float, *, dies: bool) -> None:
        if dies:
            self.engine.instant("worker lost", at, reason="signal 9")
            self.engine.instant("worker ready", at + 15)
            self.worker = self.workers[1]
        else:
            self.engine.instant("preempted", at, request=request)

    def _step(self, at: float, row: int, tokens: int) -> float:
        """The end of the step that begins at `at`."""
        number, end = self.num_steps, at + self.step_ms
        self.num_steps += 1
        self.engine.span("schedule", at, at + 0.1, step=number, tokens=tokens, running=1, waiting=0)
        args = {"step": number, "rows": [row], "tokens": [tokens]}
        self.engine.span("step", at + 0.2, end - 0.2, self.steps_rows[number % 2], **args)
        self.engine.span("update", end - 0.1, end, step=number)
        self.engine.counter("requests", at, running=1, waiting=0)
        worker, began, ended = self.worker, at + 0.5, end - 0.5
        worker.span("prepare", began, began + 0.5)
        forward_ms = ended - began - 1.0
        parts = [round(forward_ms * MS * share) for share in (0.1, 0.5, 0.2, 0.2)]
        worker.span("forward", began + 0.5, ended - 0.5, ops_ns=parts)
        worker.span("sample", ended - 0.5, ended)
        worker.span(
            "step", began, ended, step=number, tokens=tokens, seqs=1, context_tokens=tokens + number
        )
        return end

    def _write_rows(
        self,
        life: Life,
        row: int,
        phases: Sequence[tuple[str, float, float]],
        first_token: float,
        ended: float,
    ) -> None:
        figures = {
            "request": life.request,
            "prompt_tokens": life.prompt_tokens,
            "cached_tokens": 0,
            "output_tokens": life.output_tokens,
            "finish_reason": "length",
        }
        preemptions = sum(name == "preempted" for name, _, _ in phases)
        added = phases[0][1]
        request = ("request", added, ended)
        self.engine.spans(row, *phases, request, **figures, preemptions=preemptions)
        told, closed = first_token + 1.0, ended + 1.0
        self.frontend.spans(
            self.frontend.open_row(f"request {life.request}"),
            ("prepare", life.arrived, added - 0.5),
            ("first token", added - 0.5, told),
            ("stream", told, closed),
            ("request", life.arrived, closed),
            **figures,
            queue_ms=phases[0][2] - added,
            detokenize_ms=0.5,
            write_ms=0.5,
        )


def shuffled_and_cut(data: bytes, random: Random, cut_at: int | None) -> bytes:
    """The lines after the first in any order, and the file ended at a byte."""
    first, *others = data.splitlines(keepends=True)
    random.shuffle(others)
    return b"".join((first, *others))[:cut_at]
