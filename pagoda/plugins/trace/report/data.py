# SPDX-License-Identifier: Apache-2.0
"""The contents of a report. Times are in seconds, shares between 0 and 1."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    name: str
    seconds: float
    share: float


@dataclass(frozen=True)
class Percentiles:
    """Percentiles of a duration, over all times that it occurred."""

    name: str
    count: int
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True)
class Phase:
    """A piece of a request's time, from the beginning of the request on."""

    name: str
    start: float
    seconds: float


@dataclass(frozen=True)
class RequestReport:
    request: str
    arrived: float
    """Seconds after the trace began."""
    end_to_end: float
    first_token: float | None
    """Seconds from the arrival to the first token; None without a token."""
    per_token: float | None
    """Mean seconds of each token after the first; None for answers of fewer than two tokens."""
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    preemptions: int
    finish_reason: str
    """Empty if it still ran when tracing ended."""
    parts: tuple[Part, ...]
    phases: tuple[Phase, ...]
    detokenize: float
    write: float
    """Both while the engine goes on, so they are no part of the time beside it."""
    reasons: tuple[str, ...] = ()

    @property
    def is_running(self) -> bool:
        return not self.finish_reason

    @property
    def took(self) -> dict[str, float]:
        return {part.name: part.seconds for part in self.parts}


@dataclass(frozen=True)
class OperationReport:
    kind: str
    seconds: float
    share: float
    bytes_per_s: float | None
    """Bytes of weights read a second, an upper bound for experts; None for operations without weights."""
    flops_per_s: float | None


@dataclass(frozen=True)
class ForwardReport:
    """Rates of the forward passes of one kind of step."""

    steps: str
    """`decode` or `with prompts`."""
    count: int
    tokens: int
    seconds: float
    bytes_per_s: float
    """Weights and KV that had to be read, of experts at most so many."""
    flops_per_s: float


@dataclass(frozen=True)
class WorkerReport:
    name: str
    num_steps: int
    parts: tuple[Part, ...]
    operations: tuple[OperationReport, ...]
    forwards: tuple[ForwardReport, ...]


@dataclass(frozen=True)
class EngineReport:
    name: str
    num_steps: int
    loop: tuple[Part, ...]
    """Work of the engine itself; shares of the time in which the engine had requests."""
    steps: tuple[Part, ...]
    """Parts of steps, from handing a step over until its result is taken."""


@dataclass(frozen=True)
class Report:
    seconds: float
    began_ns: int
    """Nanoseconds since 1970."""
    processes: tuple[str, ...]
    requests: tuple[RequestReport, ...]
    parts: tuple[Part, ...]
    """Parts of the time of all requests together."""
    percentiles: tuple[Percentiles, ...]
    slowest: tuple[RequestReport, ...]
    engines: tuple[EngineReport, ...]
    workers: tuple[WorkerReport, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Roofline:
    """Rates that the machine can reach; None if unknown."""

    bytes_per_s: float | None = None
    flops_per_s: float | None = None


def percentiles(name: str, seconds: Sequence[float]) -> Percentiles:
    """Each is a time that was measured (nearest rank)."""
    ordered = sorted(seconds)

    def rank(share: float) -> float:
        return ordered[max(0, math.ceil(share * len(ordered)) - 1)]

    return Percentiles(name, len(ordered), rank(0.5), rank(0.9), rank(0.99))


def parts_of(seconds: dict[str, float], total: float) -> tuple[Part, ...]:
    return tuple(
        Part(name, value, value / total if total else 0.0) for name, value in seconds.items()
    )


def seconds(value: float) -> str:
    """A time with a unit that suits its size."""
    if value >= 1:
        return f"{value:.1f} s" if value < 100 else f"{value:,.0f} s"
    if value >= 1e-3:
        return f"{value * 1e3:.3g} ms" if value < 0.1 else f"{value * 1e3:.0f} ms"
    return f"{value * 1e6:.0f} µs"
