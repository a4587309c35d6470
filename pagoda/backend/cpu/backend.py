# SPDX-License-Identifier: Apache-2.0
"""The operations as native kernels for x86-64 and 64-bit ARM CPUs; see csrc/.

The kernels keep one order of summation whatever the step holds: a linear layer adds up along its inputs, attention
over cached tokens in tiles and splits at fixed positions. Threads share out panels of outputs and parts of
contexts, never a sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import msgspec
import torch
from torch import Tensor

from pagoda.backend.base import (
    UNNAMED,
    Compiled,
    Experts,
    KVCache,
    LatentCache,
    LayerMemory,
    StateCache,
    TokenBatch,
)
from pagoda.backend.cpu.native import choose_instruction_set, load_native
from pagoda.backend.cpu.program import CompiledGraph
from pagoda.backend.cpu.segments import NativeSegments
from pagoda.backend.cpu.weights import (
    DTYPES,
    GATES,
    KV_DTYPES,
    NativeAttentionMetadata,
    PackedLinear,
    WeightMemory,
    WeightSegment,
    address,
    check_experts,
    packed_low_rank,
)
from pagoda.backend.graph import Graph
from pagoda.backend.host import HostBackend, check_token_ids
from pagoda.backend.kv_store import Pages
from pagoda.backend.lattices import kernel_table
from pagoda.backend.low_rank import LowRank, LowRankMaps
from pagoda.backend.operation import WeightNames
from pagoda.backend.sampling import SampledRows, SampleOutcome, ScoredRows, check_logits
from pagoda.backend.sampling_table import SamplingTable
from pagoda.backend.weights import (
    BlockWeight,
    DenseWeight,
    Fp8Weight,
    GroupedWeight,
    Int8Weight,
    LinearWeight,
    same_order,
    total_outputs,
    weight_format,
    weight_shape,
)
from pagoda.checkpoints.weight_formats import CODEBOOKS, TRITS_OF_BYTE, BlockFormat
from pagoda.devices import DeviceSet
from pagoda.errors import ConfigError
from pagoda.messages.kv_formats import format_of
from pagoda.parallel.collectives import Collectives

if TYPE_CHECKING:
    from pagoda.backend import _native

MAX_INT8_INPUTS = 65536
"""A sum of this many products of 8-bit codes still fits 32 bits."""
_LEAST_LATENT = 4
"""Elements that become lanes of keys together."""


def open_backend(devices: DeviceSet) -> CpuBackend:  # noqa: ARG001
    """The backend with this CPU's best instruction set; the worker is bound to its cores already."""
    return CpuBackend(choose_instruction_set())


