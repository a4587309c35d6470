# SPDX-License-Identifier: Apache-2.0
"""A router over hosts that compute prompts, and hosts that take over their KV and go on.

The decode hosts have all requests. For a long prompt a prefill host gets the same request beside it, and says
where the KV will be. All that a client sees comes from the decode host, which computes what it does not get; so
nothing that happens to prefill hosts is an error. Hosts that do both do the same for one another, where that is
less work.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import cast

import msgspec

from pagoda.concurrency.async_utils import cancel_all
from pagoda.errors import PagodaError
from pagoda.fleet.dispatcher import Dispatcher
from pagoda.fleet.load_tracker import RequestWork
from pagoda.fleet.placement import Placement, ReplicaSlot, TrackedRequest
from pagoda.fleet.policies import POLICIES, Policy
from pagoda.fleet.replica import Replica
from pagoda.fleet.replica_set import ReplicaSet
from pagoda.messages.frontend import GenerateRequest, KVSource, TokenChunk
from pagoda.messages.worker_config import Role
from pagoda.telemetry.tracer import Tracer

DEFAULT_MIN_TOKENS = 128
"""Tokens from which on a prompt is computed elsewhere; `benchmarks.handoff threshold` measures what is best."""
PATIENCE_S = 1.0
"""Seconds that a request waits to hear where its KV will be: a prefill host says so at once."""

_log = logging.getLogger(__name__)


class PrefillDecodeRouter:
    """The hosts behind a router, by what they do."""

    def __init__(
        self,
        policy: Policy,
        min_tokens: int = DEFAULT_MIN_TOKENS,
        tracer: Tracer | None = None,
        *,
        no_replica_timeout_s: float = math.inf,
    ) -> None:
        """`policy` chooses among hosts that answer; prefill hosts are chosen by what waits for them.

        Prompts of which `min_tokens` or more are not cached where they are answered are computed by prefill hosts.
        `no_replica_timeout_s` is as in `Dispatcher`.
        """
        # Decode hosts compute what no prefill host does, so all prefill hosts may be ejected.
        by_work = POLICIES["least-pending-tokens"]
        self.prefill = Dispatcher([], by_work, keeps_half=False, tracer=tracer)
        self.dispatcher = Dispatcher(
            [],
            policy,
            PrefillOffload(self.prefill, min_tokens),
            tracer=tracer,
            no_replica_timeout_s=no_replica_timeout_s,
        )
        self.prefill.watch(self.dispatcher.slots.update_subscriptions)
        self._unwatch: dict[Replica, Callable[[], None]] = {}

    def _homes(self, replica: Replica) -> list[Dispatcher]:
        both = (self.dispatcher, self.prefill)
        return [one for one in both if one.slots.get(replica) is not None]

    def add(self, replica: Replica) -> None:
        """Takes in a host that has started. A prefill host also answers, as long as nobody else does."""
        self.dispatcher.add(replica)
        self._unwatch[replica] = replica.watch(lambda: self._sort(replica))
        self._sort(replica)

    def _sort(self, replica: Replica) -> None:
        """Follows the host's role: that of a router is the role of its hosts, which come and go."""
        homes = self._homes(replica)
        is_prefill = replica.limits.role is Role.PREFILL
        if is_prefill and homes == [self.dispatcher]:
            self.prefill.add(replica)
        elif not is_prefill:
            self.prefill.remove(replica)
        self.dispatcher.slots.update_subscriptions()

    def set_leaving(self, replica: Replica, is_leaving: bool) -> None:
        """Gives a host that leaves nothing new; its requests go on there."""
        for home in self._homes(replica):
            home.set_leaving(replica, is_leaving)

    def num_requests(self, replica: Replica) -> int:
        return sum(home.num_requests(replica) for home in self._homes(replica))

    async def emptied(self, replica: Replica) -> None:
        for home in self._homes(replica):
            await home.emptied(replica)

    def remove(self, replica: Replica) -> None:
        """Forgets a host; may be called twice."""
        self._unwatch.pop(replica, lambda: None)()
        for home in self._homes(replica):
            home.remove(replica)

    async def close(self) -> None:
        await self.dispatcher.close()
        await self.prefill.close()


