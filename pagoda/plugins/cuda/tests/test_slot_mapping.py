# SPDX-License-Identifier: Apache-2.0
"""Places of steps of single tokens are filled up; those of prompts are as they are."""

from __future__ import annotations

from itertools import pairwise

import torch

from pagoda.backend.base import TokenBatch
from pagoda.plugins.backend_check.subject import batch_of_spans
from pagoda.plugins.cuda.emulation import EmulatedDevice
from pagoda.plugins.cuda.slot_mapping import (
    MOST_CAPTURED,
    DeviceSlotMapping,
    padded_size,
    plan_slot_mapping,
)
from pagoda.plugins.cuda.staging import PinnedPool


def _planned(batch: TokenBatch, block_size: int = 16) -> tuple[DeviceSlotMapping, int]:
    places = plan_slot_mapping(batch, 0, block_size, 32, PinnedPool(EmulatedDevice()))
    return DeviceSlotMapping.of(places.layout, places.packed.memory), places.num_tokens


def test_few_sizes_serve_all_steps() -> None:
    sizes = [padded_size(rows) for rows in range(1, MOST_CAPTURED + 1)]
    assert all(rows <= size for rows, size in enumerate(sizes, start=1))
    assert all(size <= 1.15 * rows for rows, size in enumerate(sizes, start=1) if rows > 64)
    assert all(one <= other for one, other in pairwise(sizes))
    assert len({*sizes}) <= 40
    assert sizes[-1] == MOST_CAPTURED


def test_a_step_of_single_tokens_is_filled_up() -> None:
    batch = batch_of_spans([(20, 1, [7, 3]), (0, 1, [5]), (16, 1, [9, 2])])
    found, num_tokens = _planned(batch)
    assert num_tokens == 3
    assert found.slots.tolist() == [3 * 16 + 4, 5 * 16, 2 * 16, -1]
    steps = found.steps
    assert steps.positions.tolist() == [20, 0, 16, -1]
    assert steps.tiles.tolist() == [[0, 0, 1], [1, 1, 1], [2, 2, 1], [-1, 0, 0]]
    assert steps.context_lens.tolist() == [21, 1, 17, 0]
    assert steps.block_tables.shape == (4, 64)
    assert steps.block_tables[:3, :2].tolist() == [[7, 3], [5, 0], [9, 2]]
    assert not bool(steps.block_tables[:, 3:].any())


def test_steps_of_one_size_have_one_layout_until_contexts_are_much_longer() -> None:
    pool = PinnedPool(EmulatedDevice())

    def layout(counts: list[int]) -> object:
        spans = [(count - 1, 1, list(range(-(-count // 16)))) for count in counts]
        return plan_slot_mapping(batch_of_spans(spans), 0, 16, 64, pool).layout

    assert layout([5, 900, 33]) == layout([1, 1, 1, 1024])
    assert layout([5, 900, 33]) != layout([5, 1025, 33])
    assert layout([5, 900, 33]) != layout([5, 900, 33, 1, 1])


def test_prompts_are_as_they_are() -> None:
    found, num_tokens = _planned(batch_of_spans([(3, 40, [4, 1, 2]), (0, 1, [0])]))
    assert num_tokens == 41
    assert found.slots.tolist()[:2] == [4 * 16 + 3, 4 * 16 + 4]
    assert found.slots[-1] == 0
    assert found.steps.positions.tolist() == [*range(3, 43), 0]
    assert found.steps.tiles.tolist() == [[0, 0, 32], [0, 32, 8], [1, 40, 1]]
    assert found.steps.block_tables.shape == (2, 3)
    assert torch.equal(found.steps.context_lens, torch.tensor([43, 1], dtype=torch.int32))