class CpuBackend(HostBackend[PackedLinear, NativeAttentionMetadata]):
    """Native kernels of one instruction set."""

    def __init__(self, instruction_set: str, group: Collectives | None = None) -> None:
        """Loads the kernels; without a group the backend computes alone.

        Raises BackendUnavailableError if the kernels are not installed, ValueError if the CPU lacks the
        instruction set.
        """
        super().__init__(f"cpu ({instruction_set})", group)
        self._native = native = load_native()
        self.capabilities = msgspec.structs.replace(
            self.capabilities,
            kv_cache_dtypes=tuple(format_of(dtype).name for dtype in KV_DTYPES),
            context_parallel=True,
            max_experts=native.MAX_EXPERTS,
            max_conv_width=native.MAX_CONV_WIDTH,
            max_delta_key_dim=native.MAX_DELTA_KEY,
            delta_key_multiple=native.DELTA_KEY_MULTIPLE,
            max_scan_state=native.MAX_SCAN_STATE,
        )
        self.kernels: _native.Kernels = native.Kernels(instruction_set)
        self._known_experts: WeakKeyDictionary[Experts[PackedLinear], _native.Experts] = (
            WeakKeyDictionary()
        )
        self._known_maps: WeakKeyDictionary[LowRankMaps, _native.LowRankMaps] = WeakKeyDictionary()
        self._known_tables: WeakKeyDictionary[SamplingTable, _native.SamplingTable] = (
            WeakKeyDictionary()
        )
        self._adapter_memory: dict[int, WeightMemory] = {}
        self._memory = WeightMemory(self._native.advise_large_pages)

    def advise(self, *cached: Tensor) -> None:
        for part in cached:
            self._native.advise_large_pages(part.data_ptr(), part.nbytes)

    def open_pages(self, tensors: Sequence[tuple[int, int]], num_blocks: int) -> Pages:
        """A thread without priority, which gives way to those that compute."""
        pages: Pages = self._native.Populator(list(tensors), num_blocks)
        return pages

    def block_shapes(
        self,
        block_size: int,
        head_dim: int,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        what: str = "head sizes",
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Keys are [head_dim / p, block_size, p], so that vectors hold an element of many keys.

        Values are [block_size / q, head_dim, q]. p and q are 2 where one instruction multiplies pairs, else 1.
        Raises ConfigError: no kernel takes heads of this size."""
        if head_dim % 2 or head_dim > self._native.MAX_HEAD_DIM:
            raise ConfigError(
                f"the cpu backend takes even {what} up to {self._native.MAX_HEAD_DIM}, "
                f"not {head_dim}; --backend reference takes any."
            )
        p = self.kernels.key_pair(DTYPES[dtype], KV_DTYPES[kv_dtype])
        q = self.kernels.value_pair(DTYPES[dtype], KV_DTYPES[kv_dtype], block_size)
        return (head_dim // p, block_size, p), (block_size // q, head_dim, q)

    # ---- token by token

    def quantize_int8(self, values: Tensor, *, symmetric: bool) -> Int8Weight:
        dtype, values = DTYPES[values.dtype], values.contiguous()
        outputs, inputs = values.shape
        codes = torch.empty((outputs, inputs), dtype=torch.int8)
        scales = torch.empty(outputs)
        zero_points = None if symmetric else torch.empty(outputs, dtype=torch.int32)
        results = (codes.data_ptr(), scales.data_ptr(), address(zero_points))
        self.kernels.quantize_int8(dtype, outputs, inputs, values.data_ptr(), *results)
        return Int8Weight(codes, scales, zero_points)

    def quantize_int4(self, values: Tensor, group_size: int) -> GroupedWeight:
        dtype, values = DTYPES[values.dtype], values.contiguous()
        outputs, inputs = values.shape
        codes = torch.empty((outputs, inputs), dtype=torch.uint8)
        scales = torch.empty((outputs, inputs // group_size), dtype=torch.float16)
        self.kernels.quantize_int4(
            dtype,
            outputs,
            inputs,
            group_size,
            values.data_ptr(),
            codes.data_ptr(),
            scales.data_ptr(),
        )
        return GroupedWeight(codes, scales, None, bits=4, group_size=group_size)

    def quantize_blocks(self, values: Tensor, stored_format: BlockFormat) -> BlockWeight:
        dtype, values = DTYPES[values.dtype], values.contiguous()
        outputs, inputs = values.shape
        if stored_format.block_size != inputs or not stored_format.whole_rows:
            raise ValueError(f"Rows of {inputs} are not held as {stored_format}.")
        groups = inputs // stored_format.group_size
        rounded = BlockWeight(
            stored_format,
            torch.empty((outputs, inputs), dtype=torch.uint8),
            *(torch.empty((outputs, groups), dtype=torch.int8) for _ in range(2)),
            *(torch.empty((outputs, 1), dtype=torch.float16) for _ in range(2)),
        )
        parts = (rounded.scales, rounded.minima, rounded.block_scales, rounded.block_minima)
        self.kernels.quantize_blocks(
            dtype,
            outputs,
            inputs,
            stored_format.bits,
            stored_format.group_size,
            values.data_ptr(),
            rounded.codes.data_ptr(),
            *map(address, parts),
        )
        return rounded

    def prepare_linear(
        self, parts: Sequence[LinearWeight], bias: Tensor | None, dtype: torch.dtype
    ) -> PackedLinear:
        """Parts of one format, one after the other, become one map.
        Raises ValueError: an int8 part has more than `MAX_INT8_INPUTS` inputs."""
        segments: list[WeightSegment] = []
        first = 0
        for alike in _runs_of_one_format(parts):
            outputs = total_outputs(alike)
            own_bias = None if bias is None else bias[first : first + outputs]
            segments.append(self._pack(alike, own_bias, dtype))
            first += outputs
        return PackedLinear(tuple(segments), first, weight_shape(parts[0])[1])

    def _pack(
        self, parts: Sequence[LinearWeight], bias: Tensor | None, dtype: torch.dtype
    ) -> WeightSegment:
        """Parts of one format."""
        if bias is not None:
            bias = torch.nn.functional.pad(bias.float(), (0, -len(bias) % 32))
        first, outputs, inputs = parts[0], total_outputs(parts), weight_shape(parts[0])[1]
        order, offsets = None, None
        if isinstance(first, DenseWeight):
            number = DTYPES[dtype]
            weight = _join(parts, "values").to(dtype)
            panels = self._memory.take(self._native.packed_bytes(number, outputs, inputs, 0))
            self.kernels.pack_weight(number, outputs, inputs, weight.data_ptr(), panels.data_ptr())
            return WeightSegment(panels, bias, outputs, (number, outputs, inputs, 0))
        if isinstance(first, BlockWeight):
            return self._pack_blocks(first.stored_format, parts, bias)
        if isinstance(first, Fp8Weight):
            shape = (DTYPES[dtype], outputs, inputs, first.group_size or inputs)
            panels = self._memory.take(self._native.packed_bytes(*shape))
            values, scales = _join(parts, "values"), _join(parts, "scales")
            self._native.pack_small(*shape, *map(address, (values, scales, panels)))
            return WeightSegment(panels, bias, outputs, shape)
        shapes, scales = self._native.QuantizedShape, _join(parts, "scales")
        if isinstance(first, Int8Weight):
            if inputs > MAX_INT8_INPUTS:
                raise ValueError(
                    f"An int8 map takes at most {MAX_INT8_INPUTS} inputs, not {inputs}: its sums would overflow."
                )
            codes = _join(parts, "values")
            offsets = None if first.zero_points is None else _join(parts, "zero_points")
            shape = shapes.int8(outputs, inputs, offsets is not None)
        else:
            codes = _join(parts, "codes")
            offsets = None if first.offsets is None else _join(parts, "offsets")
            order = None if first.act_order is None else first.act_order.contiguous()
            shape = shapes.grouped(
                outputs, inputs, first.bits, first.group_size, offsets is not None
            )
        panels = self._memory.take(shape.bytes)
        self._native.pack_quantized(
            shape, codes.data_ptr(), scales.data_ptr(), address(offsets), panels.data_ptr()
        )
        return WeightSegment(panels, bias, outputs, shape, order)

    def _pack_blocks(
        self, held: BlockFormat, parts: Sequence[LinearWeight], bias: Tensor | None
    ) -> WeightSegment:
        """Blocks of one format."""
        outputs, inputs = total_outputs(parts), weight_shape(parts[0])[1]
        lattice, points = held.lattice, (TRITS_OF_BYTE if held.trits else 0, 0, 0, 0)
        if lattice is not None and held.codebook is not None:
            table = kernel_table(lattice, held.codebook)
            points = (lattice.inputs, lattice.high_bits, lattice.sign_inputs, table.data_ptr())
        shape = self._native.QuantizedShape.in_blocks(
            outputs,
            inputs,
            held.bits,
            held.group_size,
            held.block_size,
            held.integer_scales,
            held.minima,
            CODEBOOKS.index(held.codebook),
            held.whole_rows,
            *points,
        )
        tensors = [
            None if getattr(parts[0], field) is None else _join(parts, field)
            for field in ("codes", "scales", "minima", "block_scales", "block_minima")
        ]
        panels = self._memory.take(shape.bytes)
        self._native.pack_blocks(shape, *map(address, tensors), panels.data_ptr())
        return WeightSegment(panels, bias, outputs, shape)

    def sample(self, logits: Tensor, table: SamplingTable, slots: Sequence[int]) -> SampledRows:
        table.check(logits, slots)
        if _checked(logits).stride(1) != 1:
            logits = logits.contiguous()
        num_top = table.most_reported(slots)
        numbers = torch.empty((len(slots), 3 + num_top), dtype=torch.int64)
        logprobs = torch.empty((len(slots), 1 + num_top))
        reports = (num_top, numbers.data_ptr(), logprobs.data_ptr())
        native = self._native_table(table)
        self.kernels.sample(native, slots, logits.data_ptr(), logits.stride(0), *reports)
        outcomes, token_ids, ranks, *_ = numbers.unbind(1)
        return SampledRows(outcomes, token_ids, ranks, numbers[:, 3:], logprobs)

    def _native_table(self, table: SamplingTable) -> _native.SamplingTable:
        native = self._known_tables.get(table)
        if native is None:
            columns = {name: column.buffer_info()[0] for name, column in table.columns.items()}
            places = columns | {"mask": table.masks.data_ptr()}
            shape = (table.num_slots, table.vocab_size)
            native = self._known_tables[table] = self._native.SamplingTable(*shape, places)
        return native

    def score(self, logits: Tensor, token_ids: Tensor, num_top: int) -> ScoredRows:
        check_logits(logits, token_ids)
        rows, vocab_size = _checked(logits).shape
        check_token_ids(token_ids, vocab_size)
        num_top = min(num_top, vocab_size)
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        ids = token_ids.contiguous()
        numbers = torch.empty((rows, 3 + num_top), dtype=torch.int64)
        logprobs = torch.empty((rows, 1 + num_top))
        sizes = (rows, logits.stride(0), vocab_size, num_top)
        reports = (numbers.data_ptr(), logprobs.data_ptr())
        self.kernels.score(ids.data_ptr(), logits.data_ptr(), *sizes, *reports)
        finite = bool((numbers[:, 0] == int(SampleOutcome.DRAWN)).all())
        return ScoredRows(finite, numbers[:, 2], numbers[:, 3:], logprobs)

    def set_low_rank(
        self, maps: LowRankMaps, adapter: int, parts: Sequence[LowRank | None]
    ) -> None:
        maps.check(parts)
        # Memory of its own, which is gone with the adapter.
        memory = self._adapter_memory.setdefault(
            adapter, WeightMemory(self._native.advise_large_pages)
        )
        packed = tuple(
            None
            if part is None
            else packed_low_rank(part, maps.dtype, self._native.LOW_RANK_BLOCK, memory)
            for part in parts
        )
        self.native_maps(maps).set(
            adapter,
            [
                (part.rank, part.scale, part.down.data_ptr(), part.up.data_ptr())
                if part
                else (0, 0.0, 0, 0)
                for part in packed
            ],
        )
        maps.parts[adapter] = packed

    def remove_low_rank(self, maps: LowRankMaps, adapter: int) -> None:
        self.native_maps(maps).remove(adapter)
        self._adapter_memory.pop(adapter, None)
        maps.parts.pop(adapter, None)

    def native_maps(self, maps: LowRankMaps) -> _native.LowRankMaps:
        native = self._known_maps.get(maps)
        if native is None:
            shape = (DTYPES[maps.dtype], maps.inputs, list(maps.outputs))
            native = self._known_maps[maps] = self._native.LowRankMaps(*shape)
        return native

    def native_experts(self, experts: Experts[PackedLinear]) -> _native.Experts:
        known = self._known_experts.get(experts)
        if known is not None:
            return known
        check_experts(experts, self._native.MAX_EXPERTS)
        routing, activation = experts.routing, experts.activation
        native: _native.Experts = self._native.Experts(
            self.kernels,
            experts.gate[0].inputs,
            self._native.ExpertRouting(
                routing.num_experts,
                routing.experts_per_token,
                routing.renormalize,
                ("softmax", "sigmoid", "given").index(routing.scores),
                routing.num_groups,
                routing.groups_per_token,
                routing.group_score == "best_two",
                routing.scaling_factor,
                routing.weighs_inputs,
            ),
            address(experts.correction),
            GATES[activation.kind],
            activation.alpha,
            activation.limit,
            experts.first,
            experts.counts.data_ptr(),
        )
        for maps in zip(experts.gate, experts.up, experts.down, strict=True):
            gate, up, down = (
                (self._native_linear(part.segments[0]), address(part.segments[0].bias))
                for part in maps
            )
            native.add(*gate, *up, *down)
        self._known_experts[experts] = native
        return native

    def native_layer(self, segments: Iterable[WeightSegment]) -> _native.LinearLayer:
        layer: _native.LinearLayer = self._native.LinearLayer()
        for segment in segments:
            bias_bytes = 0 if segment.bias is None else segment.bias.nbytes
            layer.add(self._native_linear(segment), address(segment.bias), bias_bytes)
        return layer

    def _native_linear(self, segment: WeightSegment) -> _native.PackedLinear:
        kind, panels = self._native.PackedLinear, segment.panels.data_ptr()
        native: _native.PackedLinear = (
            kind.dense(*segment.shape, panels)
            if isinstance(segment.shape, tuple)
            else kind.quantized(segment.shape, panels, address(segment.act_order))
        )
        return native

    # ---- attention

    def attention_metadata(
        self, batch: TokenBatch, num_heads: int, cache: LayerMemory, group: int = 0
    ) -> NativeAttentionMetadata:
        if isinstance(cache, StateCache):
            # Layers with a state read places of tokens and blocks alone, and plan nothing by heads: there is one
            # of one element, as csrc/layer_lowering.cpp asks for.
            num_heads = num_kv_heads = head_dim = 1
            num_blocks, block_size = cache.num_blocks, cache.block_size
        else:
            held = cache.latents if isinstance(cache, LatentCache) else cache.values
            num_blocks, num_kv_heads, block_pairs, head_dim, pair = held.shape
            block_size = block_pairs * pair
        query_lens, context_lens, block_tables = (
            part.contiguous()
            for part in (batch.query_lens, batch.context_lens, batch.block_tables[group])
        )
        native = self._native.AttentionMetadata(
            num_heads,
            num_kv_heads,
            head_dim,
            block_size,
            num_blocks,
            len(query_lens),
            query_lens.data_ptr(),
            context_lens.data_ptr(),
            address(batch.draft_lens),
            block_tables.data_ptr(),
            block_tables.shape[1],
            batch.segment,
        )
        cold = batch.cold.get(group)
        if cold is not None:
            segments = NativeSegments(cold, self._native_memory)
            native.set_cold(segments.runs, segments)
        return NativeAttentionMetadata(native, num_heads, head_dim)

    def _native_memory(self, cache: KVCache | LatentCache) -> _native.Cache:
        return (
            self.native_latents(cache)
            if isinstance(cache, LatentCache)
            else self.native_cache(cache)
        )

    def native_cache(self, cache: KVCache) -> _native.Cache:
        tensors = (cache.keys, cache.values, cache.key_scales, cache.value_scales)
        num_blocks, num_kv_heads, parts, block_size, pair = cache.keys.shape
        native: _native.Cache = self._native.Cache(
            KV_DTYPES[cache.keys.dtype],
            pair,
            *map(address, tensors),
            num_blocks,
            num_kv_heads,
            block_size,
            parts * pair,
            parts * pair,
            0,
        )
        return native

    def native_latents(self, cache: LatentCache) -> _native.Cache:
        num_blocks, _, rows, width, pair = cache.latents.shape
        if width < _LEAST_LATENT:
            raise ConfigError(
                f"the cpu backend takes latents of {_LEAST_LATENT} elements or more, not {width}; "
                f"--backend reference takes any."
            )
        scales = address(cache.latent_scales)
        native: _native.Cache = self._native.Cache(
            KV_DTYPES[cache.latents.dtype],
            pair,
            0,
            cache.latents.data_ptr(),
            scales,
            scales,
            num_blocks,
            1,
            rows * pair,
            width,
            cache.rank,
            cache.index_dim,
        )
        return native

    def native_states(self, cache: StateCache) -> _native.StateCache:
        first, second = cache.halves()
        native: _native.StateCache = self._native.StateCache(
            first[:, cache.offset :].data_ptr(),
            first.stride(0),
            second[:, cache.offset :].data_ptr(),
            second.stride(0),
            cache.units,
            cache.floats,
            len(first),
            cache.block_size,
        )
        return native

    # ---- all at once

    def compile(
        self, graph: Graph, names: WeightNames = UNNAMED
    ) -> Compiled[NativeAttentionMetadata]:
        return CompiledGraph(self, graph, self._native.Program, names)


def _checked(x: Tensor) -> Tensor:
    """x, if it is float32, as all activations are; raises ValueError if it is not."""
    if x.dtype != torch.float32:
        raise ValueError(f"Values are {x.dtype}, but torch.float32 is needed.")
    return x


def _runs_of_one_format(parts: Sequence[LinearWeight]) -> list[list[LinearWeight]]:
    runs: list[list[LinearWeight]] = []
    for part in parts:
        if (
            runs
            and weight_format(runs[-1][0]) == weight_format(part)
            and same_order(runs[-1][0], part)
        ):
            runs[-1].append(part)
        else:
            runs.append([part])
    return runs


def _join(parts: Sequence[LinearWeight], field: str) -> Tensor:
    tensors = [getattr(part, field) for part in parts]
    return tensors[0].contiguous() if len(tensors) == 1 else torch.cat(tensors)
