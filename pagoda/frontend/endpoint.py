"""The one protocol that every storey speaks: an engine, a host, a pod and a fleet are all `Endpoint`s."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

import msgspec

from pagoda.engine.messages import EngineReady, GenerateRequest, LoadReport, TokenChunk


class Health(msgspec.Struct, frozen=True):
    """Whether an endpoint can make progress, judged by what it does, not by a flag."""

    ready: bool
    reason: str = ""
    """Why it is not ready, as one clause: `the worker is restarting`."""


class Endpoint(Protocol):
    """Something that turns a request into tokens."""

    @property
    def limits(self) -> EngineReady:
        """What requests are checked against at the door. Known once the endpoint has started."""
        ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """The tokens of `request` as they come; the last chunk has a finish reason.

        Closing the iterator early (`aclose`, cancellation) aborts the request. Failures of this request alone
        come as a chunk with `FinishReason.ERROR`.

        Raises:
            OverloadedError: before the first chunk, when the waiting queue is full or the endpoint drains.
            EngineDeadError: the endpoint has ended for good.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """Ends a request wherever it is; its iterator ends with `FinishReason.ABORT`. Unknown ids are ignored."""
        ...

    async def load(self) -> LoadReport: ...

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
