# SPDX-License-Identifier: Apache-2.0
"""Tiers of models with several KV groups: what is kept of a prefix, and that it is enough to go on behind it."""

from __future__ import annotations

import pytest
from group_models import NAMES, grouped, state
from harness import Harness, assert_complete, make_request

from benchmarks.simulation.disk import SimDisk, disk_tiers
from pagoda.kv.block_keys import group_key, prefix_keys
from pagoda.messages.engine_config import KVTiersConfig
from pagoda.messages.kv_groups import KVGroup, full_group
from pagoda.messages.transfers import DeviceBlocks, HostSlots, Transfer
from pagoda.plugins.sim.executor import TransferFate

GROUPED = ("window", "mixed", "chunk", "state", "all", "several")
DISK = disk_tiers(1000, 1)
TWICE = disk_tiers(1000, 2)
HOST = KVTiersConfig(host_bytes=1)
LONG = 40
"""Tokens of a prompt that fills ten blocks."""


class Grouped(Harness):
    def __init__(self, groups: tuple[KVGroup, ...], **fields: object) -> None:
        self.begun: list[Transfer] = []
        most = sum(group.most_blocks(0, 64, 8) for group in groups)
        settings = {"num_blocks": most, "max_num_seqs": 4, "max_num_batched_tokens": 8, **fields}
        super().__init__(kv_groups=groups, transfer_fate=self._begin, **settings)  # type: ignore[arg-type]

    def _begin(self, transfer: Transfer) -> TransferFate:
        self.begun.append(transfer)
        return TransferFate()

    def ask(self, name: str, prompt: list[int], max_tokens: int = 4) -> int:
        """Returns how many tokens of the prompt were cached."""
        self.serve(make_request(name, prompt, max_tokens=max_tokens))
        return self.finished[name].num_cached_tokens

    def fill_device(self) -> None:
        for index in range(6):
            self.ask(f"filling {len(self.finished)}", [50 + index] * LONG)


def longest_hit(groups: tuple[KVGroup, ...]) -> int:
    multiple = max(group.block_size for group in groups)
    return LONG - LONG % multiple


@pytest.mark.parametrize("name", GROUPED)
def test_what_the_device_has_evicted_comes_back_from_host_memory(name: str) -> None:
    it = Grouped(grouped(name, 4), kv_tiers=HOST, kv_host_slots=256)
    prompt = [*range(LONG)]
    assert it.ask("first", prompt) == 0
    it.fill_device()
    it.begun.clear()
    assert it.ask("again", [*prompt, 1]) == longest_hit(it.scheduler.kv.groups)
    assert any(isinstance(transfer.target, DeviceBlocks) for transfer in it.begun)


@pytest.mark.parametrize("host_slots", [0, 256])
@pytest.mark.parametrize("name", GROUPED)
def test_a_server_that_starts_again_goes_on_from_disk(name: str, host_slots: int) -> None:
    """A state is a snapshot there like any block."""
    disk, groups, prompt = SimDisk(), grouped(name, 4), [*range(LONG)]
    Grouped(groups, disk=disk, kv_tiers=DISK).ask("before", prompt)
    it = Grouped(groups, disk=disk, kv_tiers=DISK, kv_host_slots=host_slots)
    assert it.ask("after", [*prompt, 1]) == longest_hit(groups)


@pytest.mark.parametrize("name", GROUPED)
def test_what_another_server_has_written_is_found_without_a_scan(name: str) -> None:
    disk, groups, prompt = SimDisk(), grouped(name, 4), [*range(LONG)]
    it = Grouped(groups, disk=disk, kv_tiers=DISK)
    other = Grouped(groups, disk=SimDisk(), kv_tiers=DISK)
    it.ask("indexes", [99] * 9)
    other.ask("there", prompt)
    assert other.disk is not None
    disk.objects.update(other.disk.objects)
    assert it.ask("here", [*prompt, 1]) == longest_hit(groups)


@pytest.mark.parametrize("name", NAMES)
def test_one_request_writes_nothing_that_two_must_pass_through(name: str) -> None:
    disk, groups, prompt = SimDisk(), grouped(name, 4), [*range(LONG)]
    it = Grouped(groups, disk=disk, kv_tiers=TWICE)
    it.ask("indexes", [99] * 9)
    it.ask("first", prompt, max_tokens=6)  # its answer ends inside the windows of its prompt
    assert disk.objects == {}


