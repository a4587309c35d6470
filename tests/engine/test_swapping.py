# SPDX-License-Identifier: Apache-2.0
"""Swap in virtual time: requests that take turns on a device that holds a quarter of what they need."""

from __future__ import annotations

import msgspec
import pytest
from harness import Harness, assert_complete, make_request

from benchmarks.simulation.disk import SimDisk, disk_tiers
from pagoda.engine.request import Request
from pagoda.kv.tiered_connector import LOAD_TIMEOUT_S
from pagoda.messages.transfers import DeviceBlocks, HostSlots, TierBlocks, Transfer
from pagoda.plugins.sim.executor import TransferFate
from pagoda.worker.kv.jobs import num_blocks

NUM_REQUESTS = 16
PROMPT, ANSWER = 100, 100
BLOCK_SIZE = 4
LEN = PROMPT + ANSWER
NUM_BLOCKS = NUM_REQUESTS * LEN // BLOCK_SIZE // 4
"""A quarter of what all requests need in the end."""
MIN_TOUCHES = 2
"""The default of `--kv-disk-min-touches`."""


class Swapping(Harness):
    """Counts the blocks that preempted requests lost, and those that were computed again."""

    def __init__(self, **fields: object) -> None:
        self.begun: list[Transfer] = []
        self.num_lost = 0
        self.num_repeated = 0
        settings = {
            "num_blocks": NUM_BLOCKS,
            "block_size": BLOCK_SIZE,
            "max_model_len": LEN + 1,
            "max_num_seqs": NUM_REQUESTS,
            "max_num_batched_tokens": 64,
            "disk": SimDisk(),
            "kv_tiers": disk_tiers(100_000, MIN_TOUCHES),
            "transfer_fate": self._fate,
            **fields,
        }
        super().__init__(**settings)  # type: ignore[arg-type]
        self.tick()  # the disk is indexed
        scheduler, preempt = self.scheduler, self.scheduler.preempt
        on_admitted = self.hooks.on_admitted

        def count_lost(request: Request) -> None:
            self.num_lost += request.table.num_published
            preempt(request)

        def count_repeated(request: Request) -> None:
            self.num_repeated += request.num_repeated_tokens // BLOCK_SIZE
            on_admitted(request)

        scheduler.batcher.preempt = count_lost  # type: ignore[method-assign]
        self.hooks.on_admitted = count_repeated  # type: ignore[method-assign]

    def _fate(self, transfer: Transfer) -> TransferFate:
        self.begun.append(transfer)
        return TransferFate()

    def count(self, source: type, target: type) -> int:
        """Blocks of transfers between two kinds of places."""
        return sum(
            num_blocks(transfer)
            for transfer in self.begun
            if isinstance(transfer.source, source) and isinstance(transfer.target, target)
        )

    def serve_all(self) -> None:
        """Serves requests that have no block in common, and checks their tokens."""
        requests = [
            make_request(f"r{index}", [index] * PROMPT, max_tokens=ANSWER)
            for index in range(NUM_REQUESTS)
        ]
        self.serve(*requests, max_model_len=LEN + 1)
        assert self.scheduler.counters.num_preemptions > 5


def test_what_preempted_requests_need_again_goes_to_disk_and_comes_back() -> None:
    """With a disk alone and the default flags."""
    it = Swapping()
    it.serve_all()
    assert it.num_repeated <= 0.05 * it.num_lost
    assert it.count(TierBlocks, DeviceBlocks) > 0.5 * it.num_lost
    assert it.count(DeviceBlocks, TierBlocks) <= it.num_lost


def test_what_host_memory_evicts_goes_to_disk_and_comes_back() -> None:
    """A host tier that is smaller than the device, and full of what runs there."""
    it = Swapping(kv_tiers=disk_tiers(100_000, MIN_TOUCHES, host_bytes=1), kv_host_slots=80)
    it.serve_all()
    assert it.count(DeviceBlocks, TierBlocks) == 0, "no two requests pass through a block"
    assert it.count(HostSlots, TierBlocks) > 20
    assert it.count(TierBlocks, DeviceBlocks) + it.count(TierBlocks, HostSlots) > 20
    assert it.num_repeated <= 0.05 * it.num_lost


