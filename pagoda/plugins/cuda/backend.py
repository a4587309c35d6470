# SPDX-License-Identifier: Apache-2.0
"""The backend of one GPU: weights, KV and activations in its memory, kernels in Triton."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor

from pagoda.backend.base import (
    UNNAMED,
    Compiled,
    KVCache,
    LatentCache,
    LayerMemory,
    NewTensor,
    StateCache,
    TokenBatch,
    UnsupportedError,
    new_tensor,
)
from pagoda.backend.block_rounding import quantize_blocks
from pagoda.backend.graph import Graph
from pagoda.backend.kv_store import DeviceEvent, KVStore
from pagoda.backend.low_rank import LowRank, LowRankMaps
from pagoda.backend.operation import WeightNames
from pagoda.backend.operations import OPERATIONS
from pagoda.backend.overlap import PendingOutput
from pagoda.backend.reference.quantized import quantize_int4, quantize_int8
from pagoda.backend.sampling import SampledRows, ScoredRows
from pagoda.backend.sampling_table import SamplingTable
from pagoda.backend.weights import (
    BlockWeight,
    DenseWeight,
    GroupedWeight,
    Int8Weight,
    LinearWeight,
)
from pagoda.checkpoints.weight_formats import BlockFormat
from pagoda.messages.kv_formats import format_of
from pagoda.messages.worker import Capabilities
from pagoda.parallel.collectives import Alone, Collectives, HostGroup
from pagoda.plugins.cuda.adapters import AdapterTables
from pagoda.plugins.cuda.kernels import attention, latents, states
from pagoda.plugins.cuda.kernels.numbers import KV_NARROW
from pagoda.plugins.cuda.kv_store import DeviceKVStore
from pagoda.plugins.cuda.lost import device_errors
from pagoda.plugins.cuda.lowering import LOWERED
from pagoda.plugins.cuda.pending_output import Copied, CopiedOutput
from pagoda.plugins.cuda.program import CudaCompiledGraph
from pagoda.plugins.cuda.runtime import Runtime
from pagoda.plugins.cuda.sampling import DeviceSampler
from pagoda.plugins.cuda.slot_mapping import SlotMapping, plan_slot_mapping
from pagoda.plugins.cuda.staging import PinnedPool
from pagoda.plugins.cuda.weights import DeviceLinear, prepare


class GpuBackend:
    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._pool = PinnedPool(runtime)
        self._adapters = AdapterTables(runtime)
        self._sampler = DeviceSampler(runtime, self._pool)
        self._products: WeakKeyDictionary[KVCache | LatentCache, torch.dtype] = WeakKeyDictionary()
        """Number formats that attention over caches multiplies in."""
        self.device = runtime.device
        self.memory = runtime.memory
        self.group: Collectives = Alone()
        self.arithmetic = f"cuda ({runtime.name}, Triton {triton.__version__})"
        formats = runtime.number_formats
        self.capabilities = Capabilities(
            # States of some models are as large as K and V of a thousand tokens.
            block_sizes=(16, 32, 64, *range(128, 4097, 128)),
            max_batch_tokens=65536,
            max_batch_seqs=4096,
            max_model_len=2**20,
            window_multiple=1,
            varies_with_batch=runtime.has_library,
            weight_formats=(*formats, "int8", "int4", "fp8"),
            kv_cache_dtypes=(*formats, *KV_NARROW),
            lacks_operations=tuple(name for name in OPERATIONS if name not in LOWERED),
            max_conv_width=states.MAX_CONV_WIDTH,
        )

    def join(self, group: HostGroup) -> None:
        self.group = self._runtime.open_group(group)

    # ---- what a model keeps

    def allocate_kv_cache(
        self,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None = None,
        new: NewTensor = new_tensor,  # noqa: ARG002 - host memory
    ) -> KVCache:
        kv_dtype, blocks = kv_dtype or dtype, (num_blocks, num_kv_heads, block_size)
        empty = self._runtime.empty
        keys, values = (empty((*blocks, head_dim), kv_dtype) for _ in range(2))
        scales: tuple[Tensor, ...] = ()
        if format_of(kv_dtype).has_scales:
            scales = (empty(blocks, torch.float32), empty(blocks, torch.float32))
        cache = KVCache(keys, values, *scales)
        self._products[cache] = dtype
        return cache

    def allocate_latent_cache(
        self,
        num_blocks: int,
        block_size: int,
        rank: int,
        rope_dim: int,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None = None,
        new: NewTensor = new_tensor,  # noqa: ARG002 - host memory
        index_dim: int = 0,
    ) -> LatentCache:
        kv_dtype, blocks = kv_dtype or dtype, (num_blocks, 1, block_size)
        latents, scales = (
            self._runtime.empty((*blocks, rank + rope_dim + index_dim), kv_dtype),
            None,
        )
        if format_of(kv_dtype).has_scales:
            scales = self._runtime.empty(blocks, torch.float32)
        cache = LatentCache(latents, rank, rope_dim, scales, index_dim)
        self._products[cache] = dtype
        return cache

    def open_kv_store(self, caches: Sequence[KVCache | LatentCache]) -> KVStore:
        return DeviceKVStore(self._runtime, self._pool, caches)

    def quantize_int8(self, values: Tensor, *, symmetric: bool) -> Int8Weight:
        return quantize_int8(values.cpu(), symmetric=symmetric)

    def quantize_int4(self, values: Tensor, group_size: int) -> GroupedWeight:
        return quantize_int4(values.cpu(), group_size)

    def quantize_blocks(self, values: Tensor, stored_format: BlockFormat) -> BlockWeight:
        return quantize_blocks(values.cpu(), stored_format)

    def prepare_linear(
        self, parts: Sequence[LinearWeight], bias: Tensor | None, dtype: torch.dtype
    ) -> DeviceLinear:
        for part in parts:
            if isinstance(part, DenseWeight):
                self._check_format(part.values.dtype)
        return prepare(parts, bias, dtype, self._runtime.upload)

    def _check_format(self, dtype: torch.dtype) -> None:
        name = str(dtype).removeprefix("torch.")
        if name not in self._runtime.number_formats:
            raise UnsupportedError(f"this GPU backend has no weights of {name}.")

    def set_low_rank(
        self, maps: LowRankMaps, adapter: int, parts: Sequence[LowRank | None]
    ) -> None:
        self._adapters.set(maps, adapter, parts)

    def remove_low_rank(self, maps: LowRankMaps, adapter: int) -> None:
        self._adapters.remove(maps, adapter)

    # ---- steps

    def attention_metadata(
        self, batch: TokenBatch, num_heads: int, cache: LayerMemory, group: int = 0
    ) -> SlotMapping:
        if isinstance(cache, StateCache):  # one program goes through all tokens of a sequence
            if batch.draft_lens is not None:
                batch = replace(batch, context_lens=batch.context_lens - batch.draft_lens)
            return plan_slot_mapping(
                batch, group, cache.block_size, len(batch.positions), self._pool
            )
        if isinstance(cache, LatentCache):
            block_size, products = cache.latents.shape[2], self._products[cache]
            per_tile = latents.tokens_per_tile(num_heads, products)
        else:
            _, kv_heads, block_size, _ = cache.keys.shape
            per_tile = attention.tokens_per_tile(num_heads // kv_heads)
        return plan_slot_mapping(batch, group, block_size, per_tile, self._pool)

    def compile(self, graph: Graph, names: WeightNames = UNNAMED) -> Compiled[SlotMapping]:
        return CudaCompiledGraph(
            self._runtime, self._pool, graph, names, self._products_of, self._adapters
        )

    def _products_of(self, cache: Any) -> torch.dtype:
        return self._products[cache]

    def launched(self) -> DeviceEvent:
        return self._runtime.steps.record()

    def launch_read(self, found: Tensor) -> PendingOutput[Tensor]:
        held = self._runtime.held(found)
        held = self._runtime.upload(found) if held is None else held
        with device_errors(self._runtime):
            copied = Copied(self._runtime, self._pool, [held])
        return CopiedOutput(copied, held[:, 0], lambda tensors: tensors[0])

    def launch_drain(self, counts: Tensor) -> Callable[[], Tensor]:
        with device_errors(self._runtime):
            copied = Copied(self._runtime, self._pool, [counts])
            self._runtime.steps.run(partial(_set_to_zero, counts))
        return lambda: copied.read()[0]

    def launch_sample(
        self, logits: Tensor, table: SamplingTable, slots: Sequence[int]
    ) -> PendingOutput[SampledRows]:
        return self._sampler.launch(logits, table, slots)

    def sample(self, logits: Tensor, table: SamplingTable, slots: Sequence[int]) -> SampledRows:
        return self._sampler.launch(logits, table, slots).read()

    def score(self, logits: Tensor, token_ids: Tensor, num_top: int) -> ScoredRows:
        return self._sampler.score(logits, token_ids, num_top)


def _set_to_zero(counts: Tensor) -> None:
    counts.zero_()
