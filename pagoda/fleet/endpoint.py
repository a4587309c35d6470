# SPDX-License-Identifier: Apache-2.0
"""The protocol between the layers: a replica and a dispatcher are `Endpoint`s."""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

import msgspec

from pagoda.messages.frontend import (
    EngineReady,
    GenerateRequest,
    PrefixCacheUpdate,
    StepStatistics,
    TokenChunk,
)
from pagoda.messages.load import LoadReport


class Health(msgspec.Struct, frozen=True):
    """Readiness of an endpoint, judged by the progress that it makes."""

    ready: bool
    reason: str = ""
    """Reason why the endpoint is not ready, as one clause: `the worker is restarting`."""


class ReplicaState(enum.StrEnum):
    """Stages in the life of a replica; it takes requests in READY and DEGRADED."""

    STARTING = "starting"
    """There is no engine yet, or the next one is on its way. `generate` raises EngineLostError."""
    READY = "ready"
    DEGRADED = "degraded"
    """The engine takes requests, which wait until its worker is replaced. The KV cache is lost."""
    FAILED = "failed"
    """The replica was given up or closed."""


CacheListener = Callable[[PrefixCacheUpdate], None]
StepListener = Callable[[StepStatistics], None]
Unsubscribe = Callable[[], None]


class Endpoint(Protocol):
    """A component that turns requests into tokens."""

    @property
    def limits(self) -> EngineReady:
        """Limits that requests are checked against on arrival. Known once the endpoint has started; they change
        with the replicas behind the endpoint."""
        ...

    @property
    def state(self) -> ReplicaState: ...

    def watch(self, listener: Callable[[], None]) -> Callable[[], None]:
        """`listener` is called at once, in the event loop, whenever `state` or `limits` have changed, until the
        function returned is called."""
        ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """The tokens of `request` as they come; the last chunk has a finish reason.

        Chunks without tokens (`TokenChunk.is_news`) report the progress of the prompt to the dispatcher; clients
        do not get them.

        Closing the iterator early (`aclose`, cancellation) aborts the request. Failures of this request alone
        come as a chunk with `FinishReason.ERROR`.

        Raises OverloadedError before the first chunk if the waiting queue is full, the endpoint drains or the
        request gave up its place to another key's; DeadlineError when the request's time is over; EngineLostError
        if an engine ended with this request in it or there is none at the moment (the request may be given to
        another endpoint with the tokens so far: a `Dispatcher` does that and never raises it); EngineDeadError if
        the endpoint has ended for good.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """Ends a request; its iterator ends with `FinishReason.ABORT`. Unknown ids are ignored."""
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
        """Asks the engine or the replicas; returns within about two seconds."""
        ...

    async def drain(self, timeout_s: float) -> None:
        """Takes no new requests and returns when the last running one has ended, or after `timeout_s`.

        What still runs after `timeout_s` is aborted.
        """
        ...

    async def close(self) -> None:
        """Ends everything behind this endpoint; nothing is left behind."""
        ...


class BodyEndpoint(Endpoint, Protocol):
    """An endpoint that knows which requests are of one body (`GenerateRequest.body`): while it drains, it takes
    those of bodies that it has accepted."""

    def hold(self, body: str) -> AbstractContextManager[None]:
        """Accepts a body that sends its requests one after the other; it has not ended before the block does.

        Raises OverloadedError: the endpoint drains.
        """
        ...


class SharedEndpoint(Endpoint, Protocol):
    """An endpoint that several routers send requests to."""

    def works(self) -> Mapping[str, int]:
        """The pending tokens of requests by the routers that sent them (`GenerateRequest.via`)."""
        ...
