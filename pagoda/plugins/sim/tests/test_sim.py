# SPDX-License-Identifier: Apache-2.0
"""The simulated executor and its worker, in virtual time."""

from __future__ import annotations

import math

import pytest

from pagoda.ipc.clock import VirtualClock
from pagoda.messages.engine_config import SimConfig
from pagoda.messages.frontend import Work
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.transfers import (
    DeviceBlocks,
    HostSlots,
    TierBlocks,
    Transfer,
    TransferEnd,
    TransferPlace,
    Transfers,
)
from pagoda.messages.worker import SlotStart, StepPlan, StepResult
from pagoda.plugins.sim.executor import Cells, SimExecutor, SimWorker, TransferFate


def start(slot: int, tokens: list[int], blocks: list[int], computed: int = 0) -> SlotStart:
    return SlotStart(
        slot, tokens, len(tokens), computed, [blocks], Work(SamplingParams(seed=3, logprobs=1))
    )


def test_steps_take_the_time_of_the_cost_model_one_after_another() -> None:
    clock = VirtualClock()
    executor = SimExecutor(SimConfig(base_s=1.0, per_token_s=0.5), clock=clock)
    executor.start()
    executor.poll()
    executor.submit(StepPlan(0, [0], [4], [start(0, [1, 2, 3, 4], [0])]))
    executor.submit(StepPlan(1, [0], [1]))
    assert executor.next_event_at() == 3.0
    clock.advance_to(2.9)
    assert executor.poll() == []
    clock.advance_to(3.0)
    (first,) = executor.poll()
    clock.advance_to(4.5)
    (second,) = executor.poll()
    assert isinstance(first, StepResult)
    assert isinstance(second, StepResult)
    assert (first.step_time_s, second.step_time_s) == (3.0, 1.5)
    assert first.logprobs[0][0].top_token_ids == first.token_ids[0]


def test_as_many_likeliest_tokens_as_there_are() -> None:
    worker = SimWorker(SimConfig(vocab_size=10), check_kv=False)
    for slot, num_top in enumerate((0, 4, 20)):
        sampling = SamplingParams(seed=3, logprobs=num_top)
        result = worker.execute(
            StepPlan(slot, [slot], [1], [SlotStart(slot, [1], 1, 0, [[slot]], Work(sampling))]), 1.0
        )
        [entry] = result.logprobs[slot]
        num_found = min(num_top, 10)
        assert len(set(entry.top_token_ids)) == len(entry.top_token_ids) == num_found
        assert entry.top_token_ids[:1] == result.token_ids[0][:num_found]
        assert entry.top_logprobs == sorted(entry.top_logprobs, reverse=True)
        assert entry.top_logprobs[:1] == [entry.logprob][:num_found]
        assert sum(map(math.exp, entry.top_logprobs)) < 1


def test_prompts_are_scored_beside_as_many_tokens_as_there_are() -> None:
    worker = SimWorker(SimConfig(vocab_size=10), check_kv=False)
    for slot, num_top in enumerate((0, 4, 10**12)):
        sampling = SamplingParams(seed=3, prompt_logprobs=num_top)
        new = SlotStart(slot, [1, 2, 3], 3, 0, [[slot]], Work(sampling))
        scores = worker.execute(StepPlan(slot, [slot], [3], [new]), 1.0).prompt_logprobs[slot]
        assert (scores.first, scores.num_top) == (1, min(num_top, 10))
        assert len(scores.entries()) == 2


def test_stages_work_one_behind_the_other() -> None:
    clock = VirtualClock()
    executor = SimExecutor(SimConfig(base_s=2.0), clock=clock, num_stages=2)
    executor.start()
    executor.poll()
    executor.submit(StepPlan(0, [0], [2], [start(0, [1, 2], [0])]))
    executor.submit(StepPlan(1, [1], [2], [start(1, [1, 2], [1])]))
    clock.advance_to(2.0)
    assert len(executor.poll()) == 1
    assert executor.next_event_at() == 3.0
    assert executor.max_in_flight == 3


def test_stages_that_do_not_sample_must_be_told() -> None:
    worker = SimWorker(SimConfig(), check_kv=True, num_stages=2)
    first = worker.execute(StepPlan(0, [0], [2], [start(0, [1, 2], [0])]), 0.0)
    with pytest.raises(ValueError, match="that the first stage does not know"):
        worker.execute(StepPlan(1, [0], [1]), 0.0)
    with pytest.raises(ValueError, match="was not what the last stage sampled"):
        worker.execute(StepPlan(1, [0], [1], new_tokens=[(0, first.token_ids[0][0] + 1)]), 0.0)
    worker.execute(StepPlan(1, [0], [1], new_tokens=[(0, first.token_ids[0][0])]), 0.0)


