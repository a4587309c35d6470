"""Experts, maps of heads, adapters and latent attention as launches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pagoda.backend.base import LatentCache
from pagoda.backend.cuda.kernels import experts as kernels
from pagoda.backend.cuda.kernels import kv, linear, low_rank
from pagoda.backend.cuda.kernels.latents import latent_attention
from pagoda.backend.cuda.nodes import Launch, Lowering, StepShape, Values, partials_of
from pagoda.backend.cuda.weights import DeviceLinear
from pagoda.backend.graph import Node


def _experts(lowering: Lowering, node: Node) -> Launch:
    (x, logits), (out,), (held,) = node.inputs, node.outputs, lowering.weights(node)
    first: DeviceLinear = held.gate[0]
    maps = (held.gate, held.up, held.down)
    gate, up, down = (_addresses(lowering, [m.dense() for m in part]) for part in maps)
    weights = kernels.ExpertWeights(gate, up, down, first.dense().dtype, held.first, first.outputs)
    if first.bias is not None:
        biases = [_addresses(lowering, [m.bias for m in part]) for part in maps]
        weights = replace(weights, gate_bias=biases[0], up_bias=biases[1], down_bias=biases[2])
    selected, per_token = lowering.selected(x), held.routing.experts_per_token
    key = ("experts", first.inputs, first.outputs, per_token, len(held.gate), selected)

    def new(shape: StepShape) -> Any:
        sizes = (first.inputs, first.outputs, per_token, len(held.gate))
        rows = shape.rows_of(selected=selected)
        return shape.like(key, kernels.Workspace.new(rows, *sizes, torch.device("meta")))

    workspace = lowering.new_scratch(key, new)
    options = {
        "routing": held.routing,
        "activation": held.activation,
        "counts": held.counts,
        "correction": held.correction,
    }

    def launch(v: Values) -> None:
        kernels.experts(
            v[x], v[logits], v[out], weights, v[workspace], valid=v[lowering.valid], **options
        )

    return launch


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
