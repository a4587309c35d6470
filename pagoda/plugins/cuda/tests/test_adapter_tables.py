# SPDX-License-Identifier: Apache-2.0
"""Tables of adapters, by which kernels find their matrices."""

from __future__ import annotations

import weakref

import torch

from pagoda.backend.low_rank import LowRank, LowRankMaps
from pagoda.plugins.cuda.adapters import AdapterTables
from pagoda.plugins.cuda.emulation import EmulatedDevice
from pagoda.plugins.cuda.kernels.low_rank import RANK


def test_an_adapter_is_set_and_removed_once_steps_have_used_the_table() -> None:
    device, maps = EmulatedDevice(), LowRankMaps(8, (4,), torch.float32)
    tables = AdapterTables(device)
    with torch.inference_mode():
        table = tables.of(maps)
    tables.set(maps, 3, [LowRank(torch.ones(2, 8), torch.ones(4, 2), 0.5)])
    device.steps.synchronize()
    assert table.entries[:, 0, RANK].nonzero().tolist() == [[3]]
    assert int(table.entries[3, 0, RANK]) == 2
    tables.remove(maps, 3)
    device.steps.synchronize()
    assert not bool(table.entries.any())


def test_entries_change_and_matrices_go_behind_the_steps_so_far() -> None:
    device, maps = EmulatedDevice(), LowRankMaps(8, (4,), torch.float32)
    tables, found = AdapterTables(device), list[int]()
    table = tables.of(maps)

    def note() -> None:
        """A step that reads the table and then the matrices."""
        found.append(int(table.entries[3, 0, RANK]))
        found.append(sum(ref() is not None for ref in matrices))

    matrices = []
    for rank in (2, 1):
        tables.set(maps, 3, [LowRank(torch.ones(rank, 8), torch.ones(4, rank), 0.5)])
        part = maps.parts[3][0]
        assert part is not None
        matrices.append(weakref.ref(part.down))
        del part
        device.steps.run(note)
    tables.remove(maps, 3)
    device.steps.run(note)
    device.steps.synchronize()
    assert found == [2, 2, 1, 1, 0, 0]
