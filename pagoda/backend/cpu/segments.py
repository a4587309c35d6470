# SPDX-License-Identifier: Apache-2.0
"""Cold segments as native attention reads them, where they lie in the host's memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, groupby, islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pagoda.backend.base import ColdContexts, KVCache, LatentCache
from pagoda.backend.cpu.weights import address

if TYPE_CHECKING:
    from pagoda.backend import _native


class NativeSegments:
    """A source of segments as a native program calls it."""

    def __init__(
        self, cold: ColdContexts, native_cache: Callable[[KVCache | LatentCache], _native.Cache]
    ) -> None:
        self._source = cold.source
        self._native_cache = native_cache
        self.runs = list(_runs(cold))
        """Sequence and number of segments that are read together."""
        self._firsts = list(accumulate((count for _, count in self.runs), initial=0))
        self._known: dict[int, tuple[KVCache | LatentCache, _native.Cache]] = {}
        """Caches by their ids, which stay theirs as long as they are here."""
        self._blocks: dict[int, tuple[Sequence[int], Tensor]] = {}
        """Block numbers of runs as the source gave them last, and as a program reads them."""

    def take(self, values: int, run: int) -> tuple[_native.Cache, int, int]:
        """Cache of a run, address of its block numbers (int32), and how many they are."""
        cache, block_ids = self._source.take(values, self._firsts[run], self.runs[run][1])
        found = self._known.get(id(cache))
        if found is None:
            found = self._known[id(cache)] = cache, self._elsewhere(cache)
        blocks = self._blocks.get(run)
        if blocks is None or blocks[0] is not block_ids:
            # Most runs have the same blocks in all layers.
            blocks = self._blocks[run] = block_ids, torch.tensor(block_ids, dtype=torch.int32)
        return found[1], blocks[1].data_ptr(), len(block_ids)

    def release(self, values: int) -> None:
        self._source.release(values)

    def _elsewhere(self, cache: KVCache | LatentCache) -> _native.Cache:
        """Raises ValueError: tensors of a block are not all as far from those of the next one."""
        tensors = cache.tensors
        strides = {tensor.stride(0) * tensor.itemsize for tensor in tensors.values()}
        if len(strides) != 1:
            raise ValueError("The blocks of a segment's tensors are equally far apart.")
        if isinstance(cache, LatentCache):
            scales = address(cache.latent_scales)
            places = (0, cache.latents.data_ptr(), scales, scales)
        else:
            places = (
                cache.keys.data_ptr(),
                cache.values.data_ptr(),
                address(cache.key_scales),
                address(cache.value_scales),
            )
        num_blocks = len(next(iter(tensors.values())))
        return self._native_cache(cache).elsewhere(*places, num_blocks, strides.pop())


def _runs(cold: ColdContexts) -> Iterator[tuple[int, int]]:
    in_place = iter(cold.in_place)
    for sequence, count in enumerate(cold.counts):
        for is_in_place, alike in groupby(islice(in_place, count)):
            length = len(list(alike))
            yield from [(sequence, length)] if is_in_place else [(sequence, 1)] * length
