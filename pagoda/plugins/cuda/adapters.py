# SPDX-License-Identifier: Apache-2.0
"""Matrices of adapters on the device, and the table of a layer by which kernels find them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar
from weakref import WeakKeyDictionary

import torch

from pagoda.backend.base import UnsupportedError
from pagoda.backend.low_rank import LowRank, LowRankMaps, LowRankPart
from pagoda.plugins.cuda.kernels.low_rank import COLUMNS, DOWN, RANK, SCALE, UP
from pagoda.plugins.cuda.runtime import Runtime


class AdapterTable:
    """Entries of the adapters of one layer, in memory that stays where it is: captured steps read it."""

    MAX_ADAPTERS: ClassVar[int] = 256
    MAX_RANK: ClassVar[int] = 256

    def __init__(self, maps: LowRankMaps, runtime: Runtime) -> None:
        self._runtime = runtime
        shape = (self.MAX_ADAPTERS, len(maps.outputs), COLUMNS)
        # A step may make the table, in torch's inference mode, and an adapter be set outside it.
        with torch.inference_mode(mode=False):
            entries = runtime.empty(shape, torch.int64)
        self.entries = entries
        """[adapters, parts, `COLUMNS`] int64; see `kernels.low_rank`."""

        def clear() -> None:
            entries.zero_()

        runtime.steps.run(clear)

    def set(
        self,
        adapter: int,
        parts: Sequence[LowRankPart | None],
        replaced: Sequence[LowRankPart | None] | None,
    ) -> None:
        """Writes the entries of an adapter behind the steps so far, which may read the parts that are replaced."""
        rows = torch.zeros(len(parts), COLUMNS, dtype=torch.int64)
        for row, part in zip(rows, parts, strict=True):
            if part is not None:
                scale = torch.tensor(part.scale, dtype=torch.float32).view(torch.int32)
                row[DOWN], row[UP] = part.down.data_ptr(), part.up.data_ptr()
                row[RANK], row[SCALE] = part.rank, int(scale)
        own, kept = self.entries[adapter], [replaced]

        def work() -> None:
            own.copy_(rows)
            kept.clear()

        self._runtime.steps.run(work)


class AdapterTables:
    """The tables of all layers, and the matrices that they name."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._tables: WeakKeyDictionary[LowRankMaps, AdapterTable] = WeakKeyDictionary()

    def of(self, maps: LowRankMaps) -> AdapterTable:
        table = self._tables.get(maps)
        if table is None:
            table = self._tables[maps] = AdapterTable(maps, self._runtime)
        return table

    def set(self, maps: LowRankMaps, adapter: int, parts: Sequence[LowRank | None]) -> None:
        """Gives an adapter its parts. Raises ValueError: they do not fit; UnsupportedError: there is no room."""
        maps.check(parts)
        ranks = [len(part.down) for part in parts if part is not None]
        if adapter >= AdapterTable.MAX_ADAPTERS or max(ranks, default=0) > AdapterTable.MAX_RANK:
            raise UnsupportedError(
                f"the GPU backend has room for {AdapterTable.MAX_ADAPTERS} adapters of ranks up to "
                f"{AdapterTable.MAX_RANK}, not for number {adapter} of rank {max(ranks, default=0)}."
            )
        held = tuple(None if part is None else self._held(maps, part) for part in parts)
        self.of(maps).set(adapter, held, maps.parts.get(adapter))
        maps.parts[adapter] = held

    def remove(self, maps: LowRankMaps, adapter: int) -> None:
        removed = maps.parts.pop(adapter, None)
        if removed is not None:
            self.of(maps).set(adapter, [None] * len(maps.outputs), removed)

    def _held(self, maps: LowRankMaps, part: LowRank) -> LowRankPart:
        down, up = (self._runtime.upload(each.to(maps.dtype)) for each in (part.down, part.up))
        return LowRankPart(len(down), part.scale, down, up)