class PrefillOffload:
    """Makes requests ready for the replicas that a `Dispatcher` chose."""

    def __init__(
        self, prefill: Dispatcher, min_tokens: int, *, patience_s: float = PATIENCE_S
    ) -> None:
        self._prefill = prefill
        self._min_tokens = min_tokens
        self._patience_s = patience_s
        self._numbers = itertools.count()

    def needs_prefixes(self, slots: ReplicaSet) -> bool:
        """True if it matters what replicas have cached, which costs a digest over each prompt."""
        return len(self._prefill.slots) > 0 or slots.takers.num_helpers > 1

    @asynccontextmanager
    async def prepare(
        self, tracked: TrackedRequest, placement: Placement, slots: ReplicaSet
    ) -> AsyncIterator[GenerateRequest]:
        """The request as its replica, one of `slots`, is to be given it; what was done for it lasts until the
        context ends.

        Never raises because something failed: then the request is as it was. Does not wait for long.
        """
        request = tracked.value(placement.began_at)
        compute = self._prompt_source(request, tracked, placement, slots)
        if compute is None:
            yield request
            return
        source: asyncio.Future[KVSource] = asyncio.get_running_loop().create_future()
        # Only the KV is wanted of a constrained answer: a prefill host that compiled the grammar first would be
        # late. The decode host samples the first token, while a token without the grammar is not taken over.
        copy = msgspec.structs.replace(
            request,
            request_id=f"{request.request_id}/prefill{next(self._numbers)}",
            holds_kv=True,
            grammar=None,
        )
        computing = asyncio.create_task(self._follow(copy, compute(copy), source))
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

    def _prompt_source(
        self,
        request: GenerateRequest,
        tracked: TrackedRequest,
        placement: Placement,
        slots: ReplicaSet,
    ) -> Callable[[GenerateRequest], AsyncIterator[TokenChunk]] | None:
        """The way to whoever is to compute the prompt; None if that is the request's own replica."""
        if request.holds_kv or request.kv_source is not None:
            return None  # somebody else has arranged it
        if request.work.sampling.prompt_logprobs is not None or request.work.pooling is not None:
            return None  # what is wanted of the prompt does not come with its KV
        slot = placement.slot
        num_left = tracked.num_tokens - placement.num_told_tokens
        if num_left < self._min_tokens or not slot.role.fetches_kv:
            return None
        pending_here = slot.work.pending_tokens - placement.work.pending_tokens
        pending_there = self._prefill.slots.takers.least_pending_tokens()
        if pending_there is not None and not is_better_here(
            num_left,
            pending_here=pending_here,
            num_streams=slot.num_streams,
            pending_there=pending_there,
        ):
            return self._prefill.generate
        most = pending_here + (1 + slot.num_streams) * num_left - self._min_tokens
        block_size = slots.sums.total.block_size
        found = [
            (_cost(helper, tracked.num_tokens - num_cached), helper.number, num_cached)
            for helper in slots.takers.helpers(slot, placement.keys)
            if helper.limits is not None and len(helper.requests) < helper.limits.max_num_seqs
            for num_cached in [helper.prefixes.num_told(placement.keys) * block_size]
        ]
        cost, number, num_cached = min(found, default=(most, 0, 0))
        return partial(_compute_at, slots.by_number(number), num_cached) if cost < most else None

    async def _follow(
        self,
        copy: GenerateRequest,
        generated: AsyncIterator[TokenChunk],
        source: asyncio.Future[KVSource],
    ) -> None:
        """Follows `copy` where it is computed, and sets `source` as soon as that is known."""
        chunks = cast(AsyncGenerator[TokenChunk, None], generated)
        try:
            async with aclosing(chunks):
                async for chunk in chunks:
                    if chunk.kv_source is None:
                        continue
                    if not source.done():
                        source.set_result(chunk.kv_source)
                    elif chunk.kv_source.transfer_id != source.result().transfer_id:
                        return  # the host was lost, and at the next one nobody will ask
        except PagodaError as error:
            _log.info(
                "the prompt is not computed by another host: %s",
                error,
                extra={"request_id": copy.request_id},
            )


async def _compute_at(
    slot: ReplicaSlot, num_cached: int, copy: GenerateRequest
) -> AsyncIterator[TokenChunk]:
    """Lets a replica that answers requests compute a prompt for another one; some of it may be cached there."""
    num_tokens = len(copy.prompt_token_ids) + len(copy.output_token_ids)
    work = RequestWork(slot.work, num_tokens, num_cached_tokens=num_cached, output_tokens=1)
    try:
        chunks = cast(AsyncGenerator[TokenChunk, None], slot.replica.generate(copy))
        async with aclosing(chunks):
            async for chunk in chunks:
                if chunk.num_computed_tokens is not None:
                    work.prompt_progress(chunk.num_computed_tokens)
                yield chunk
    finally:
        work.close()


def _cost(slot: ReplicaSlot, num_tokens: int) -> int:
    """The work until a replica has computed so many tokens of a prompt, as `is_better_here` counts it."""
    return slot.work.pending_tokens + (1 + slot.num_streams) * num_tokens


def is_better_here(
    num_tokens: int, *, pending_here: int, num_streams: int, pending_there: int
) -> bool:
    """True if a prompt with `num_tokens` to compute is better computed at the replica that answers it, behind
    `pending_here` tokens of others and beside `num_streams` answers, than behind `pending_there` at the prefill
    host that has the fewest. Both are taken to be as fast.

    Here the prompt waits for the replica's work, and every stream that runs here waits for the prompt. What its
    own computing takes is the same at both, and counted only here: a prompt goes elsewhere unless that is clearly
    worse.
    """
    return pending_there > pending_here + (1 + num_streams) * num_tokens
