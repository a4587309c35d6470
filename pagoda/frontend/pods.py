"""A pod: hosts that compute prompts, and hosts that take over their KV and go on.

The decode hosts have all requests. For one whose prompt is long enough, and would not wait too long there, a
prefill host gets the same request beside it, and the decode host is told where the KV will be, as soon as the
prefill host has said so. All that a client sees comes from the decode host, which computes what it does not get;
so nothing that happens to prefill hosts is an error.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Protocol, cast

import msgspec

from pagoda.errors import EngineDeadError, InvalidRequestError, OverloadedError
from pagoda.frontend.async_utils import cancel_all
from pagoda.frontend.dispatcher import Dispatcher
from pagoda.frontend.endpoint import Replica
from pagoda.frontend.policies import POLICIES, Policy
from pagoda.frontend.prefill_offload import Place
from pagoda.messages.frontend import GenerateRequest, KVSource, TokenChunk
from pagoda.messages.worker_config import Role
from pagoda.telemetry.tracer import Tracer

DEFAULT_MIN_TOKENS = 128
"""Tokens from which on a prompt is computed elsewhere; `benchmarks.handoff threshold` measures what is best."""
PATIENCE_S = 1.0
"""How long a request waits to hear where its KV will be: a prefill host says so at once."""

_log = logging.getLogger(__name__)


class Members(Protocol):
    """What takes in hosts that have started, and lets them go."""

    def add(self, replica: Replica) -> None: ...

    def release(self, replica: Replica) -> None:
        """It gets nothing new; what it has goes on there."""
        ...

    def take_back(self, replica: Replica) -> None:
        """One that was released gets requests again."""
        ...

    def num_requests(self, replica: Replica) -> int:
        """That it has."""
        ...

    async def emptied(self, replica: Replica) -> None:
        """Returns when one that was released has no requests any more."""
        ...

    def remove(self, replica: Replica) -> None:
        """May be called twice."""
        ...


class Pod:
    """The hosts behind a router, by what they do."""

    def __init__(
        self,
        policy: Policy,
        min_tokens: int = DEFAULT_MIN_TOKENS,
        tracer: Tracer | None = None,
    ) -> None:
        """`policy` chooses among those that answer; prefill hosts are chosen by what waits for them.

        Prompts of which `min_tokens` or more are not cached where they are answered are computed by prefill hosts.
        """
        # Decode hosts compute what no prefill host does, so all of these may be left out.
        by_work = POLICIES["least-pending-tokens"]
        self._prefill = Dispatcher([], by_work, keeps_half=False, tracer=tracer)
        prefill = RemotePrefill(self._prefill, min_tokens)
        self.dispatcher = Dispatcher([], policy, prefill, tracer=tracer)
        self._prefill.watch(self.dispatcher.reconsider)
        self._homes: dict[Replica, list[Dispatcher]] = {}
        self._unwatch: dict[Replica, Callable[[], None]] = {}

    def add(self, replica: Replica) -> None:
        """A prefill host also answers, as long as there is nobody else who does."""
        self._homes[replica] = [self.dispatcher]
        self.dispatcher.add(replica)
        self._unwatch[replica] = replica.watch(lambda: self._sort(replica))
        self._sort(replica)

    def _sort(self, replica: Replica) -> None:
        """The role of a router is that of its hosts, which come and go."""
        homes = self._homes.get(replica, [])
        is_prefill = replica.limits.role is Role.PREFILL
        if homes and is_prefill and self._prefill not in homes:
            homes.append(self._prefill)
            self._prefill.add(replica)
        elif self._prefill in homes and not is_prefill:
            homes.remove(self._prefill)
            self._prefill.remove(replica)

    def release(self, replica: Replica) -> None:
        for home in self._homes[replica]:
            home.release(replica)

    def take_back(self, replica: Replica) -> None:
        for home in self._homes[replica]:
            home.take_back(replica)

    def num_requests(self, replica: Replica) -> int:
        return sum(home.num_requests(replica) for home in self._homes[replica])

    async def emptied(self, replica: Replica) -> None:
        for home in self._homes[replica]:
            await home.emptied(replica)

    def remove(self, replica: Replica) -> None:
        if replica not in self._homes:
            return
        self._unwatch.pop(replica)()
        for home in self._homes.pop(replica):
            home.remove(replica)

    async def close(self) -> None:
        await self.dispatcher.close()
        await self._prefill.close()


def is_better_here(num_tokens: int, place: Place, pending_tokens: int) -> bool:
    """Whether a prompt with `num_tokens` to compute is better computed where it is answered than behind
    `pending_tokens` of others at the prefill host that has the fewest. Both are taken to be as fast.

    Here it waits for what this host has to do, and every stream that runs here waits for it. What its own
    computing takes is the same at both, and counted only here: it goes elsewhere unless that is clearly worse.
    """
    return pending_tokens > place.pending_tokens + (1 + place.num_streams) * num_tokens


class RemotePrefill:
    """A `PrefillOffload` that has prompts computed on prefill hosts."""

    def __init__(
        self, prefill: Dispatcher, min_tokens: int, *, patience_s: float = PATIENCE_S
    ) -> None:
        self._prefill = prefill
        self._min_tokens = min_tokens
        self._patience_s = patience_s
        self._numbers = itertools.count()

    @property
    def needs_prefixes(self) -> bool:
        return bool(self._prefill.replicas)

    @asynccontextmanager
    async def prepare(
        self, request: GenerateRequest, place: Place
    ) -> AsyncIterator[GenerateRequest]:
        if not self._is_worth_it(request, place):
            yield request
            return
        source: asyncio.Future[KVSource] = asyncio.get_running_loop().create_future()
        copy = msgspec.structs.replace(
            request, request_id=f"{request.request_id}/prefill{next(self._numbers)}", holds_kv=True
        )
        computing = asyncio.create_task(self._compute(copy, source))
        try:
            await asyncio.wait(
                (source, computing),
                timeout=self._patience_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if source.done():
                yield msgspec.structs.replace(request, kv_source=source.result())
            else:
                self._prefill.complain(copy.request_id)
                await cancel_all([computing])
                yield request
        finally:
            await cancel_all([computing])

    def _is_worth_it(self, request: GenerateRequest, place: Place) -> bool:
        if request.holds_kv or request.kv_source is not None:
            return False  # somebody else has arranged it
        num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
        num_left = num_tokens - place.num_cached_tokens
        if num_left < self._min_tokens or not place.role.fetches_kv:
            return False
        pending_tokens = self._prefill.least_pending_tokens
        return pending_tokens is not None and not is_better_here(num_left, place, pending_tokens)

    async def _compute(self, copy: GenerateRequest, source: asyncio.Future[KVSource]) -> None:
        """Has a prefill host compute `copy`, and says where as soon as that is known."""
        chunks = cast(AsyncGenerator[TokenChunk, None], self._prefill.generate(copy))
        try:
            async with aclosing(chunks):
                async for chunk in chunks:
                    if chunk.kv_source is None:
                        continue
                    if not source.done():
                        source.set_result(chunk.kv_source)
                    elif chunk.kv_source.transfer_id != source.result().transfer_id:
                        return  # the host was lost, and at the next one nobody will ask
        except (OverloadedError, InvalidRequestError, EngineDeadError) as error:
            _log.info(
                "the prompt is not computed by a prefill host: %s",
                error,
                extra={"request_id": copy.request_id},
            )
