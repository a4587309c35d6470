# SPDX-License-Identifier: Apache-2.0
"""Checks of an engine's scheduler and KV cache: its books against what there is."""

from __future__ import annotations

from collections import Counter

from pagoda.engine.kv_transfers import KVTransferHooks
from pagoda.engine.request import Request, RequestState
from pagoda.engine.scheduler import Scheduler
from pagoda.kv.block_pool import BlockPool
from pagoda.kv.host_tier import HostTier
from pagoda.kv.tiered_connector import TieredKVConnector
from pagoda.messages.transfers import DeviceBlocks, HostSlots, Transfer
from pagoda.plugins.disaggregation.exporter import KVExporter
from pagoda.plugins.disaggregation.hooks import HandoffHooks


class BrokenInvariantError(Exception):
    """Something that must always be true is not."""


def require(holds: object, text: str) -> None:
    """Raises BrokenInvariantError with `text` unless `holds`."""
    if not holds:
        raise BrokenInvariantError(text)


def rank_of(transfer: Transfer, pool: BlockPool, slots: BlockPool | None = None) -> int:
    """The rank whose places on the device, and in host memory, a transfer is between.

    Raises BrokenInvariantError: it is between those of several."""
    ranks = set[int]()
    for place in (transfer.source, transfer.target):
        if isinstance(place, DeviceBlocks):
            ranks.update(block_id // pool.of_rank for block_id in place.block_ids)
        elif isinstance(place, HostSlots) and slots is not None:
            ranks.update(slot // slots.of_rank for slot in place.slots)
    require(len(ranks) == 1, "A transfer is between places of several ranks.")
    return ranks.pop()


def check_books(scheduler: Scheduler) -> None:
    """A block's references are those of requests and of open transfers; nobody is in two places or in none.

    Raises BrokenInvariantError, or ValueError from the pool's own check."""
    check_sums(scheduler)
    hooks = scheduler.hooks
    held = Counter(
        block.block_id for request in scheduler.requests.values() for block in request.table.blocks
    )
    exporter = None
    if isinstance(hooks, KVTransferHooks):
        exporter, ledger = _exporter_of(hooks), hooks.tiers.ledger
        several = [*(it.blocks for it in ledger.transfers.values()), *ledger.held.values()]
        held.update(block.block_id for blocks in several for block in blocks)
    if exporter is not None:
        leases = exporter.leases.values()
        held.update(block.block_id for lease in leases for block in lease.blocks())
        num_leased = sum(len(lease.blocks()) for lease in leases)
        require(exporter.num_leased_blocks == num_leased, "Leased blocks are counted wrongly.")
        num_wanted = sum(lease.asker is not None for lease in leases)
        require(exporter.num_wanted == num_wanted, "Wanted leases are counted wrongly.")
    pool = scheduler.kv.pool
    pool.check()
    require(pool.references() == held, "References of blocks are not those that list them.")
    if isinstance(hooks, KVTransferHooks):
        check_tiers(scheduler, hooks.tiers)


def check_tiers(scheduler: Scheduler, tiers: TieredKVConnector) -> None:
    """Every request that awaits KV is known to the tiers."""
    check_slots(tiers)
    most = scheduler.limits.max_num_seqs
    loading, awaiting = set[str](), set[str]()
    for request in scheduler.requests.values():
        if request.state is RequestState.LOADING:
            loading.add(request.request_id)
        elif request.state is RequestState.AWAITING_KV:
            awaiting.add(request.request_id)
    require(len(scheduler.running) + len(loading) <= most, "Too many requests run and load.")
    require(len(awaiting) <= most, "Too many requests await KV.")
    loading -= tiers.ended.keys()
    waiting = loading | (awaiting - tiers.ended.keys())
    has_timeout = any(tier.has_own_timeout for tier in tiers.connectors)
    deadlines = tiers.deadlines.keys()
    is_known = deadlines <= waiting if has_timeout else deadlines == waiting
    require(is_known, "Deadlines are not those of requests that await KV.")
    require(loading == tiers.loads.keys(), "Loads are not those of requests that load.")


def check_slots(tiers: TieredKVConnector) -> None:
    """Slots in host memory are referenced by open transfers alone."""
    used = Counter(
        slot
        for entry in tiers.ledger.transfers.values()
        for place in (entry.transfer.source, entry.transfer.target)
        if isinstance(place, HostSlots)
        for slot in place.slots
    )
    for tier in tiers.connectors:
        if isinstance(tier, HostTier):
            used.update(tier.holds)
            tier.pool.check()
            is_right = tier.pool.references() == used
            require(is_right, "References of slots are not those of transfers and holds.")


def check_sums(scheduler: Scheduler) -> None:
    """The sums that the scheduler keeps are right, and so are the numbers of each request's tokens."""
    queue, kv, max_model_len = scheduler.queue, scheduler.kv, scheduler.limits.max_model_len
    numbers = dict.fromkeys(RequestState, 0)
    num_reserved = num_pending = 0
    num_drafts = Counter[Request]()
    for step in scheduler.in_flight:
        for part in step.scheduled if step.drafts else ():
            num_drafts[part.request] += len(step.drafts.get(part.slot, ()))
    for request in scheduler.requests.values():
        state, num_tokens = request.state, request.num_tokens
        num_computed, num_scheduled = request.num_computed_tokens, request.num_scheduled_tokens
        numbers[state] += 1
        num_pending += num_tokens - num_computed
        # A token that a step in flight samples may be scheduled before it is known, and drafts before it.
        num_expected = num_tokens + request.num_pending_samples + num_drafts[request]
        in_order = 0 <= num_computed <= num_scheduled <= num_expected
        if not in_order or not num_computed <= num_tokens <= max_model_len:
            raise BrokenInvariantError(f"Tokens of {request.request_id} are counted wrongly.")
        if state in (RequestState.RUNNING, RequestState.LOADING):
            num_reserved += request.reserved_blocks
        if state is RequestState.AWAITING_KV:
            is_right = request.reserved_blocks == 0
        else:
            missing = kv.num_missing(request.table, num_tokens, num_computed)
            # Where groups do not keep all: reckoned when blocks change, of which there is one more in each.
            least = missing + len(kv.groups) * kv.keeps_all
            is_right = request.reserved_blocks >= least
            is_right &= not kv.keeps_all or request.reserved_blocks == least
        if not is_right:
            name = request.request_id
            raise BrokenInvariantError(f"{name} has reserved too many or too few blocks.")
    num_running, num_loading = numbers[RequestState.RUNNING], numbers[RequestState.LOADING]
    num_holders, reserved = queue.reserved
    require(num_holders == num_running + num_loading, "Sequences are counted wrongly.")
    require(reserved == num_reserved, "Reserved blocks are added up wrongly.")
    require(queue.num_pending_tokens == num_pending, "Pending tokens are added up wrongly.")
    require(len(scheduler.running) == num_running, "Running requests are not in the list.")
    num_waiting = numbers[RequestState.WAITING]
    require(len(scheduler.waiting) == num_waiting, "Waiting requests are not in the queue.")
    num_awaiting = num_loading + numbers[RequestState.AWAITING_KV]
    is_right = scheduler.num_awaiting_kv == num_awaiting
    require(is_right, "Requests that await KV are miscounted.")


def in_state(scheduler: Scheduler, state: RequestState) -> set[str]:
    """Ids of the requests in this state."""
    return {it.request_id for it in scheduler.requests.values() if it.state is state}


def check_nothing_left(scheduler: Scheduler) -> None:
    """An engine without requests holds nothing: no block, slot, lease, transfer or step.

    Raises BrokenInvariantError, or ValueError from the pool's own check."""
    require(not scheduler.requests, f"Requests are left: {', '.join(scheduler.requests)}.")
    pool = scheduler.kv.pool
    require(pool.num_available == pool.num_blocks, "Blocks are not free.")
    lists = len(scheduler.running) + len(scheduler.waiting) + len(scheduler.in_flight)
    require(lists == 0, "Something runs, waits or is in flight without a request.")
    check_books(scheduler)
    require(not scheduler.quarantine.requests, "A request that has ended is in quarantine.")
    if isinstance(scheduler.hooks, KVTransferHooks):
        check_nothing_under_way(scheduler.hooks.tiers)
        exporter = _exporter_of(scheduler.hooks)
        is_empty = exporter is None or not (exporter.leases or exporter.early)
        require(is_empty, "KV is held for another engine.")


def check_nothing_under_way(tiers: TieredKVConnector) -> None:
    """No transfer is under way or due."""
    require(tiers.drain_transfers() == [], "A transfer was not handed out.")
    num_held = sum(storey.num_held for storey in tiers.storeys)
    require(num_held == 0, "Blocks are held for requests that have ended.")
    require(tiers.is_idle, "A transfer, load or look-up is under way.")


def _exporter_of(hooks: KVTransferHooks) -> KVExporter | None:
    return hooks.peers.exporter if isinstance(hooks.peers, HandoffHooks) else None
