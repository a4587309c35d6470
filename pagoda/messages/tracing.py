# SPDX-License-Identifier: Apache-2.0
"""Messages about traces and clocks, which frontends, engines and workers share."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from pagoda.messages.ranges import MAX_ITEMS, Count, Name, Sentence
from pagoda.telemetry.tracer import TraceSession

MAX_PART_BYTES = 2**20
MAX_FRAGMENTS = 4096
"""Fragments, and problems, that a host names."""
_FileName = Annotated[str, Meta(max_length=512)]


class StartTrace(msgspec.Struct, frozen=True, omit_defaults=True, tag="start_trace"):
    """Order to trace from now on, with all processes that the receiver starts."""

    session: TraceSession
    num_steps: int | None = None
    """Steps after which an engine stops by itself; workers do not read it."""
    number: Count = 0
    """Number of the trace, which `TraceStopped` repeats."""


class StopTrace(msgspec.Struct, frozen=True, tag="stop_trace"):
    """Trace no longer. Answered by `TraceStopped`, also by those that do not trace."""


class TraceStopped(msgspec.Struct, frozen=True, omit_defaults=True, tag="trace_stopped"):
    """The fragment is closed, and so are those of all processes that this one has started."""

    problems: Annotated[list[Sentence], Meta(max_length=MAX_ITEMS)] = []
    """Sentences on why tracing ended early somewhere."""
    number: Count = 0


class HostTraceStopped(msgspec.Struct, frozen=True, omit_defaults=True, tag="host_trace_stopped"):
    """A host's answer to a router's `StopTrace`: all fragments of the host are closed."""

    problems: Annotated[list[Sentence], Meta(max_length=MAX_FRAGMENTS)] = []
    fragments: Annotated[list[_FileName], Meta(max_length=MAX_FRAGMENTS)] = []
    """Names for `FetchFragment`."""


class FetchFragment(msgspec.Struct, frozen=True, tag="fetch_fragment"):
    """Asks a host for a part of a fragment, from a byte on."""

    name: _FileName
    offset: Count


class FragmentPart(msgspec.Struct, frozen=True, tag="fragment_part"):
    """Answers `FetchFragment` with at most `MAX_PART_BYTES`; none at the fragment's end."""

    name: _FileName
    offset: Count
    data: Annotated[bytes, Meta(max_length=MAX_PART_BYTES)]


class ClockPing(msgspec.Struct, frozen=True, tag="clock_ping"):
    """Question for the clock of the process that started this one, or sends it requests; answered at once."""

    number: Count


class ClockPong(msgspec.Struct, frozen=True, tag="clock_pong"):
    """Answers a `ClockPing`."""

    number: Count
    uid: Name
    """The process whose clock it is (`ProcessHeader.uid`)."""
    now_ns: Annotated[int, Meta(ge=0, le=2**63 - 1)]
