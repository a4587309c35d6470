# SPDX-License-Identifier: Apache-2.0
"""Requests with cold segments on several ranks, each of which reads its own part of blocks, in real processes."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest
from replica import SAMPLING, Replica, new_executor, next_event, worker_config
from small_objects import disk_under
from tiny_models import save_model

from pagoda.messages.frontend import Work
from pagoda.messages.segments import ColdSegment
from pagoda.messages.transfers import DeviceBlocks, HostSlots, TierBlocks
from pagoda.messages.worker import SlotStart, StepPlan, StepResult, WorkerReady
from pagoda.parallel.config import ParallelConfig

SEGMENT, BLOCK = 128, 16
PROMPT = [random.Random(3).randrange(320) for _ in range(300)]
BLOCKS = list(range(19))
KEYS = [bytes([i]) * 32 for i in range(8)]
RANKS = {
    "tp": ParallelConfig(tensor_parallel_size=2),
    "pp": ParallelConfig(pipeline_parallel_size=2),
    "both": ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2),
}


def goes_on(replica: Replica, places: list[HostSlots | TierBlocks], freed: int) -> StepResult:
    """Computes the last token of the prompt in slot 1 - `freed` behind cold segments."""
    slot = 1 - freed
    start = SlotStart(
        *(slot, PROMPT, len(PROMPT), len(PROMPT) - 1),
        [[20] * 16 + BLOCKS[16:]],
        Work(SAMPLING),
        cold=[ColdSegment(slot, 0, place) for place in places],
    )
    plan = StepPlan(replica.num_steps, [slot], [1], [start], freed_slots=[freed])
    replica.num_steps += 1
    replica.executor.submit(plan)
    result = next_event(replica.executor)
    assert isinstance(result, StepResult)
    return result


@pytest.mark.parametrize("name", RANKS)
def test_every_rank_streams_its_part(name: str, tmp_path: Path) -> None:
    save_model("qwen3", tmp_path / "model")
    config = worker_config(
        tmp_path / "model", RANKS[name], kv_host_bytes=2**19, kv_tiers=disk_under(tmp_path)
    )
    config = msgspec.structs.replace(
        config, num_blocks=32, max_model_len=400, segment_tokens=SEGMENT
    )
    executor = new_executor(config, tmp_path)
    try:
        executor.start()
        ready = next_event(executor)
        assert isinstance(ready, WorkerReady)
        assert ready.segment_tokens == SEGMENT
        replica = Replica(executor, ready, generation=1)
        whole = replica.answer(PROMPT, BLOCKS)
        host, disk = HostSlots(list(range(8))), TierBlocks("disk", KEYS)
        for first, place in ((0, host), (8, disk)):
            end = replica.copy(DeviceBlocks(BLOCKS[first : first + 8]), place)
            assert not end.failed
        found = goes_on(replica, [host, disk], freed=0)
        assert found.logprobs[1][0] == whole
        assert found.streamed_bytes > 0

        # One rank alone lacks a block.
        path = sorted(tmp_path.glob(f"kv/*/{KEYS[0].hex()[:2]}/*"))
        assert len(path) == RANKS[name].replica_size
        path[-1].unlink()
        found = goes_on(replica, [host, disk], freed=1)
        assert list(found.lost_segments) == [0]
        assert not found.slots
        assert not found.errors
        found = goes_on(replica, [host], freed=0)
        assert list(found.slots) == [1]
    finally:
        executor.close()
