# SPDX-License-Identifier: Apache-2.0
"""Weights as contracts want them: stacked over layers, transposed, padded, and cut for several chips.

They are staged in memory that is shared before a worker forks, for its processes upload them from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from pagoda.backend.host import rotary_table
from pagoda.plugins.pypto.contract import WEIGHTS, Argument, Contract
from pagoda.plugins.pypto.device import shared_tensor
from pagoda.plugins.pypto.pattern import DecoderLayer, FoundDecoder

_OfLayer = Callable[[DecoderLayer, Mapping[str, int]], Tensor]


def _rows(first: tuple[str, ...], size: str) -> Callable[[Tensor, Mapping[str, int]], Tensor]:
    """Takes the outputs of one of several maps, transposed: those behind some heads."""

    def take(values: Tensor, sizes: Mapping[str, int]) -> Tensor:
        begin = sum(sizes[name] * sizes["D"] for name in first)
        return values[begin : begin + sizes[size] * sizes["D"]].t()

    return take


_LAYERS: Mapping[str, _OfLayer] = {
    "attention_norms": lambda layer, _: layer.attention_norm[None],
    "w_q": lambda layer, sizes: _rows((), "QH")(layer.qkv.values, sizes),
    "w_k": lambda layer, sizes: _rows(("QH",), "KVH")(layer.qkv.values, sizes),
    "w_v": lambda layer, sizes: _rows(("QH", "KVH"), "KVH")(layer.qkv.values, sizes),
    "q_norms": lambda layer, _: layer.q_norm[None],
    "k_norms": lambda layer, _: layer.k_norm[None],
    "w_o": lambda layer, _: layer.out.values.t(),
    "mlp_norms": lambda layer, _: layer.mlp_norm[None],
    "w_gate": lambda layer, sizes: layer.gate_up.values[: sizes["I"]].t(),
    "w_up": lambda layer, sizes: layer.gate_up.values[sizes["I"] :].t(),
    "w_down": lambda layer, _: layer.down.values.t(),
}
"""The part of a layer in each tensor that is stacked over layers."""


def stage(found: FoundDecoder, contract: Contract, chips: int) -> dict[str, list[Tensor]]:
    """Tensors of each meaning in shared memory, one for each chip; those that all have are one and the same.

    The decoder's own weights are given back. Raises OSError: the machine has too little shared memory.
    """
    decode = contract.programs["decode"]
    sizes = contract.environment(batch=1, tokens=1, pages=1)
    staged: dict[str, list[Tensor]] = {}
    for argument in decode.args:
        if argument.meaning in WEIGHTS:
            count = chips if argument.split else 1
            shape, dtype = argument.dims(sizes, chips), argument.torch_dtype
            own = [shared_tensor(shape, dtype) for _ in range(count)]
            staged[argument.meaning] = own * (chips // count)
    for number, layer in enumerate(found.layers):
        for meaning, of_layer in _LAYERS.items():
            values = of_layer(layer, found.sizes)
            for chip, part in _cut(values, decode.argument(meaning), chips):
                first = number * len(part)
                staged[meaning][chip][first : first + len(part)].copy_(part)
        for linear in (layer.qkv, layer.out, layer.gate_up, layer.down):
            linear.release()
    for meaning, values in _others(found, contract):
        for chip, part in _cut(values, decode.argument(meaning), chips):
            staged[meaning][chip].copy_(part)
    found.embedding.release()
    found.head.release()
    return staged


def _others(found: FoundDecoder, contract: Contract) -> Iterator[tuple[str, Tensor]]:
    """Tensors that are not of a layer, padded."""
    decode, rows = contract.programs["decode"], contract.sizes["V"]
    positions = torch.arange(contract.limits.max_seq)
    cosines, sines = rotary_table(positions, found.frequencies, scale=found.rotary_scale)
    yield "rope_cos", torch.cat((cosines, cosines), dim=1)
    yield "rope_sin", torch.cat((sines, sines), dim=1)
    yield "final_norm", found.final_norm[None]
    yield "embedding", _padded(found.embedding.values, decode.argument("embedding"), rows)
    yield "head", _padded(found.head.values, decode.argument("head"), rows)


def _padded(values: Tensor, argument: Argument, rows: int) -> Tensor:
    """Rows of a vocabulary with those behind it: zeros, or the first row again."""
    missing = rows - len(values)
    if not missing:
        return values
    more = values[:1] if argument.pad == "first_row" else torch.zeros_like(values[:1])
    return torch.cat((values, more.expand(missing, -1)))


def _cut(values: Tensor, argument: Argument, chips: int) -> Iterator[tuple[int, Tensor]]:
    """The parts of a tensor that go to each chip; a whole one goes to the first, whose memory all have."""
    if not argument.split or chips == 1:
        yield 0, values
        return
    split = next(at for at, dim in enumerate(argument.shape) if argument.split in dim.split("*"))
    yield from enumerate(values.chunk(chips, dim=split))
