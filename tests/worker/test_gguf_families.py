# SPDX-License-Identifier: Apache-2.0
"""GGUF files of families that the converter changes in ways of their own answer as transformers does."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import transformers
from driver import Driver, answer_differences, in_float64, load, rounding
from family_models import FAMILIES, make_model
from gguf_families import OF_MAKERS, ROWS, SEEING, save_family
from own_code_models import make_like
from tiny_models import continuation
from tiny_models import make_model as make_tiny

from pagoda.checkpoints.gguf.config import gguf_model_config
from pagoda.checkpoints.gguf.reader import read_gguf
from pagoda.model.sharding import least_block_size

PROMPT = [random.Random(0).randrange(320) for _ in range(100)]
_PHIMOE = FAMILIES["phimoe"][1]
SIZES: dict[str, dict[str, Any]] = {
    "glm4-moe-groups": {"n_group": 1, "topk_group": 1, "n_shared_experts": 1},
    "gemma3n": {"vocab_size_per_layer_input": 320},
    "gpt2-new": {"n_inner": None},
    "gpt-neox-sequential": {"hidden_act": "gelu"},
    "phimoe": {
        "router_jitter_noise": 0.01,
        "rope_parameters": {**_PHIMOE["rope_parameters"], "short_mscale": 1.4},
    },
    "minicpm3": {
        **{"v_head_dim": 16, "num_key_value_heads": 4, "scale_emb": 12, "scale_depth": 1.4},
        "dim_model_base": 256,
    },
    "falcon-groups": {"ffn_hidden_size": None},
    "falcon-h1": {"mamba_norm_before_gate": False},
}
"""Other sizes where a file cannot say those of the family."""
_LAYERS = ["mamba", "E", "mamba", "attention", "mamba", "E", "attention"]
SIZES |= {
    name: {
        "layers_block_type": [kind.replace("E", behind) for kind in _LAYERS],
        "initializer_range": 0.2,
    }
    for name, behind in (("hybrid-nemotron", "moe"), ("hybrid-nemotron-dense", "mlp"))
}


def make(name: str) -> transformers.PreTrainedModel:
    """The model of a row."""
    if name in SEEING:
        return make_tiny(name)
    if name in OF_MAKERS:
        return make_like(name)
    return make_model(name.removesuffix("-dense"), **SIZES.get(name, {}))


@pytest.mark.parametrize("name", [*ROWS, *OF_MAKERS, *SEEING])
def test_files_answer_as_transformers_does(name: str, tmp_path: Path) -> None:
    model = make(name)
    save_family(model, tmp_path / "m.gguf", {**ROWS, **OF_MAKERS, **SEEING}[name])
    size = least_block_size(gguf_model_config(read_gguf(tmp_path / "m.gguf")), 4)
    options = {"max_model_len": 224, "block_size": max(16, 1 << (size - 1).bit_length())}
    runner = load(tmp_path / "m.gguf", dtype="float32", **options)
    driver = Driver(runner)
    driver.start(0, PROMPT)
    driver.run([0], 32)
    assert driver.output(0) == continuation(model, PROMPT, 32)
    exact = in_float64(model)
    runner = load(tmp_path / "m.gguf", dtype="float32", **options)
    assert answer_differences(runner, exact).max() < max(5e-5, rounding(model, exact))
