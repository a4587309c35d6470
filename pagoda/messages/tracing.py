"""Messages about traces and clocks, which frontends, engines and workers share."""

from __future__ import annotations

import msgspec

from pagoda.telemetry.tracer import TraceSession


class StartTrace(msgspec.Struct, frozen=True, omit_defaults=True, tag="start_trace"):
    """Trace from now on, with all processes that you have started; what they start later traces as well."""

    session: TraceSession
    num_steps: int | None = None
    """An engine stops by itself after so many steps; a worker does not read it."""
    number: int = 0
    """Counts what the receiver was told to trace; `TraceStopped` names it."""


class StopTrace(msgspec.Struct, frozen=True, tag="stop_trace"):
    """Trace no longer. Answered by `TraceStopped`, also by those that do not trace."""


class TraceStopped(msgspec.Struct, frozen=True, omit_defaults=True, tag="trace_stopped"):
    """The fragment is closed, and so are those of all processes that this one has started."""

    problems: list[str] = []
    """Sentences that say why tracing had ended before somewhere."""
    number: int = 0
    """`StartTrace.number`; of workers, that of their engine counts."""


class ClockPing(msgspec.Struct, frozen=True, tag="clock_ping"):
    """Question for the clock of the process that started this one, or sends it requests; answered at once."""

    number: int


class ClockPong(msgspec.Struct, frozen=True, tag="clock_pong"):
    """Answers a `ClockPing`."""

    number: int
    uid: str
    """The process whose clock it is (`ProcessHeader.uid`)."""
    now_ns: int
