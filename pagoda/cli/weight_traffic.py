# SPDX-License-Identifier: Apache-2.0
"""Bytes of weights that a decode step reads, from a model's spec and the headers of its files alone.

A step multiplies by every weight once, whatever the batch; of experts, by those that its tokens go through. Of
the input embedding it reads one row a token, so only the output projection counts, be it tied or not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pagoda.checkpoints.checkpoint_quantization import is_dense_once_loaded
from pagoda.checkpoints.linears import LinearSpec
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.weight_formats import DenseFormat, format_bytes

BYTES_PER_WEIGHT = {"float32": 4, "bfloat16": 2, "float16": 2}
_QUANTIZED_BYTES = {"int8": 1, "int4": 4.5 / 8, "fp8": 1}
"""Bytes of a quantized weight, of int4 with its share of the scale that a group of 32 has."""


@dataclass(frozen=True)
class WeightTraffic:
    """Weights that one decode step reads."""

    num_bytes: int
    dtype: str


def weight_traffic(spec: ModelSpec, dtype: str, quantization: str = "none") -> WeightTraffic:
    """Traffic of one token.

    `dtype` `auto` takes the model's own. Weights that are quantized in their files stay as they are; of others,
    `quantization` is `none`, `int8` or `int4` in groups of 32, with an int8 head, or `fp8` with a dense one.
    Norms, biases and the scales of int8 and fp8, less than a hundredth, are left out.
    """
    chosen = spec.dtype if dtype == "auto" else dtype
    stored = spec.quantization
    if stored is not None and not is_dense_once_loaded(stored):
        held = [(linear, stored.format_of(linear)) for linear in _read_a_step(spec)]
        itemsize = BYTES_PER_WEIGHT[chosen]
        num_bytes = sum(
            format_bytes(stored_format, linear.outputs, linear.inputs, itemsize)
            for linear, stored_format in held
        )
        is_dense = all(isinstance(stored_format, DenseFormat) for _, stored_format in held)
        return WeightTraffic(num_bytes, chosen if is_dense else stored.summary)
    layers = sum(spec.weights_per_token(layer) for layer in range(spec.num_layers))
    head = spec.head.outputs * spec.head.inputs
    if quantization == "none":
        return WeightTraffic((layers + head) * BYTES_PER_WEIGHT[chosen], chosen)
    tables = head * (BYTES_PER_WEIGHT[chosen] if quantization == "fp8" else 1)
    return WeightTraffic(int(layers * _QUANTIZED_BYTES[quantization]) + tables, quantization)


def held_bytes(spec: ModelSpec, dtype: str, quantization: str = "none") -> int:
    """Bytes of all weights in memory, without norms and biases; arguments are those of `weight_traffic`."""
    every = range(spec.experts.routing.num_experts if spec.experts else 0)
    linears = [it for layer in range(spec.num_layers) for it in spec.layer_linears(layer, every)]
    linears += () if spec.cross_encoder is None else spec.cross_encoder.linears()
    tables = [spec.embedding] if spec.tie_word_embeddings else [spec.embedding, spec.head]
    itemsize = BYTES_PER_WEIGHT[spec.dtype if dtype == "auto" else dtype]
    stored = spec.quantization
    if stored is not None and not is_dense_once_loaded(stored):
        return sum(
            format_bytes(stored.format_of(it), it.outputs, it.inputs, itemsize)
            for it in (*linears, *tables)
        )
    in_layers, in_tables = (sum(it.outputs * it.inputs for it in of) for of in (linears, tables))
    if quantization == "none":
        return (in_layers + in_tables) * itemsize
    tables_itemsize = itemsize if quantization == "fp8" else 1
    return int(in_layers * _QUANTIZED_BYTES[quantization]) + in_tables * tables_itemsize


def _read_a_step(spec: ModelSpec) -> Iterator[LinearSpec]:
    """Linear layers that a token is multiplied with; the first experts stand for those that it needs."""
    chosen = range(spec.experts.routing.experts_per_token if spec.experts else 0)
    for layer in range(spec.num_layers):
        yield from spec.layer_linears(layer, chosen)
    yield spec.head
