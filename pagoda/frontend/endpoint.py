"""The one protocol that every storey speaks: an engine, a host, a pod and a fleet are all `Endpoint`s."""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Callable
from typing import Protocol

import msgspec

from pagoda.errors import EngineDeadError
from pagoda.messages.frontend import (
    EngineReady,
    GenerateRequest,
    PrefixCacheUpdate,
    StepStatistics,
    TokenChunk,
)
from pagoda.messages.load import LoadReport


class Health(msgspec.Struct, frozen=True):
    """Whether an endpoint can make progress, judged by what it does, not by a flag."""

    ready: bool
    reason: str = ""
    """Why it is not ready, as one clause: `the worker is restarting`."""


class ReplicaState(enum.StrEnum):
    """Whether a replica takes requests."""

    STARTING = "starting"
    """There is no engine yet, or none any more and another is on its way. `generate` raises EngineLostError."""
    READY = "ready"
    DEGRADED = "degraded"
    """The engine takes requests, and they wait until its worker is replaced. Its KV cache is lost."""
    FAILED = "failed"
    """Given up, or closed."""


CacheListener = Callable[[PrefixCacheUpdate], None]
StepListener = Callable[[StepStatistics], None]
Unsubscribe = Callable[[], None]
"""Ends a subscription."""


class Endpoint(Protocol):
    """Something that turns a request into tokens."""

    @property
    def limits(self) -> EngineReady:
        """What requests are checked against at the door. Known once the endpoint has started; others when what is
        behind it has changed."""
        ...

    @property
    def state(self) -> ReplicaState: ...

    def watch(self, listener: Callable[[], None]) -> Callable[[], None]:
        """`listener` is called at once, in the event loop, whenever `state` or `limits` have changed, until the
        function returned is called."""
        ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """The tokens of `request` as they come; the last chunk has a finish reason.

        Between them there are chunks that are news of the prompt (`TokenChunk.is_news`), which are for whoever
        places requests and not for clients.

        Closing the iterator early (`aclose`, cancellation) aborts the request. Failures of this request alone
        come as a chunk with `FinishReason.ERROR`.

        Raises:
            OverloadedError: before the first chunk, when the waiting queue is full or the endpoint drains.
            EngineLostError: an engine ended with this request in it, or there is none at the moment; it may be
                given to another endpoint, with the tokens so far. A `Dispatcher` does that and never raises it.
            EngineDeadError: the endpoint has ended for good.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """Ends a request wherever it is; its iterator ends with `FinishReason.ABORT`. Unknown ids are ignored."""
        ...

    async def load(self) -> LoadReport: ...

    def subscribe_cache(self, listener: CacheListener) -> Callable[[], None]:
        """Tells `listener` which blocks can be found behind this endpoint, until the function returned is called.

        First of all what is cached already, soon; then what changes, a few times a second at most.
        """
        ...

    def subscribe_steps(self, listener: StepListener) -> Callable[[], None]:
        """Tells `listener` about twice a second of the steps of engines on this host, until the function returned
        is called. Those of other hosts are told there alone."""
        ...

    async def health(self) -> Health:
        """Asks what is behind this endpoint; answers within two seconds."""
        ...

    async def drain(self, timeout_s: float) -> None:
        """Takes no new requests and returns when the last running one has ended, or after `timeout_s`.

        What still runs after `timeout_s` is aborted.
        """
        ...

    async def close(self) -> None:
        """Ends everything behind this endpoint; nothing is left behind."""
        ...


class Replica(Endpoint, Protocol):
    """An endpoint over one engine, which is started, may be lost and comes back with an empty KV cache."""

    @property
    def name(self) -> str:
        """What an operator knows it by, the same in all routers; empty if that is its number."""
        ...

    async def start(self) -> None:
        """Returns when it is ready for the first time; what cannot start leaves nothing behind.

        Raises:
            ConfigError: it says why it cannot start.
            EngineDeadError: it cannot start for a reason that is not the user's to mend.
        """
        ...

    async def wait_failed(self) -> EngineDeadError:
        """Returns when it is given up (or closed), with the reason."""
        ...
