# SPDX-License-Identifier: Apache-2.0
"""Weights are stacked, transposed, padded and cut as contracts say, and read back are what they were."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pagoda.backend.weights import DenseWeight
from pagoda.plugins.pypto.contract import Contract, read_manifest
from pagoda.plugins.pypto.pattern import DecoderLayer, FoundDecoder
from pagoda.plugins.pypto.staging import stage
from pagoda.plugins.pypto.weights import HostLinear, prepare_linear


def _random(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


def _decoder(contract: Contract) -> FoundDecoder:
    sizes = contract.sizes
    hidden, heads, kv, dim, inner = (sizes[name] for name in ("H", "QH", "KVH", "D", "I"))
    return FoundDecoder(
        embedding=HostLinear(_random(sizes["REAL_V"], hidden)),
        frequencies=1 / 10000 ** (torch.arange(0, dim, 2) / dim),
        rotary_scale=1.0,
        layers=tuple(
            DecoderLayer(
                torch.randn(hidden),
                HostLinear(_random((heads + 2 * kv) * dim, hidden)),
                torch.randn(dim),
                torch.randn(dim),
                HostLinear(_random(hidden, heads * dim)),
                torch.randn(hidden),
                HostLinear(_random(2 * inner, hidden)),
                HostLinear(_random(hidden, inner)),
                None,  # type: ignore[arg-type]
            )
            for _ in range(sizes["L"])
        ),
        final_norm=torch.randn(hidden),
        head=HostLinear(_random(sizes["REAL_V"], hidden)),
        sizes={name: sizes[name] for name in ("L", "H", "QH", "KVH", "D", "I", "REAL_V")},
        eps=1e-6,
        scale=dim**-0.5,
    )


@pytest.mark.parametrize("chips", [1, 2])
def test_weights_come_back_as_they_were(install: Callable[..., None], chips: int) -> None:
    install()
    from pagoda_pypto_device.compute import read_weights
    from pagoda_pypto_device.contracts import manifest

    (contract,) = read_manifest(manifest(("qwen3-small",), 1)).contracts
    torch.manual_seed(0)
    found = _decoder(contract)
    linears = [linear.values for linear in found.linears]
    staged = stage(found, contract, chips)
    decode = contract.programs["decode"]
    sizes = contract.environment(batch=1, tokens=1, pages=1)
    for meaning, parts in staged.items():
        argument = decode.argument(meaning)
        assert len(parts) == chips
        for part in parts:
            assert part.is_shared()
            assert tuple(part.shape) == argument.dims(sizes, chips)
            assert part.dtype is argument.torch_dtype
        assert (parts[0] is not parts[-1]) == (chips > 1 and argument.split != "")
    read = read_weights(contract, staged)
    own = [read.embedding, *(getattr(layer, name) for layer in read.layers for name in _MAPS)]
    for linear, values in zip([*own, read.head], linears, strict=True):
        assert torch.equal(linear.parts[0], values)
    for layer, was in zip(read.layers, found.layers, strict=True):
        for name in ("attention_norm", "q_norm", "k_norm", "mlp_norm"):
            assert torch.equal(getattr(layer, name), getattr(was, name))
    assert torch.equal(read.final_norm, found.final_norm)
    for linear in found.linears:
        with pytest.raises(RuntimeError, match="given back"):
            assert linear.values is None


_MAPS = ("qkv", "out", "gate_up", "down")


def test_maps_of_the_same_inputs_are_joined() -> None:
    parts = [DenseWeight(_random(rows, 8)) for rows in (4, 2)]
    joined = prepare_linear(parts, None, torch.bfloat16, [torch.bfloat16])
    assert (joined.outputs, joined.inputs) == (6, 8)
    assert torch.equal(joined.values, torch.cat([part.values for part in parts]))
