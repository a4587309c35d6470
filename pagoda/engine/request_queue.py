# SPDX-License-Identifier: Apache-2.0
"""The request queue: requests that wait, run in a slot or load KV, and the blocks that they still need."""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterator
from operator import attrgetter
from typing import NamedTuple

from pagoda.engine.request import OrderKey, Request, RequestState
from pagoda.engine.request_tracing import RequestRows
from pagoda.kv.block_table import PrefixHit
from pagoda.kv.manager import KVManager

QUARANTINE_CRASHES = 2
MAX_CRASHES = QUARANTINE_CRASHES + 2
"""A request that crashed the worker twice alone fails."""
_MAX_CHUNK = 128
_key = attrgetter("order_key")


class Reserved(NamedTuple):
    """Sequences and blocks that some requests keep, or will need."""

    num_seqs: int
    num_blocks: int


class WaitingQueue:
    """A sorted list in chunks: adding, removing and summing take O(length / _MAX_CHUNK + _MAX_CHUNK)."""

    def __init__(self) -> None:
        self._chunks: list[list[Request]] = []
        self._block_sums: list[int] = []
        """`reserved_blocks` of each chunk's requests, added up."""
        self._chunk_tenants: list[Counter[str]] = []
        """Number of requests in each chunk, by tenant; never zero."""
        self._length = 0
        self._tenants: Counter[str] = Counter()
        """Number of requests in line, by tenant; never zero."""

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Request]:
        for chunk in self._chunks:
            yield from chunk

    @property
    def last(self) -> Request | None:
        """The last in line; None if nobody is."""
        return self._chunks[-1][-1] if self._chunks else None

    def add(self, request: Request) -> None:
        """`reserved_blocks` must not change while the request is in line."""
        index = min(self._chunk_of(request.order_key), len(self._chunks) - 1)
        if index < 0:
            self._chunks.append([request])
            self._block_sums.append(request.reserved_blocks)
            self._chunk_tenants.append(Counter([request.tenant]))
        else:
            chunk = self._chunks[index]
            insort(chunk, request, key=_key)
            self._block_sums[index] += request.reserved_blocks
            self._chunk_tenants[index][request.tenant] += 1
            if len(chunk) > _MAX_CHUNK:
                self._split(index)
        self._length += 1
        self._tenants[request.tenant] += 1

    def remove(self, request: Request) -> None:
        index = self._chunk_of(request.order_key)
        chunk = self._chunks[index]
        del chunk[bisect_left(chunk, request.order_key, key=_key)]
        self._block_sums[index] -= request.reserved_blocks
        _count_off(self._chunk_tenants[index], request.tenant)
        if not chunk:
            del self._chunks[index], self._block_sums[index], self._chunk_tenants[index]
        self._length -= 1
        _count_off(self._tenants, request.tenant)

    def has_others(self, tenant: str) -> bool:
        """True if a request of another tenant is in line."""
        return len(self._tenants) > (tenant in self._tenants)

    def after(self, key: OrderKey) -> Iterator[Request]:
        """Requests behind `key`; the queue must not change meanwhile."""
        index = self._chunk_of(key)
        if index < len(self._chunks):
            chunk = self._chunks[index]
            yield from chunk[bisect_right(chunk, key, key=_key) :]
            for chunk in self._chunks[index + 1 :]:
                yield from chunk

    def others_after(self, key: OrderKey, tenant: str) -> Iterator[Request]:
        """Requests behind `key` of other tenants than this one; the queue must not change meanwhile."""
        for index in range(self._chunk_of(key), len(self._chunks)):
            tenants = self._chunk_tenants[index]
            if len(tenants) > (tenant in tenants):
                for request in self._chunks[index]:
                    if request.tenant != tenant and request.order_key > key:
                        yield request

    def ahead_of(self, key: OrderKey) -> Reserved:
        """Requests in front of `key`, and the blocks they need."""
        index = self._chunk_of(key)
        num_seqs = sum(len(chunk) for chunk in self._chunks[:index])
        num_blocks = sum(self._block_sums[:index])
        if index < len(self._chunks):
            chunk = self._chunks[index]
            end = bisect_left(chunk, key, key=_key)
            num_seqs += end
            num_blocks += sum(request.reserved_blocks for request in chunk[:end])
        return Reserved(num_seqs, num_blocks)

    def _chunk_of(self, key: OrderKey) -> int:
        """Index of the chunk in which `key` belongs; the number of chunks if it is behind all."""
        return bisect_left(self._chunks, key, key=lambda chunk: chunk[-1].order_key)

    def _split(self, index: int) -> None:
        chunk = self._chunks[index]
        half = len(chunk) // 2
        front, back = chunk[:half], chunk[half:]
        self._chunks[index : index + 1] = [front, back]
        sums = [sum(request.reserved_blocks for request in part) for part in (front, back)]
        self._block_sums[index : index + 1] = sums
        tenants = [Counter(request.tenant for request in part) for part in (front, back)]
        self._chunk_tenants[index : index + 1] = tenants