def test_reading_another_sequences_kv_is_noticed() -> None:
    worker = SimWorker(SimConfig(block_size=4), check_kv=True)
    worker.execute(StepPlan(0, [0], [4], [start(0, [1, 2, 3, 4], [5])]), 0.0)
    with pytest.raises(ValueError, match="another sequence's KV at position 1"):
        worker.execute(StepPlan(1, [1], [1], [start(1, [1, 9, 9, 9, 9], [5, 6], computed=4)]), 0.0)


def test_a_slot_in_use_cannot_be_started() -> None:
    worker = SimWorker(SimConfig(), check_kv=False)
    worker.execute(StepPlan(0, [0], [1], [start(0, [1], [5])]), 0.0)
    with pytest.raises(ValueError, match="in use"):
        worker.execute(StepPlan(1, [0], [1], [start(0, [1], [5])]), 0.0)


TOKENS = [1, 2, 3, 4, 5, 6, 7, 8]
ONLY_STEP = StepPlan(0, [0], [8], [start(0, TOKENS, [5, 6])])


def worker_with_blocks(disk: dict[bytes, Cells] | None = None) -> SimWorker:
    """Blocks 5 and 6 hold eight tokens; the step that wrote them is still under way."""
    worker = SimWorker(SimConfig(block_size=4), check_kv=True, disk=disk)
    worker.execute(ONLY_STEP, 0.0)
    return worker


def idle_worker_with_blocks() -> SimWorker:
    worker = worker_with_blocks()
    worker.step_done(0)
    return worker


def copy(
    worker: SimWorker, source: TransferPlace, target: TransferPlace, failed: tuple[int, ...] = ()
) -> TransferEnd:
    transfer = Transfer(0, 0, source, target)
    worker.begin(transfer)
    return worker.end(transfer, failed)


def read_back(worker: SimWorker, blocks: list[int], tokens: list[int] = TOKENS) -> None:
    """A step that reads these blocks, and writes one token behind them."""
    request = start(9, [*tokens, 9], [*blocks, 30], computed=8)
    worker.execute(StepPlan(1, [9], [1], [request], freed_slots=[]), 0.0)


def test_blocks_come_back_from_host_slots_and_from_disks_that_outlive_the_worker() -> None:
    disk: dict[bytes, Cells] = {}
    worker = worker_with_blocks(disk)
    worker.step_done(0)
    assert copy(worker, DeviceBlocks([5, 6]), HostSlots([0, 3])) == TransferEnd(0, 0)
    copy(worker, HostSlots([3]), DeviceBlocks([11]))
    copy(worker, DeviceBlocks([5]), TierBlocks("disk", [b"root"]))
    copy(worker, TierBlocks("disk", [b"root"]), DeviceBlocks([10]))
    read_back(worker, [10, 11])
    other = SimWorker(SimConfig(block_size=4), check_kv=True, disk=disk)
    copy(other, TierBlocks("disk", [b"root"]), HostSlots([2]))
    with pytest.raises(ValueError, match=r"reads 3, where nothing is"):
        copy(other, HostSlots([3]), DeviceBlocks([1]))


def test_the_wrong_block_is_noticed_when_it_is_read() -> None:
    worker = idle_worker_with_blocks()
    copy(worker, DeviceBlocks([5, 6]), HostSlots([0, 1]))
    copy(worker, HostSlots([1, 0]), DeviceBlocks([10, 11]))
    with pytest.raises(ValueError, match="another sequence's KV at position 0"):
        read_back(worker, [10, 11])


def test_a_block_that_was_not_copied_holds_nothing() -> None:
    worker = idle_worker_with_blocks()
    copy(worker, DeviceBlocks([5, 6]), HostSlots([0, 1]))
    end = copy(worker, HostSlots([0, 1]), DeviceBlocks([5, 6]), failed=(1,))
    assert (end.failed, bool(end.error)) == ([1], True)
    with pytest.raises(ValueError, match="another sequence's KV at position 4"):
        read_back(worker, [5, 6])


def test_objects_that_are_not_there_fail_to_load() -> None:
    worker = worker_with_blocks()
    end = copy(worker, TierBlocks("disk", [b"a", b"b"]), DeviceBlocks([1, 2]))
    assert end.failed == [0, 1]


def test_transfers_keep_away_from_what_steps_write_to() -> None:
    worker = worker_with_blocks()
    with pytest.raises(ValueError, match="uses what step 0 writes to"):
        worker.begin(Transfer(0, 0, DeviceBlocks([6]), HostSlots([0])))
    with pytest.raises(ValueError, match="uses what step 0 writes to"):
        worker.begin(Transfer(0, 0, TierBlocks("disk", [b"a"]), DeviceBlocks([6])))
    worker.begin(Transfer(0, 0, TierBlocks("disk", [b"a"]), DeviceBlocks([6]), after_step=0))


