# SPDX-License-Identifier: Apache-2.0
"""Tensors that GGUF files hold in another way than checkpoints: joined, or with heads in another order."""

from __future__ import annotations

import random
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from driver import GREEDY, Driver, load
from family_models import make_model
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter
from gguf_files import finish
from gguf_models import Choose, save_gguf
from in_process import engine
from tiny_models import continuation

from pagoda.backend.weights import dequantize
from pagoda.checkpoints.gguf.config import gguf_model_config
from pagoda.checkpoints.gguf.reader import read_gguf
from pagoda.checkpoints.state_layers import GatedDeltaSpec
from pagoda.messages.frontend import GenerateRequest, Work
from pagoda.model.gguf_weights import GgufWeights

PROMPT = [random.Random(0).randrange(320) for _ in range(100)]
DELTA = {"linear_key_head_dim": 8, "linear_value_head_dim": 128, "hidden_size": 256}
"""Sizes of which a head of values is half a block of K-quants."""


def _of_values(kind: Kind) -> Choose:
    """Types of a file whose maps of values, and back, are of one type."""
    return lambda name: kind if "attn_qkv" in name or "ssm_out" in name else Kind.F32


def _join(path: Path, joined: Path, architecture: str) -> None:
    """Writes a file again with queries, keys and values of each layer in one tensor."""
    reader, writer = gguf.GGUFReader(path), GGUFWriter(joined, architecture)
    for field in reader.fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture")):
            writer.add_key_value(field.name, field.contents(), field.types[0])
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    for name, data in tensors.items():
        if "attn_q." in name:
            others = [tensors[name.replace("attn_q.", f"attn_{kind}.")] for kind in "kv"]
            data = np.concatenate([data, *others])
        if "attn_k." not in name and "attn_v." not in name:
            writer.add_tensor(name.replace("attn_q.", "attn_qkv."), data)
    finish(writer)


@pytest.mark.parametrize(("name", "architecture"), [("glm", "chatglm"), ("gemma2", "gemma2")])
def test_queries_keys_and_values_in_one_tensor(
    name: str, architecture: str, backend: str, tmp_path: Path
) -> None:
    """Files that were made of ChatGLMModel have biases in one tensor, too."""
    model = make_model(name, **({"attention_bias": True} if name == "glm" else {}))
    save_gguf(model, tmp_path / "apart.gguf")
    _join(tmp_path / "apart.gguf", tmp_path / "joined.gguf", architecture)
    driver = Driver(load(tmp_path / "joined.gguf", backend=backend, dtype="float32"))
    driver.start(0, PROMPT)
    driver.run([0], 32)
    assert driver.output(0) == continuation(model, PROMPT, 32)


@pytest.mark.parametrize(
    "kind",
    [
        *(Kind.F32, Kind.BF16, Kind.Q8_0, Kind.Q2_K, Kind.Q4_K, Kind.Q6_K, Kind.IQ4_XS),
        *(Kind.IQ2_S, Kind.TQ2_0),
    ],
    ids=lambda kind: kind.name,
)
def test_heads_of_values_are_put_back(kind: Kind, tmp_path: Path) -> None:
    """Heads of values of Qwen3.5 lie tiled in files; those of one head of keys are computed together."""
    path = tmp_path / "m.gguf"
    stored = save_gguf(
        make_model("qwen3.5-dense", **DELTA),
        path,
        lambda name: kind if "ssm_out" in name or "qkv" in name else Kind.F32,
    )
    config = gguf_model_config(read_gguf(path))
    state = config.layers[0].state
    assert isinstance(state, GatedDeltaSpec)
    keys, values, dim = state.key_heads, state.values_per_key, state.value_dim
    assert (keys, values) == (2, 2)
    linears, weights = config.attention_linears(0), GgufWeights(read_gguf(path))
    out = stored["blk.0.ssm_out.weight"].reshape(-1, values, keys, dim).swapaxes(1, 2)
    weight = weights.linear(linears.out, torch.float32)
    np.testing.assert_array_equal(dequantize(weight).numpy(), out.reshape(-1, keys * values * dim))
    rows = stored["blk.0.attn_qkv.weight"][-keys * values * dim :]
    rows = rows.reshape(values, keys, dim, -1).swapaxes(0, 1).reshape(rows.shape)
    np.testing.assert_array_equal(
        dequantize(weights.linear(linears.v, torch.float32)).numpy(), rows
    )


@pytest.mark.parametrize(
    "kind", [Kind.IQ1_M, Kind.IQ2_XXS, Kind.IQ3_S, Kind.TQ1_0], ids=lambda kind: kind.name
)
def test_ranks_share_experts_of_points_and_trits(kind: Kind, backend: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    save_gguf(make_model("olmoe", **sizes), path, lambda _: kind)
    requests = [GenerateRequest(request_id="0", prompt_token_ids=PROMPT[:60], work=Work(GREEDY))]
    alone, together = (
        engine(path, backend, tp, dtype="float32", block_size=16).answer(requests) for tp in (1, 2)
    )
    assert alone == together


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_K], ids=lambda kind: kind.name)
def test_ranks_share_quantized_heads_of_values(kind: Kind, backend: str, tmp_path: Path) -> None:
    """The blocks of the map back are cut between heads."""
    path = tmp_path / "m.gguf"
    save_gguf(
        make_model("qwen3.5-dense", **DELTA),
        path,
        lambda name: kind if "ssm_out" in name or "qkv" in name else Kind.F32,
    )
    requests = [GenerateRequest(request_id="0", prompt_token_ids=PROMPT[:60], work=Work(GREEDY))]
    options = {"dtype": "float32", "block_size": 128}
    alone, together = (engine(path, backend, tp, **options).answer(requests) for tp in (1, 2))
    assert alone == together
