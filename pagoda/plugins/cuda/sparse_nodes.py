# SPDX-License-Identifier: Apache-2.0
"""Experts, maps of heads, adapters and latent attention as launches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pagoda.backend.base import Experts, LatentCache, UnsupportedError
from pagoda.backend.graph import Node
from pagoda.checkpoints.expert_routing import ExpertRouting
from pagoda.plugins.cuda.kernels import experts as kernels
from pagoda.plugins.cuda.kernels import kv, linear, low_rank
from pagoda.plugins.cuda.kernels.block_weights import Blocks, constants_of
from pagoda.plugins.cuda.kernels.latents import latent_attention
from pagoda.plugins.cuda.kernels.quantized import RoundedGroups, RoundedRows
from pagoda.plugins.cuda.kernels.quantized_experts import (
    COLUMNS,
    Form,
    QuantizedExperts,
    QuantizedMap,
    Rounded,
    quantized_experts,
)
from pagoda.plugins.cuda.nodes import Launch, Lowering, StepShape, Values, partials_of
from pagoda.plugins.cuda.weights import DeviceLinear, Fp8, Grouped, Int8, Segment

_NOWHERE = torch.device("meta")
"""Device of tensors that only have a shape."""


def _experts(lowering: Lowering, node: Node) -> Launch:
    (x, logits), (out,), (held,) = node.inputs, node.outputs, lowering.weights(node)
    if held.routing.scores == "given" or held.activation.kind not in _ACTIVATIONS:
        raise UnsupportedError(_GATES)
    first: DeviceLinear = held.gate[0]
    selected, per_token = lowering.selected(x), held.routing.experts_per_token
    key = ("experts", first.inputs, first.outputs, per_token, len(held.gate), selected)

    def new(shape: StepShape) -> Any:
        sizes = (first.inputs, first.outputs, per_token, len(held.gate))
        return shape.like(
            key, kernels.Workspace.new(shape.rows_of(selected=selected), *sizes, _NOWHERE)
        )

    workspace = lowering.new_scratch(key, new)
    options = {
        "routing": held.routing,
        "activation": held.activation,
        "counts": held.counts,
        "correction": held.correction,
    }
    if not (first.is_dense or isinstance(first.segments[0], Fp8)):
        quantized = _quantized_experts(lowering, held)
        rounded = _rounded_scratch(lowering, quantized, held.routing, selected)
        return lambda v: quantized_experts(
            *(v[x], v[logits], v[out], quantized, v[workspace], v[rounded]),
            valid=v[lowering.valid],
            **options,
        )
    weights = _float_experts(lowering, held)
    if first.bias is not None:
        maps = (held.gate, held.up, held.down)
        biases = [_addresses(lowering, [m.bias for m in part]) for part in maps]
        weights = replace(weights, gate_bias=biases[0], up_bias=biases[1], down_bias=biases[2])
    return lambda v: kernels.experts(
        v[x], v[logits], v[out], weights, v[workspace], valid=v[lowering.valid], **options
    )


def _float_experts(lowering: Lowering, held: Experts[DeviceLinear]) -> kernels.ExpertWeights:
    """Weights of experts that are all dense, or of 8-bit floats.

    Raises UnsupportedError: they are neither, or scales are of other numbers of inputs in gates and beside them.
    """
    first, number = held.gate[0], len(held.gate)
    maps = [[*held.gate], [*held.up], [*held.down]]
    if first.is_dense:
        gate, up, down = (_addresses(lowering, [m.dense() for m in part]) for part in maps)
        return kernels.ExpertWeights(gate, up, down, first.dense().dtype, held.first, first.outputs)
    floats = [
        [segment for each in part for segment in each.segments if isinstance(segment, Fp8)]
        for part in maps
    ]
    into, out = ({segment.size for segment in own} for own in (floats[0] + floats[1], floats[2]))
    is_whole = all(len(own) == number for own in floats)
    is_single = all(len(each.segments) == 1 for part in maps for each in part)
    if not (is_whole and is_single) or len(into) > 1 or len(out) > 1:
        raise UnsupportedError(_ALIKE)
    gate, up, down = (_addresses(lowering, [it.values for it in own]) for own in floats)
    gate_scales, up_scales, down_scales = (
        _addresses(lowering, [it.scales for it in own]) for own in floats
    )
    return kernels.ExpertWeights(
        *(gate, up, down, floats[0][0].dtype, held.first, first.outputs),
        scales=kernels.ExpertScales((gate_scales, up_scales, down_scales), (into.pop(), out.pop())),
    )


def _quantized_experts(lowering: Lowering, held: Experts[DeviceLinear]) -> QuantizedExperts:
    gate, up, down = (_quantized_map(lowering, part) for part in (held.gate, held.up, held.down))
    if gate.form.rounds != up.form.rounds:
        raise UnsupportedError(_ALIKE)
    return QuantizedExperts(gate, up, down, held.first)


def _quantized_map(lowering: Lowering, maps: Sequence[DeviceLinear]) -> QuantizedMap:
    """Raises UnsupportedError: weights are not all of one format that kernels have."""
    segments = [each.segments[0] for each in maps]
    forms = {_form(segment) for segment in segments}
    form = forms.pop()
    if form is None or forms or any(len(each.segments) > 1 for each in maps):
        raise UnsupportedError(_ALIKE)
    rows = [_tensors(segment, each.bias) for segment, each in zip(segments, maps, strict=True)]
    columns = [_addresses(lowering, column) for column in zip(*rows, strict=True)]
    first = maps[0]
    return QuantizedMap(
        torch.stack(columns, 1), first.outputs, first.inputs, form, has_bias=first.bias is not None
    )


_ACTIVATIONS = ("silu", "swiglu_oai")
_GATES = (
    "the GPU backend has experts that it chooses itself, with gates of SiLU or clamped ones; choose another "
    "--backend."
)
_ALIKE = (
    "the GPU backend has experts of weights that are all of one format, and in the order of their inputs; "
    "choose another --backend."
)


def _form(segment: Segment) -> Form | None:
    """Constants of a quantized format that experts may have; None of other weights."""
    if isinstance(segment, Int8):
        return Form("rows", segment.zero_points is not None)
    if isinstance(segment, Grouped) and segment.order is None:
        return Form("groups", segment.offsets is not None, segment.group_size, segment.bits)
    if isinstance(segment, Blocks):
        constants = constants_of(segment)
        del constants["inputs"]
        return Form("whole rows" if segment.stored_format.whole_rows else "blocks", **constants)
    return None


def _tensors(segment: Segment, bias: Tensor | None) -> tuple[Tensor | None, ...]:
    """Tensors of a quantized map in the order of its addresses."""
    if isinstance(segment, Blocks):
        low, high, codebook, scales, minima, block_scales, block_minima = segment.tensors
        return low, scales, minima, bias, high, codebook, block_scales, block_minima
    if isinstance(segment, Int8):
        own = (segment.values, segment.scales, segment.zero_points)
    elif isinstance(segment, Grouped):
        own = (segment.codes, segment.scales, segment.offsets)
    else:
        raise TypeError("Dense weights have no scales.")
    return *own, bias, *(None,) * (COLUMNS - 4)


def _rounded_scratch(
    lowering: Lowering, weights: QuantizedExperts, routing: ExpertRouting, selected: bool
) -> int:
    gate, down, weighs = weights.gate, weights.down, routing.weighs_inputs
    sizes = (gate.form.rounds, down.form.rounds)
    key = ("rounded", gate.inputs, gate.outputs, *sizes, weighs, selected)

    def new(shape: StepShape) -> Rounded:
        rows = shape.rows_of(selected=selected)
        pairs = rows * routing.experts_per_token

        def rounded(name: str, weight: QuantizedMap, count: int) -> RoundedRows | RoundedGroups:
            if weight.form.rounds == 0:
                return shape.like((*key, name), RoundedRows.new(count, weight.inputs, _NOWHERE))
            groups = RoundedGroups.new(count, weight.inputs, weight.form.rounds, _NOWHERE)
            return shape.like((*key, name), groups)

        return Rounded(
            rounded("inputs", gate, pairs if weighs else rows),
            rounded("inner", down, pairs),
            shape.floats((*key, "gate and up"), pairs, 2 * gate.outputs),
            shape.floats((*key, "weighed"), pairs, gate.inputs) if weighs else None,
        )

    return lowering.new_scratch((*key, routing.experts_per_token), new)


def _addresses(lowering: Lowering, tensors: Sequence[Tensor | None]) -> Tensor:
    """Addresses [e] int64 of tensors, on the device."""
    return torch.tensor(
        [0 if tensor is None else tensor.data_ptr() for tensor in tensors],
        dtype=torch.int64,
        device=lowering.runtime.device,
    )


def _head_linear(lowering: Lowering, node: Node) -> Launch:
    (x,), (out,), (maps,) = node.inputs, node.outputs, lowering.weights(node)
    weights = [head.dense() for head in maps.heads]
    addresses, dtype = _addresses(lowering, weights), weights[0].dtype
    return lambda v: linear.head_linear(v[x], addresses, v[out], dtype=dtype)


def _add_low_rank(lowering: Lowering, node: Node) -> Launch:
    (own, x, adapters), (out,), (maps,) = node.inputs, node.outputs, lowering.weights(node)
    selected, table = lowering.selected(own), lowering.adapters.of(maps)
    width, parts = low_rank.narrow_width(table.MAX_RANK), len(maps.outputs)
    key = ("narrow", parts, selected)

    def new(shape: StepShape) -> Tensor:
        return shape.floats(key, shape.rows_of(selected=selected), parts, width)

    narrow = lowering.new_scratch(key, new)
    options: dict[str, Any] = {"outputs": maps.outputs, "dtype": maps.dtype}

    def launch(v: Values) -> None:
        if v[adapters] is not None:
            low_rank.add_low_rank(v[out], v[x], v[adapters], table.entries, v[narrow], **options)

    return launch


def _rotate_and_cache_latents(lowering: Lowering, node: Node) -> Launch:
    (queries, latents, metadata, *table), (out,) = node.inputs, node.outputs
    cache: LatentCache
    cache, norm = lowering.weights(node)
    eps = lowering.attributes(node)["eps"]

    def launch(v: Values) -> None:
        cosines, sines = (v[table[0]], v[table[1]]) if table else (None, None)
        kv.rotate_and_cache_latents(
            v[queries],
            v[latents],
            v[metadata].slots,
            cache.latents,
            norm,
            v[out],
            eps=eps,
            cosines=cosines,
            sines=sines,
            scales=cache.latent_scales,
        )

    return launch


def _latent_attention(lowering: Lowering, node: Node) -> Launch:
    (latent, rotary, metadata), (out,) = node.inputs, node.outputs
    cache: LatentCache
    (cache,) = lowering.weights(node)
    scale, heads = lowering.attributes(node)["scale"], lowering.width(latent) // cache.rank
    partials = partials_of(lowering, metadata, heads, cache.rank)
    products = lowering.products_of(cache)

    def launch(v: Values) -> None:
        latent_attention(
            v[latent],
            v[rotary],
            cache.latents,
            v[metadata].steps,
            v[out],
            rank=cache.rank,
            scale=scale,
            scales=cache.latent_scales,
            products=products,
            partials=v[partials],
        )

    return launch


LOWERED: Mapping[str, Callable[[Lowering, Node], Launch]] = {
    "experts": _experts,
    "head_linear": _head_linear,
    "add_low_rank": _add_low_rank,
    "rotate_and_cache_latents": _rotate_and_cache_latents,
    "latent_attention": _latent_attention,
}
"""Functions that make launches of these operations."""