def _count_off(counts: Counter[str], name: str) -> None:
    counts[name] -= 1
    if not counts[name]:
        del counts[name]


class RequestQueue:
    """Moves requests from state to state, and keeps sums over them.

    A request reserves the blocks that its known tokens still need and one more of each group, lest a newcomer be
    preempted.
    """

    def __init__(self, kv: KVManager, max_num_seqs: int) -> None:
        self._kv = kv
        self._max_num_seqs = max_num_seqs
        self.running: list[Request] = []
        """Sorted by `order_key`."""
        self.waiting = WaitingQueue()
        self.loading: set[Request] = set()
        self.reserved_blocks = [0] * kv.pool.num_ranks
        """`reserved_blocks` of the requests that run or load, added up by the rank that is to have them."""
        self.num_pending_tokens = 0
        """Prompt and output tokens of all requests that are not computed yet."""
        self.rows: RequestRows | None = None
        self.tenants: dict[str, int] = {}
        """Number of requests of each tenant, running or not."""
        self._free_slots = list(range(max_num_seqs))
        self._freed_slots: list[int] = []

    @property
    def has_slot(self) -> bool:
        return bool(self._free_slots)

    @property
    def reserved(self) -> Reserved:
        return Reserved(len(self.running) + len(self.loading), sum(self.reserved_blocks))

    @property
    def is_full(self) -> bool:
        """True if no further request may run or load."""
        return len(self.running) + len(self.loading) >= self._max_num_seqs

    def drain_freed_slots(self) -> list[int]:
        """Slots that the worker has not been told about yet."""
        freed, self._freed_slots = self._freed_slots, []
        return freed

    def enter(self, request: Request, state: RequestState, *, is_lost: bool = False) -> None:
        """Moves the request to the place of `state`; `is_lost` says that its KV is lost with the workers."""
        before, request.state = request.state, state
        if before is RequestState.NEW:
            self.num_pending_tokens += request.num_tokens
            self.tenants[request.tenant] = self.tenants.get(request.tenant, 0) + 1
        elif before is RequestState.RUNNING:
            self._leave_slot(request)
        elif before is RequestState.WAITING:
            self.waiting.remove(request)
        elif before is RequestState.LOADING:
            self.loading.remove(request)
            self._reserve(request, 0)
        request.reserved_blocks = 0
        if state is RequestState.WAITING:
            request.reserved_blocks = self._blocks_to_reserve(request)
            self.waiting.add(request)
        elif state is RequestState.RUNNING:
            insort(self.running, request, key=_key)
            request.slot = heapq.heappop(self._free_slots)
            self.update(request)
        elif state is RequestState.LOADING:
            self.loading.add(request)
            self.update(request)
        elif state is RequestState.FINISHED:
            self.num_pending_tokens -= request.num_tokens - request.num_computed_tokens
            self.tenants[request.tenant] -= 1
            if not self.tenants[request.tenant]:
                del self.tenants[request.tenant]
        if self.rows is not None:
            self.rows.moved(request, before, is_lost=is_lost)

    def reorder(self, request: Request, key: OrderKey) -> None:
        """Gives a waiting or running request another place in the order."""
        if request.state is RequestState.RUNNING:
            del self.running[self.index_of(request)]
            request.order_key = key
            insort(self.running, request, key=_key)
        else:
            self.waiting.remove(request)
            request.order_key = key
            self.waiting.add(request)

    @property
    def has_tenants(self) -> bool:
        """True if requests of several tenants are here, among which service is shared out."""
        return len(self.tenants) > 1

    def index_of(self, request: Request) -> int:
        """Index of a running request in `running`."""
        return bisect_left(self.running, request.order_key, key=_key)

    def count_computed(self, request: Request, num_tokens: int) -> None:
        request.num_computed_tokens += num_tokens
        self.num_pending_tokens -= num_tokens

    def forget_computed(self, request: Request) -> None:
        """Makes the request a value again: it keeps all tokens, none of them computed."""
        self.num_pending_tokens += request.num_computed_tokens
        request.num_scheduled_tokens = request.num_computed_tokens = 0

    def append(self, request: Request, token_id: int) -> None:
        request.token_ids.append(token_id)
        self.num_pending_tokens += 1
        if (len(request.token_ids) - 1) % self._kv.block_size == 0:
            self.update(request)
        if self.rows is not None:
            self.rows.sampled(request)

    def _leave_slot(self, request: Request) -> None:
        slot = request.slot
        if slot is None:
            raise RuntimeError(f"Request {request.request_id} has no slot.")
        del self.running[bisect_left(self.running, request.order_key, key=_key)]
        heapq.heappush(self._free_slots, slot)
        self._freed_slots.append(slot)
        request.slot = None
        self._reserve(request, 0)

    @property
    def num_unreserved(self) -> int:
        """Available blocks that no running or loading request will need, of ranks with requests of their own those
        of the one that has most; below 0 where these need too many."""
        ranks = zip(self._kv.pool.available, self.reserved_blocks, strict=True)
        counts = [count - kept for count, kept in ranks]
        return max(counts) if self._kv.spread is None else sum(counts)

    @property
    def num_loading(self) -> int:
        return len(self.loading)

    def update(self, request: Request) -> None:
        """Reserves anew: tokens or blocks of the request have changed."""
        blocks = self._blocks_to_reserve(request)
        if request.state is RequestState.WAITING:
            self.waiting.remove(request)
            request.reserved_blocks = blocks
            self.waiting.add(request)
        elif request.state in (RequestState.RUNNING, RequestState.LOADING):
            self._reserve(request, blocks)

    def _reserve(self, request: Request, blocks: int) -> None:
        """Makes `blocks` what a request that runs or loads reserves, on the ranks that are to have them."""
        table, spread = request.table, self._kv.spread
        for rank, count in request.reserved_on:
            self.reserved_blocks[rank] -= count
        request.reserved_blocks = blocks
        request.reserved_on = (
            ((table.rank, blocks),) if spread is None else spread.by_rank(table.groups[0], blocks)
        )
        for rank, count in request.reserved_on:
            self.reserved_blocks[rank] += count

    def _blocks_to_reserve(self, request: Request) -> int:
        missing = self._kv.num_missing(
            request.table, request.num_tokens, request.num_computed_tokens
        )
        return missing + len(self._kv.groups)

    def has_room(self, request: Request, hit: PrefixHit, *, in_turn: bool) -> bool:
        """True if all known tokens of the request fit besides what others keep.

        With `in_turn` also besides what the requests in line before it need.
        """
        kv, rank = self._kv, request.table.rank
        ahead = self.waiting.ahead_of(request.order_key) if in_turn else Reserved(0, 0)
        if len(self.running) + len(self.loading) + ahead.num_seqs >= self._max_num_seqs:
            return False
        if kv.spread is not None:
            share = -(-ahead.num_blocks // kv.pool.num_ranks)
            kept = [count + share for count in self.reserved_blocks]
            return kv.spread.has_room(hit, kv.num_blocks_for(request.num_tokens), kept=kept)
        num_kept = self.reserved_blocks[rank] + ahead.num_blocks
        return kv.num_blocks_behind(hit, request.num_tokens) + num_kept <= kv.num_available(rank)


class Quarantine:
    """Requests that may crash the worker.

    A crash raises the crash count of each request in the steps in flight, and of no request that waits. From
    `QUARANTINE_CRASHES` on, a request runs alone, so that it neither raises the counts of others nor has its own
    raised by them. The count starts anew once the request gets further than it was at the crash. A step that took
    too long, which all have waited for, counts twice: a request that never ends costs two time-outs.
    """

    def __init__(self) -> None:
        self.requests: set[Request] = set()

    def first(self) -> Request | None:
        """The request to run alone now; None when all run together."""
        return min(self.requests, key=_key, default=None)

    def on_crash(self, in_flight: set[Request], suspicion: int = 1) -> list[Request]:
        """Counts a crash during these requests; returns those that must fail, in order. `suspicion` is as in
        `WorkerLost`."""
        if not suspicion:
            return []
        most = MAX_CRASHES if len(in_flight) == 1 else QUARANTINE_CRASHES
        alive = [request for request in in_flight if request.state is not RequestState.FINISHED]
        for request in alive:
            request.crash_point = max(request.crash_point, request.num_scheduled_tokens)
            request.crash_count = min(request.crash_count + suspicion, most)
            if request.crash_count >= QUARANTINE_CRASHES:
                self.requests.add(request)
        failing = (request for request in alive if request.crash_count >= MAX_CRASHES)
        return sorted(failing, key=_key)

    def on_progress(self, request: Request) -> None:
        if request.num_computed_tokens >= request.crash_point:
            request.crash_count = 0
            self.requests.discard(request)

    def on_finished(self, request: Request) -> None:
        self.requests.discard(request)
