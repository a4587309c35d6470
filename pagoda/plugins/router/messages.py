# SPDX-License-Identifier: Apache-2.0
"""The wire between a router and the hosts that join it."""

from __future__ import annotations

from typing import Annotated

import msgspec

from pagoda.messages.frontend import EngineMessage, FrontendMessage, HostLeave, HostPool, HostWork
from pagoda.messages.ranges import Count, Name, Sentence
from pagoda.messages.tracing import (
    ClockPing,
    ClockPong,
    FetchFragment,
    FragmentPart,
    HostTraceStopped,
)
from pagoda.messages.worker_config import Role


class HostRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A host as it can be found. All else about it is said over the connection to it."""

    host_id: Name
    """New at each start; empty where only the address is known."""
    address: Name
    """`tcp://host:port`, where it takes `RouterMessage`s."""


class HostJoin(msgspec.Struct, frozen=True, tag="join"):
    """Announcement of a host to a router, repeated as long as the host is there."""

    host: HostRecord


class JoinAnswer(msgspec.Struct, frozen=True, kw_only=True, tag="join_answer"):
    """Answers every `HostJoin`."""

    ttl_s: Annotated[float, msgspec.Meta(ge=0.1, le=86400.0)]
    """Seconds without another announcement after which the host counts as gone."""
    refusal: Sentence = ""
    """Sentence that says why the host is not used; empty if it is, or may still be."""
    is_final: bool = False
    """True if the host need not announce itself again: the router will never use it."""


class HostPing(msgspec.Struct, frozen=True, tag="ping"):
    """Asks a host for a `HostPong` at once, by which a router measures how far away it is."""

    number: Count


class HostPong(msgspec.Struct, frozen=True, tag="pong"):
    number: Count


class SetRole(msgspec.Struct, frozen=True, tag="set_role"):
    """Order of a router's operator to a host, which tells all routers its limits when it has done it."""

    role: Role


HostMessage = (
    EngineMessage
    | HostLeave
    | HostPool
    | HostWork
    | HostPong
    | ClockPing
    | HostTraceStopped
    | FragmentPart
)
"""Messages from a host to a router."""
RouterMessage = FrontendMessage | HostPing | ClockPong | FetchFragment | SetRole
