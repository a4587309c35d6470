# SPDX-License-Identifier: Apache-2.0
"""Linear layers, embeddings and quantized experts as launches on the emulated device, in formats of all kinds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from block_weights import make_blocks
from torch import Tensor

from pagoda.backend.base import Backend, ExpertActivation, Experts, UnsupportedError
from pagoda.backend.block_rounding import quantize_blocks
from pagoda.backend.fp8 import to_e4m3
from pagoda.backend.graph import Value
from pagoda.backend.operations import GraphBuilder
from pagoda.backend.reference.backend import ReferenceBackend
from pagoda.backend.reference.quantized import quantize_int4, quantize_int8
from pagoda.backend.weights import DenseWeight, Fp8Weight, LinearWeight
from pagoda.checkpoints.expert_routing import ExpertRouting
from pagoda.checkpoints.gguf.config import BLOCKS
from pagoda.checkpoints.weight_formats import NF4, NVFP4, BlockFormat
from pagoda.plugins.backend_check.products import block_weight, fp8_weight
from pagoda.plugins.backend_check.subject import outputs, random_tensor
from pagoda.plugins.cuda.backend import GpuBackend
from pagoda.plugins.cuda.emulation import EmulatedDevice

INPUTS = 64
WHOLE_ROWS = BlockFormat(5, 32, INPUTS, True, True, whole_rows=True)


def _weights(num_outputs: int) -> dict[str, LinearWeight]:
    values = random_tensor(num_outputs, INPUTS) / 8
    return {
        "dense": DenseWeight(values),
        "int8": quantize_int8(values, symmetric=False),
        "fp8": fp8_weight(num_outputs, INPUTS, 32),
        "fp8 by output": fp8_weight(num_outputs, INPUTS, None),
        "groups": quantize_int4(values, 32),
        "blocks": block_weight(BLOCKS["Q4_1"], num_outputs, INPUTS),
        "whole rows": quantize_blocks(values, WHOLE_ROWS),
    }


def _both(record: Any, tensors: dict[str, torch.Tensor]) -> Sequence[list[torch.Tensor]]:
    """Results of the device and of the reference."""
    backends: Sequence[Backend[Any, Any]] = GpuBackend(EmulatedDevice()), ReferenceBackend()
    return [outputs(each, record(each), tensors) for each in backends]


def test_parts_of_all_formats_follow_one_another() -> None:
    parts = [part for part in _weights(5).values() for _ in range(2)]
    bias, x = random_tensor(70), random_tensor(3, INPUTS)

    def record(backend: Backend[Any, Any]) -> Any:
        held = backend.prepare_linear(parts, bias, torch.float32)
        assert (held.outputs, held.inputs) == (70, INPUTS)

        def of(ops: GraphBuilder, x: Value) -> list[Value]:
            return [ops.linear(x, held), ops.linear_argmax(x, held, first_id=7)]

        return of

    (out, found), (wanted, expected) = _both(record, {"x": x})
    torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-5)
    exact = [*range(10, 20), *range(40, 70)]  # of integers
    assert torch.equal(out[:, exact], wanted[:, exact])
    assert torch.equal(found[:, ::2], expected[:, ::2])


@pytest.mark.parametrize(
    "stored_format", [NF4, BLOCKS["NVFP4"], NVFP4], ids=["nf4", "nvfp4-64", "nvfp4"]
)
def test_blocks_of_other_files(stored_format: BlockFormat) -> None:
    """Scales of 8 bits, be they of a GGUF file or of others, become float16, which rounds some."""
    inputs = max(INPUTS, stored_format.block_size)
    weight, x = make_blocks(stored_format, 5, inputs, 1), random_tensor(3, inputs)

    def record(backend: Backend[Any, Any]) -> Any:
        held = backend.prepare_linear([weight], None, torch.float32)
        return lambda ops, x: ops.linear(x, held)

    (out,), (wanted,) = _both(record, {"x": x})
    rounded = 2**-11 if stored_format.scales_are_floats else 1e-6
    torch.testing.assert_close(out, wanted, atol=rounded * wanted.abs().max().item(), rtol=0)


@pytest.mark.parametrize("name", _weights(1))
def test_embeddings(name: str) -> None:
    weight, ids = _weights(5)[name], torch.tensor([2, 0, 9, 6])

    def record(backend: Backend[Any, Any]) -> Any:
        table = backend.prepare_linear([weight], None, torch.float32)
        return lambda ops, token_ids: ops.embedding(token_ids, table, first_id=2, vocab_size=10)

    (out,), (wanted,) = _both(record, {"token_ids": ids})
    assert torch.equal(out, wanted)


def _expert_weight(name: str, values: Tensor) -> LinearWeight:
    if name.startswith("fp8"):
        scales = values.abs().amax(1, keepdim=True).expand(-1, 2).contiguous() / 448
        size = None if name == "fp8 by output" else 32
        held = to_e4m3(values / scales[:, :1])
        return Fp8Weight(held, scales if size else scales[:, :1].clone(), size)
    if name == "int8":
        return quantize_int8(values, symmetric=False)
    if name == "groups":
        return quantize_int4(values, 32)
    if name == "whole rows":
        return quantize_blocks(values, WHOLE_ROWS)
    if name.startswith("Q"):
        blocks = block_weight(BLOCKS[name], *values.shape)
        return replace(blocks, codes=blocks.codes.roll(int(values[0, 0] * 1000), 1))
    plain = quantize_int4(values, 32)
    return replace(plain, offsets=plain.scales / 2, act_order=_ORDER if name == "ordered" else None)


_ORDER = torch.arange(INPUTS).flip(0)


def _experts(backend: Backend[Any, Any], name: str, routing: ExpertRouting) -> Experts[Any]:
    """Experts 1 to 3, of which each has maps of 64 inputs and outputs."""
    bias = random_tensor(INPUTS, seed=8) if name in ("int8", "fp8") else None
    maps = [
        tuple(
            backend.prepare_linear(
                [_expert_weight(name, random_tensor(INPUTS, INPUTS, seed=3 * part + expert) / 4)],
                bias,
                torch.float32,
            )
            for expert in range(3)
        )
        for part in range(3)
    ]
    activation = ExpertActivation("swiglu_oai", 1.7, 3.0) if name == "int8" else ExpertActivation()
    counts = torch.zeros(routing.num_experts, dtype=torch.int64)
    return Experts(routing, 1, *maps, counts=counts, activation=activation)


@pytest.mark.parametrize(
    ("name", "weighs_inputs"),
    [
        *(("int8", False), ("groups", True), ("offsets", False)),
        *(("Q5_1", False), ("Q8_0", True), ("whole rows", False)),
        *(("fp8", False), ("fp8 by output", True)),
    ],
)
def test_quantized_experts(name: str, weighs_inputs: bool) -> None:
    """Where rounded activations differ, which exponentials decide, results differ by a step of their integers."""
    routing = ExpertRouting(5, 2, True, weighs_inputs=weighs_inputs)
    tensors = {"x": random_tensor(6, INPUTS), "logits": random_tensor(6, 5, seed=1)}
    held = []

    def record(backend: Backend[Any, Any]) -> Any:
        held.append(_experts(backend, name, routing))
        return lambda ops, x, logits: ops.experts(x, logits, held[-1])

    (out,), (wanted,) = _both(record, tensors)
    assert (out - wanted).abs().max() < 1e-2 * wanted.abs().max()
    assert torch.equal(held[0].counts, held[1].counts)
    backend = GpuBackend(EmulatedDevice())
    row = {each: tensor[4:5].clone() for each, tensor in tensors.items()}
    (alone,) = outputs(backend, record(backend), row)
    assert torch.equal(alone[0], out[4])


def test_experts_in_orders_of_their_own_are_refused() -> None:
    backend = GpuBackend(EmulatedDevice())
    held = _experts(backend, "ordered", ExpertRouting(5, 2, True))
    tensors = {"x": random_tensor(1, INPUTS), "logits": random_tensor(1, 5)}
    with pytest.raises(
        UnsupportedError, match="all of one format, and in the order of their inputs"
    ):
        outputs(backend, lambda ops, x, logits: ops.experts(x, logits, held), tensors)