@pytest.mark.parametrize("host_slots", [0, 80])
def test_no_more_is_written_than_the_budget_allows(host_slots: int) -> None:
    it = Swapping(kv_tiers=disk_tiers(40, MIN_TOUCHES, host_slots), kv_host_slots=host_slots)
    it.serve_all()
    written = it.count(DeviceBlocks, TierBlocks) + it.count(HostSlots, TierBlocks)
    assert 20 < written <= 40 * (1 + it.clock.now() / 3600)


def test_nothing_is_copied_where_computing_again_is_faster() -> None:
    """But for some copies that tell how long they take."""
    it = Swapping(per_token_s=0.0, per_transferred_block_s=1.0)
    it.serve_all()
    assert it.count(DeviceBlocks, TierBlocks) < 0.25 * it.num_lost


@pytest.mark.parametrize("host_slots", [0, 80])
def test_what_is_on_a_slow_disk_is_computed(host_slots: int) -> None:
    """But for some loads that tell how long they take; the prompts are those of an earlier server."""
    disk = SimDisk()
    tiers = disk_tiers(100_000, 1, host_bytes=host_slots)
    fields = {"disk": disk, "kv_tiers": tiers, "kv_host_slots": host_slots, "num_blocks": 1000}
    asked = [make_request(f"r{index}", [index] * PROMPT, max_tokens=4) for index in range(40)]
    Swapping(**fields).serve(*asked, max_model_len=LEN + 1)
    assert len(disk.objects) >= 40 * (PROMPT // BLOCK_SIZE - 1)
    loaded = []
    for per_block_s in (0.0001, 2.0):
        it = Swapping(**fields, per_transferred_block_s=per_block_s)
        for request in [*asked[:2], *asked]:
            renamed = msgspec.structs.replace(
                request, request_id=f"{request.request_id}-{it.clock.now()}"
            )
            it.serve(renamed, max_model_len=LEN + 1)
        loaded.append(it.count(TierBlocks, DeviceBlocks))
    assert loaded[0] > 0.9 * len(disk.objects)
    assert loaded[1] < 0.25 * len(disk.objects)


class SlowDisk:
    """Fates of transfers of a disk that takes long from a moment on."""

    def __init__(self, delay_s: float) -> None:
        self.delay_s = delay_s
        self.is_slow = False

    def __call__(self, transfer: Transfer) -> TransferFate:
        at_disk = isinstance(transfer.source, TierBlocks) or isinstance(transfer.target, TierBlocks)
        return TransferFate(delay_s=self.delay_s if self.is_slow and at_disk else 0.0)


@pytest.mark.parametrize("host_slots", [0, 80])
@pytest.mark.parametrize("delay_s", [5.0, 1e6])
def test_a_disk_that_takes_very_long_in_mid_swap_holds_up_nobody(
    delay_s: float, host_slots: int
) -> None:
    """Who waits for it does so within the bound, and is computed again; tokens are equal."""
    fate = SlowDisk(delay_s)
    tiers = disk_tiers(100_000, MIN_TOUCHES, host_bytes=host_slots)
    it = Swapping(kv_tiers=tiers, kv_host_slots=host_slots, transfer_fate=fate)
    requests = [
        make_request(f"r{index}", [index] * PROMPT, max_tokens=ANSWER)
        for index in range(NUM_REQUESTS)
    ]
    for request in requests:
        it.add(request)
    counters = it.scheduler.counters
    last, longest = it.clock.now(), 0.0
    while it.scheduler.requests:
        if counters.num_preemptions >= 3:
            fate.is_slow = True
        num_steps = counters.num_steps
        assert it.tick()
        if counters.num_steps > num_steps:
            longest, last = max(longest, it.clock.now() - last), it.clock.now()
    assert_complete(it, requests, LEN + 1)
    assert counters.num_preemptions > 5
    assert longest <= LOAD_TIMEOUT_S + 1