def test_transfers_do_not_write_to_what_steps_read() -> None:
    worker = idle_worker_with_blocks()
    read_back(worker, [5, 6])
    with pytest.raises(ValueError, match="writes to what step 1 reads"):
        worker.begin(Transfer(0, 0, TierBlocks("disk", [b"a"]), DeviceBlocks([5])))
    worker.begin(Transfer(0, 0, DeviceBlocks([5]), HostSlots([0])))
    worker.begin(Transfer(1, 0, TierBlocks("disk", [b"a"]), DeviceBlocks([6]), after_step=1))
    worker.step_done(1)
    worker.begin(Transfer(2, 0, TierBlocks("disk", [b"a"]), DeviceBlocks([30])))


def test_steps_do_not_read_what_a_transfer_writes_to() -> None:
    worker = idle_worker_with_blocks()
    worker.begin(Transfer(0, 0, TierBlocks("disk", [b"a"]), DeviceBlocks([5])))
    with pytest.raises(ValueError, match="reads block 5, which is under transfer"):
        read_back(worker, [5, 6])


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (TierBlocks("disk", [b"a"]), DeviceBlocks([7])),
        (DeviceBlocks([7]), HostSlots([0])),
    ],
)
def test_steps_keep_away_from_blocks_under_transfer(
    source: TransferPlace, target: TransferPlace
) -> None:
    worker = SimWorker(SimConfig(block_size=4), check_kv=True)
    worker.begin(Transfer(0, 0, source, target))
    with pytest.raises(ValueError, match="block 7, which is under transfer"):
        worker.execute(StepPlan(0, [0], [1], [start(0, [1], [7])]), 0.0)


@pytest.mark.parametrize(
    ("source", "target", "reason"),
    [
        (TierBlocks("disk", [b"a"]), DeviceBlocks([5]), "writes to what another transfer reads"),
        (DeviceBlocks([6]), HostSlots([0]), "uses what another transfer writes to"),
        (HostSlots([0]), DeviceBlocks([9]), "uses what another transfer writes to"),
    ],
)
def test_transfers_keep_away_from_each_other(
    source: TransferPlace, target: TransferPlace, reason: str
) -> None:
    worker = idle_worker_with_blocks()
    worker.begin(Transfer(0, 0, DeviceBlocks([5]), HostSlots([0])))
    worker.begin(Transfer(1, 0, DeviceBlocks([5]), TierBlocks("disk", [b"a"])))
    worker.begin(Transfer(2, 0, DeviceBlocks([6]), TierBlocks("disk", [b"a"])))
    with pytest.raises(ValueError, match=reason):
        worker.begin(Transfer(3, 0, source, target))


def test_transfers_take_the_time_of_the_cost_model_beside_the_steps() -> None:
    clock = VirtualClock()
    config = SimConfig(base_s=1.0, per_transferred_block_s=0.25, block_size=4)
    fates = {1: TransferFate(delay_s=5.0)}
    executor = SimExecutor(
        config,
        clock=clock,
        check_kv=True,
        transfer_fate=lambda transfer: fates.get(transfer.transfer_id, TransferFate()),
        disk={b"a": {}},
    )
    executor.start()
    executor.poll()
    executor.submit(ONLY_STEP)
    a = TierBlocks("disk", [b"a"])
    executor.submit_transfers(
        Transfers(
            [
                Transfer(0, 0, a, HostSlots([0])),
                Transfer(1, 0, a, HostSlots([1])),
                Transfer(
                    2, 0, TierBlocks("disk", [b"a", b"a"]), DeviceBlocks([5, 6]), after_step=0
                ),
            ]
        )
    )
    ended = {}
    while (instant := executor.next_event_at()) is not None:
        clock.advance_to(instant)
        for event in executor.poll():
            ended[event.transfer_id if isinstance(event, TransferEnd) else "step"] = instant
    assert ended == {0: 0.25, "step": 1.0, 2: 1.5, 1: 5.25}


def test_nobody_waits_for_a_step_that_lost_workers_were_given() -> None:
    executor = SimExecutor(SimConfig(), clock=VirtualClock(), check_kv=True)
    executor.start()
    executor.submit(ONLY_STEP)
    executor.start()
    with pytest.raises(ValueError, match="wait for step 0 for ever"):
        executor.submit_transfers(Transfers([Transfer(0, 0, HostSlots([0]), DeviceBlocks([5]), 0)]))