@pytest.mark.parametrize("name", NAMES)
def test_a_prefix_that_two_requests_passed_through_is_found_after_a_restart(name: str) -> None:
    disk, groups, prompt = SimDisk(), grouped(name, 4), [*range(LONG)]
    it = Grouped(groups, disk=disk, kv_tiers=TWICE)
    it.ask("indexes", [99] * 9)
    it.ask("first", [*prompt, 1])
    it.ask("second", [*prompt, 2])
    again = Grouped(groups, disk=disk, kv_tiers=TWICE)
    assert again.ask("after", [*prompt, 3]) == longest_hit(groups)


def test_the_end_of_what_few_touches_let_in_is_let_in_with_it() -> None:
    """A conversation is found as far as credits go: the window at its end is written too, at its first touch."""
    disk, groups, prompt = SimDisk(), grouped("mixed", 4), [*range(LONG)]
    it = Grouped(groups, disk=disk, kv_tiers=TWICE)
    it.ask("indexes", [99] * 9)
    it.ask("first", prompt, max_tokens=1)
    it.ask("second", [*prompt, *range(50, 58)], max_tokens=1)
    again = Grouped(groups, disk=disk, kv_tiers=TWICE)
    assert again.ask("after", [*prompt, *range(50, 58), 1]) == 48


def test_what_lies_behind_a_window_is_not_kept() -> None:
    disk, groups = SimDisk(), grouped("mixed", 4)
    prompt = [*range(LONG)]
    it = Grouped(groups, disk=disk, kv_tiers=DISK)
    it.ask("r", prompt, max_tokens=1)
    keys = prefix_keys([*prompt, 0], 4, None, 100)
    kept = [
        [index for index, key in enumerate(keys) if group_key(key, group) in disk.objects]
        for group in range(len(groups))
    ]
    assert [len(indices) for indices in kept] == [10, 2, 2]
    assert kept[1:] == [list(it.scheduler.kv.layout.needed(group, 10)) for group in (1, 2)]


def test_the_windows_at_the_ends_of_prompt_and_answer_are_kept() -> None:
    it = Grouped(grouped("mixed", 4), kv_tiers=HOST, kv_host_slots=256)
    prompt = [*range(LONG)]
    it.ask("first", prompt, max_tokens=20)
    it.fill_device()
    assert it.ask("prompt alone", [*prompt, 1]) == 40
    whole = [*prompt, *it.tokens["first"]]
    assert it.ask("next turn", [*whole, 1, 2]) == 56


def test_a_prefix_without_its_window_is_computed_as_far_as_need_be() -> None:
    """Host memory has lost the window of one group: the prefix is of no use."""
    it = Grouped(grouped("mixed", 4), kv_tiers=HOST, kv_host_slots=256)
    prompt = [*range(LONG)]
    it.ask("first", prompt, max_tokens=1)
    it.fill_device()
    (pool,) = it.hooks.near_pools
    key = prefix_keys([*prompt, 0], 4, None, 100)[9]
    assert pool.find(group_key(key, 2)) is not None
    pool.discard(group_key(key, 2))
    assert it.ask("again", [*prompt, 1]) == 0


def test_a_window_that_cannot_be_read_costs_its_prefix_and_nothing_else() -> None:
    fails = [True]

    class Failing(Grouped):
        def _begin(self, transfer: Transfer) -> TransferFate:
            super()._begin(transfer)
            is_load = isinstance(transfer.target, DeviceBlocks)
            is_window = isinstance(transfer.source, HostSlots) and len(transfer.source.slots) == 2
            return (
                TransferFate(failed=(1,)) if is_load and is_window and fails[0] else TransferFate()
            )

    it = Failing(grouped("mixed", 4), kv_tiers=HOST, kv_host_slots=256)
    prompt = [*range(LONG)]
    it.ask("first", prompt)
    it.fill_device()
    assert it.ask("again", [*prompt, 1]) == 0
    fails[0] = False
    it.fill_device()
    assert it.ask("and again", [*prompt, 1]) == 40


def test_a_preempted_request_goes_on_from_its_snapshot() -> None:
    groups = (full_group(1, 4), state(8))
    it = Grouped(groups, num_blocks=24, kv_tiers=HOST, kv_host_slots=256)
    urgent = [make_request(f"u{i}", [i] * 30, max_tokens=20, priority=-1) for i in (1, 2)]
    slow = make_request("slow", [*range(30)], max_tokens=30)
    it.add(slow)
    it.tick_until_started("slow")
    it.ticks(12)
    for request in urgent:
        it.add(request)
    it.run()
    assert_complete(it, [slow, *urgent], 64)
