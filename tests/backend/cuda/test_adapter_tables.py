"""Tables of adapters, by which kernels find their matrices."""

from __future__ import annotations

import torch

from pagoda.backend.cuda.adapters import AdapterTables
from pagoda.backend.cuda.emulation import EmulatedDevice
from pagoda.backend.cuda.kernels.low_rank import RANK
from pagoda.backend.low_rank import LowRank, LowRankMaps


def test_an_adapter_is_set_and_removed_once_steps_have_used_the_table() -> None:
    device, maps = EmulatedDevice(), LowRankMaps(8, (4,), torch.float32)
    tables = AdapterTables(device.device, device.upload)
    with torch.inference_mode():
        table = tables.of(maps)
    tables.set(maps, 3, [LowRank(torch.ones(2, 8), torch.ones(4, 2), 0.5)])
    assert table.entries[:, 0, RANK].nonzero().tolist() == [[3]]
    assert int(table.entries[3, 0, RANK]) == 2
    tables.remove(maps, 3)
    assert not bool(table.entries.any())
