# SPDX-License-Identifier: Apache-2.0
"""Cold segments as native attention reads them, where they lie in the host's memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pagoda.backend.base import KVCache, LatentCache, SegmentSource
from pagoda.backend.cpu.weights import address

if TYPE_CHECKING:
    from pagoda.backend import _native


class NativeSegments:
    """A source of segments as a native program calls it."""

    def __init__(
        self, source: SegmentSource, native_cache: Callable[[KVCache | LatentCache], _native.Cache]
    ) -> None:
        self._source = source
        self._native_cache = native_cache
        self._known: dict[int, tuple[KVCache | LatentCache, _native.Cache]] = {}
        """Caches by their ids, which stay theirs as long as they are here."""

    def take(self, values: int, index: int) -> tuple[_native.Cache, Sequence[int]]:
        cache, block_ids = self._source.take(values, index)
        found = self._known.get(id(cache))
        if found is None:
            found = self._known[id(cache)] = cache, self._elsewhere(cache)
        return found[1], block_ids

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
