# SPDX-License-Identifier: Apache-2.0
"""The policy that lets another host compute a prompt: one that does only that, or one that also answers.

The other host gets the same request, and says where the KV will be. All that a client sees comes from the host
that was chosen to answer, which computes what it does not get; so nothing that happens to others is an error.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from functools import partial
from typing import cast

import msgspec

from pagoda.concurrency.async_utils import cancel_all
from pagoda.errors import PagodaError
from pagoda.fleet.dispatcher import Dispatcher
from pagoda.fleet.load_tracker import RequestWork
from pagoda.fleet.placement import Counted, Placement, ReplicaSlot, TrackedRequest
from pagoda.fleet.replica_set import ReplicaSet
from pagoda.messages.frontend import GenerateRequest, KVSource, TokenChunk

PATIENCE_S = 1.0
"""Seconds that a request waits to hear where its KV will be: a prefill host says so at once."""

_log = logging.getLogger(__name__)


class PrefillOffload:
    """An `Offload` to the replicas of another dispatcher, or to those that answer as well."""

    def __init__(
        self, prefill: Dispatcher, min_tokens: int, *, patience_s: float = PATIENCE_S
    ) -> None:
        self._prefill = prefill
        self._min_tokens = min_tokens
        self._patience_s = patience_s
        self._numbers = itertools.count()

    def needs_prefixes(self, slots: ReplicaSet) -> bool:
        """The same as `Offload.needs_prefixes`."""
        return len(self._prefill.slots) > 0 or slots.takers.num_helpers > 1

    @asynccontextmanager
    async def prepare(
        self, tracked: TrackedRequest, placement: Placement, slots: ReplicaSet
    ) -> AsyncIterator[GenerateRequest]:
        """The same as `Offload.prepare`."""
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

    @contextmanager
    def counted(self, request: GenerateRequest, there: Counted) -> Iterator[Counted | None]:
        """The same as `Offload.counted`. Hosts that answer as well compute no prompts of such requests."""
        slot, num_tokens = there.slot, there.work.prompt_tokens
        is_worth_it = num_tokens >= self._min_tokens and slot.role.fetches_kv
        if not is_worth_it or not self._is_better_there(slot, there.work, num_tokens):
            yield None
            return
        sampling = msgspec.structs.replace(request.work.sampling, max_tokens=1)
        copy = msgspec.structs.replace(
            request, work=msgspec.structs.replace(request.work, sampling=sampling)
        )
        with self._prefill.counted(copy) as counted:
            if counted is not None:
                there.began()
            yield counted

    def _is_better_there(self, slot: ReplicaSlot, own: RequestWork, num_tokens: int) -> bool:
        """Tells if a host for prompts computes so many tokens sooner than the slot, whose work has `own` in it."""
        pending_there = self._prefill.slots.takers.least_pending_tokens()
        return pending_there is not None and not is_better_here(
            num_tokens,
            pending_here=slot.work.pending_tokens - own.pending_tokens,
            num_streams=slot.num_streams,
            pending_there=pending_there,
        )

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
        if self._is_better_there(slot, placement.work, num_left):
            return self._prefill.generate
        waits_here = slot.work.prompt_tokens - placement.work.prompt_tokens
        most = waits_here + (1 + slot.num_streams) * num_left - self._min_tokens
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
    work = RequestWork(slot.work, num_tokens, num_cached_tokens=num_cached)
    try:
        chunks = cast(AsyncGenerator[TokenChunk, None], slot.replica.generate(copy))
        async with aclosing(chunks):
            async for chunk in chunks:
                if chunk.num_computed_tokens is not None:
                    slot.health.work_for_others(work.prompt_progress(chunk.num_computed_tokens))
                elif chunk.token_ids:
                    slot.health.work_for_others(work.output_progress(len(chunk.token_ids)))
                yield chunk
    finally:
        work.close()


def _cost(slot: ReplicaSlot, num_tokens: int) -> int:
    """The tokens for which a prompt waits at a replica that answers as well, and for which streams wait there: its
    own and those of the prompts before it, once for the request and its own once more for each stream. Answers run
    beside prompts, and so the rest of these does not count."""
    return slot.work.prompt_tokens + (1 + slot.num_streams) * num_tokens


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
