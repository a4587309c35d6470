# SPDX-License-Identifier: Apache-2.0
"""Clock of the phases of a step."""

from __future__ import annotations

from typing import Literal, NamedTuple

from pagoda.telemetry.tracer import Tracer

Phase = Literal["prepare", "forward", "sample"]
"""Phases of a step: making the input, the forward pass, and from its hidden states to tokens."""


class StepTimes(NamedTuple):
    """Seconds of a step, by phase."""

    prepare: float = 0.0
    forward: float = 0.0
    sample: float = 0.0

    @property
    def total(self) -> float:
        return sum(self)

    def behind(self, earlier: StepTimes) -> StepTimes:
        """Sum of these times and those of an earlier pipeline stage."""
        return StepTimes(*map(sum, zip(earlier, self, strict=True)))


class StepClock:
    """Measures the phases of a step, each of which begins where the one before it ended."""

    def __init__(self, tracer: Tracer) -> None:
        """Spans of `sample` go to the tracer; a model knows more of its forward pass."""
        self._tracer = tracer
        self._is_traced = False
        self._at = 0
        self._ns: dict[Phase, int] = {}

    def start(self) -> None:
        self._ns = {"prepare": 0, "forward": 0, "sample": 0}
        self._is_traced = bool(self._tracer.e2e())
        self._at = self._tracer.clock_ns()

    def ended(self, phase: Phase) -> None:
        """All that was done since the last call was of this phase. A phase that comes again adds up."""
        now = self._tracer.clock_ns()
        self._ns[phase] += now - self._at
        if self._is_traced and phase == "sample":
            self._tracer.span(phase, self._at, ended=now)
        self._at = now

    @property
    def times(self) -> StepTimes:
        return StepTimes(**{phase: ns / 1e9 for phase, ns in self._ns.items()})
