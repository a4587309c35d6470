# SPDX-License-Identifier: Apache-2.0
"""Linear layers and embeddings as launches, in every format of weights."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping

import torch
from torch import Tensor

from pagoda.backend.graph import Node
from pagoda.backend.weights import BLOCK_INPUT_GROUP
from pagoda.plugins.cuda.kernels import linear, quantized, rows
from pagoda.plugins.cuda.kernels.block_weights import Blocks, block_embedding, block_linear
from pagoda.plugins.cuda.nodes import Launch, Lowering, StepShape, Values
from pagoda.plugins.cuda.weights import Dense, DeviceLinear, Fp8, Grouped, Int8, Segment

_NOWHERE = torch.device("meta")
"""Device of tensors that only have a shape."""


def _linear(lowering: Lowering, node: Node) -> Launch:
    (x,), (out,), (weight,) = node.inputs, node.outputs, lowering.weights(node)
    return _product(lowering, x, out, weight)


def _product(lowering: Lowering, x: int, out: int, weight: DeviceLinear) -> Launch:
    """The map of the value x, to a value or scratch memory."""
    selected = lowering.selected(x)
    if len(weight.segments) == 1:
        (segment,) = weight.segments
        return _segment(lowering, x, out, selected, segment, weight.bias)
    launches: list[Launch] = []
    first = 0
    for segment in weight.segments:
        columns = slice(first, first + segment.outputs)
        bias = None if weight.bias is None else weight.bias[columns]
        launches.append(_columns(lowering, x, out, selected, segment, columns, bias))
        first = columns.stop

    def launch(v: Values) -> None:
        for part in launches:
            part(v)

    return launch


def _columns(
    lowering: Lowering,
    x: int,
    out: int,
    selected: bool,
    segment: Segment,
    columns: slice,
    bias: Tensor | None,
) -> Launch:
    """The outputs of a segment among those of others, which are computed by themselves and copied there."""
    key = ("columns", segment.outputs, selected)
    own = _rows_scratch(lowering, key, selected, segment.outputs)
    product = _segment(lowering, x, own, selected, segment, bias)

    def launch(v: Values) -> None:
        product(v)
        v[out][:, columns].copy_(v[own])

    return launch


def _rows_scratch(lowering: Lowering, key: Hashable, selected: bool, width: int) -> int:
    def new(shape: StepShape) -> Tensor:
        return shape.floats(key, shape.rows_of(selected=selected), width)

    return lowering.new_scratch(key, new)


def _segment(
    lowering: Lowering,
    x: int,
    out: int,
    selected: bool,
    segment: Segment,
    bias: Tensor | None,
) -> Launch:
    """The map of one segment, to memory of its own width."""
    if isinstance(segment, Dense):
        return _dense(lowering, x, out, selected, segment.values, bias)
    if isinstance(segment, Int8):
        return _int8(lowering, x, out, selected, segment, bias)
    if isinstance(segment, Fp8):
        return _fp8(x, out, segment, bias)
    if isinstance(segment, Grouped):
        return _grouped(lowering, x, out, selected, segment, bias)
    return _blocks(lowering, x, out, selected, segment, bias)


def _dense(
    lowering: Lowering, x: int, out: int, selected: bool, weight: Tensor, bias: Tensor | None
) -> Launch:
    """Tiles of one shape, or the vendor's library, whose choice depends on the number of rows.

    Inputs have more range than float16, in which the library would want them."""
    if lowering.graph.batch_invariant or weight.dtype == torch.float16:
        on_hopper = lowering.runtime.is_hopper
        return lambda v: linear.linear(v[x], weight, v[out], bias=bias, on_hopper=on_hopper)
    product, inputs, given = lowering.runtime.library_product, weight.shape[1], x
    if weight.dtype != torch.float32 and x not in lowering.rounded:
        key = ("inputs", weight.dtype, inputs, selected)
        given = lowering.new_scratch(
            key,
            lambda shape: shape.tensor(key, weight.dtype, shape.rows_of(selected=selected), inputs),
        )

    def launch(v: Values) -> None:
        if given != x:
            v[given].copy_(v[x])
        product(v[given], weight, v[out])
        if bias is not None:
            v[out].add_(bias)

    return launch


def _fp8(x: int, out: int, weight: Fp8, bias: Tensor | None) -> Launch:
    def launch(v: Values) -> None:
        linear.fp8_linear(
            v[x],
            weight.values,
            weight.scales,
            v[out],
            size=weight.size,
            dtype=weight.dtype,
            bias=bias,
        )

    return launch


def _int8(
    lowering: Lowering, x: int, out: int, selected: bool, weight: Int8, bias: Tensor | None
) -> Launch:
    rounded = _rounded_rows(lowering, weight.values.shape[1], selected)

    def launch(v: Values) -> None:
        quantized.round_rows(v[x], v[rounded])
        quantized.int8_linear(
            v[rounded],
            weight.values,
            weight.scales,
            v[out],
            zero_points=weight.zero_points,
            bias=bias,
        )

    return launch


def _grouped(
    lowering: Lowering, x: int, out: int, selected: bool, weight: Grouped, bias: Tensor | None
) -> Launch:
    size, groups = weight.group_size, weight.scales.shape[1]
    rounded = _rounded_groups(lowering, size * groups, size, selected)

    def launch(v: Values) -> None:
        quantized.round_groups(v[x], v[rounded], order=weight.order)
        quantized.grouped_linear(
            v[rounded],
            weight.codes,
            weight.scales,
            v[out],
            bits=weight.bits,
            offsets=weight.offsets,
            bias=bias,
        )

    return launch


def _blocks(
    lowering: Lowering, x: int, out: int, selected: bool, weight: Blocks, bias: Tensor | None
) -> Launch:
    whole_rows, inputs = weight.stored_format.whole_rows, weight.inputs
    if whole_rows:
        rounded = _rounded_rows(lowering, inputs, selected)
    else:
        rounded = _rounded_groups(lowering, inputs, BLOCK_INPUT_GROUP, selected)
    round_inputs = quantized.round_rows if whole_rows else quantized.round_groups

    def launch(v: Values) -> None:
        round_inputs(v[x], v[rounded])
        block_linear(v[rounded], weight, v[out], bias=bias)

    return launch


def _rounded_rows(lowering: Lowering, inputs: int, selected: bool) -> int:
    key = ("rounded rows", inputs, selected)

    def new(shape: StepShape) -> quantized.RoundedRows:
        rows_of = shape.rows_of(selected=selected)
        return shape.like(key, quantized.RoundedRows.new(rows_of, inputs, _NOWHERE))

    return lowering.new_scratch(key, new)


def _rounded_groups(lowering: Lowering, inputs: int, size: int, selected: bool) -> int:
    key = ("rounded groups", size, inputs, selected)

    def new(shape: StepShape) -> quantized.RoundedGroups:
        rows_of = shape.rows_of(selected=selected)
        return shape.like(key, quantized.RoundedGroups.new(rows_of, inputs, size, _NOWHERE))

    return lowering.new_scratch(key, new)


def _linear_argmax(lowering: Lowering, node: Node) -> Launch:
    (x,), (out,), (weight,) = node.inputs, node.outputs, lowering.weights(node)
    first_id, selected = lowering.attributes(node)["first_id"], lowering.selected(x)
    key = ("logits", weight.outputs, selected)
    logits = _rows_scratch(lowering, key, selected, weight.outputs)
    product = _product(lowering, x, logits, weight)

    def launch(v: Values) -> None:
        product(v)
        rows.argmax(v[logits], v[out], first_id=first_id)

    return launch


def _embedding(lowering: Lowering, node: Node) -> Launch:
    (ids,), (out,), (table,) = node.inputs, node.outputs, lowering.weights(node)
    first_id = lowering.attributes(node)["first_id"]
    segment: Segment
    (segment,) = table.segments
    if isinstance(segment, Dense):
        values = segment.values
        return lambda v: rows.embedding(v[ids], values, v[out], first_id=first_id)
    if isinstance(segment, Int8):
        return _int8_embedding(ids, out, segment, first_id)
    if isinstance(segment, Fp8):
        return _fp8_embedding(ids, out, segment, first_id)
    if isinstance(segment, Grouped):
        return _grouped_embedding(ids, out, segment, first_id)
    blocks = segment
    return lambda v: block_embedding(v[ids], blocks, v[out], first_id=first_id)


def _int8_embedding(ids: int, out: int, table: Int8, first_id: int) -> Launch:
    def launch(v: Values) -> None:
        quantized.int8_embedding(
            v[ids],
            table.values,
            table.scales,
            v[out],
            first_id=first_id,
            zero_points=table.zero_points,
        )

    return launch


def _fp8_embedding(ids: int, out: int, table: Fp8, first_id: int) -> Launch:
    def launch(v: Values) -> None:
        linear.fp8_embedding(
            v[ids], table.values, table.scales, v[out], first_id=first_id, size=table.size
        )

    return launch


def _grouped_embedding(ids: int, out: int, table: Grouped, first_id: int) -> Launch:
    def launch(v: Values) -> None:
        quantized.grouped_embedding(
            v[ids],
            table.codes,
            table.scales,
            v[out],
            first_id=first_id,
            bits=table.bits,
            offsets=table.offsets,
        )

    return launch


LOWERED: Mapping[str, Callable[[Lowering, Node], Launch]] = {
    "embedding": _embedding,
    "linear": _linear,
    "linear_argmax": _linear_argmax,
}
"""Functions that make launches of these operations."""
