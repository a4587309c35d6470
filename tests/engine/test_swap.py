# SPDX-License-Identifier: Apache-2.0
"""Swap in virtual time: requests that take turns on a device that holds a quarter of what they need."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from harness import Harness, assert_complete, make_request

from benchmarks.simulation.disk import SimDisk, disk_tiers
from pagoda.messages.frontend import GenerateRequest
from pagoda.messages.transfers import DeviceBlocks, HostSlots, TierBlocks, Transfer
from pagoda.plugins.sim.executor import TransferFate

NUM_REQUESTS = 16
PROMPT, ANSWER = 100, 100
BLOCK_SIZE = 4
LEN = PROMPT + ANSWER
NUM_BLOCKS = NUM_REQUESTS * LEN // BLOCK_SIZE // 4
"""A quarter of what all requests need in the end."""
MIN_TOUCHES = 2
"""The default of `--kv-disk-min-touches`."""


class Swapping(Harness):
    """Counts the blocks that preempted requests lost, and the tokens that they computed again."""

    def __init__(self, *, fate: TransferFate = TransferFate(), **fields: object) -> None:
        self.fate = fate
        self.begun: list[Transfer] = []
        self.num_preempted = 0
        self.num_repeated = 0
        """Blocks that had been computed, and were computed again."""
        settings = {
            "num_blocks": NUM_BLOCKS,
            "block_size": BLOCK_SIZE,
            "max_model_len": LEN + 1,
            "max_num_seqs": NUM_REQUESTS,
            "max_num_batched_tokens": 64,
            "disk": SimDisk(),
            "kv_tiers": disk_tiers(100_000, MIN_TOUCHES),
            "transfer_fate": self._begin,
            **fields,
        }
        super().__init__(**settings)  # type: ignore[arg-type]
        self.tick()  # the disk is indexed
        hooks, scheduler = self.scheduler.hooks, self.scheduler
        on_preempted, on_admitted = hooks.on_preempted, hooks.on_admitted

        def count_preempted(request):  # type: ignore[no-untyped-def]
            self.num_preempted += request.table.num_published
            on_preempted(request)

        def count_repeated(request):  # type: ignore[no-untyped-def]
            self.num_repeated += request.num_repeated_tokens // BLOCK_SIZE
            on_admitted(request)

        hooks.on_preempted, hooks.on_admitted = count_preempted, count_repeated  # type: ignore[method-assign]
        assert scheduler.hooks is hooks

    def _begin(self, transfer: Transfer) -> TransferFate:
        self.begun.append(transfer)
        return self.fate

    def count(self, source: type, target: type) -> int:
        """Blocks of transfers between two kinds of places."""
        return sum(
            len(it.target.keys if isinstance(it.target, TierBlocks) else it.source.keys)  # type: ignore[union-attr]
            for it in self.begun
            if isinstance(it.source, source) and isinstance(it.target, target)
        )

    def serve_all(self) -> None:
        self.serve(*requests(), max_model_len=LEN + 1)


def requests() -> list[GenerateRequest]:
    return [
        make_request(f"r{index}", [index] * PROMPT, max_tokens=ANSWER)
        for index in range(NUM_REQUESTS)
    ]


def test_what_preempted_requests_need_again_goes_to_disk_and_comes_back() -> None:
    """With a disk alone and the default flags, though no two requests have a block in common."""
    it = Swapping()
    it.serve_all()
    assert it.scheduler.counters.num_preemptions > 3
    stored, loaded = it.count(DeviceBlocks, TierBlocks), it.count(TierBlocks, DeviceBlocks)
    print(
        it.scheduler.counters.num_preemptions,
        it.num_preempted,
        it.num_repeated,
        stored,
        loaded,
        it.clock.now(),
    )
    assert stored and loaded
    assert it.num_repeated <= 0.05 * it.num_preempted


def test_what_falls_out_of_host_memory_goes_to_disk_and_comes_back() -> None:
    it = Swapping(kv_tiers=disk_tiers(100_000, MIN_TOUCHES, host_bytes=1), kv_host_slots=80)
    it.serve_all()
    print(it.scheduler.counters.num_preemptions, it.num_preempted, it.num_repeated, it.clock.now(), it.core.load().tiers)
    print({(type(t.source).__name__, type(t.target).__name__) for t in it.begun})
    assert it.scheduler.counters.num_preemptions > 3
