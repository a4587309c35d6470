# SPDX-License-Identifier: Apache-2.0
"""Families in bfloat16, int8 and int4 are as close to float32 as the format allows."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from driver import answer_differences, load
from family_models import FAMILIES, make_model
from own_code_models import OWN_CODE, as_makers_publish, make_like

SIZES: dict[str, Any] = {
    "hidden_size": 192,
    "intermediate_size": 192,
    "num_attention_heads": 12,
    "num_key_value_heads": 6,
    "initializer_range": 0.06,
}
"""Wide enough that errors of single products average out."""
OTHER_SIZES = (
    "shared_intermediate_size",
    "intermediate_size_mlp",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "ffn_hidden_size",
    "expert_ffn_hidden_size",
    "hidden_size_per_layer_input",
)
"""Inner channels of the MLPs of some families, and embeddings in layers."""
DBRX: dict[str, Any] = {
    **{"hidden_size": 192, "num_attention_heads": 12, "d_model": 192, "n_heads": 12},
    "initializer_range": 0.06,
    "attn_config": {"clip_qkv": 8.0, "kv_n_heads": 6, "rope_theta": 10000.0},
    "ffn_config": {"ffn_hidden_size": 192, "moe_num_experts": 6, "moe_top_k": 6},
}
STATE_SIZES = {
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "initializer_range": 0.04,
}
"""Shapes of a delta rule, behind which norms of heads make more of errors."""
ALLOWED = {"none": 1.0, "int8": 4.0, "int4": 40.0}
"""Mean differences of log-probabilities from float32, in units of those that transformers has in bfloat16."""


_SCAN = {**SIZES, "mamba_n_heads": 8, "mamba_d_head": 24, "mamba_d_state": 16}
_NEMOTRON = {
    **{**SIZES, "head_dim": 16, "mamba_num_heads": 6, "mamba_head_dim": 32, "ssm_state_size": 16},
    **{"num_experts_per_tok": 8, "topk_group": 2, "moe_intermediate_size": 192},
    "moe_shared_expert_intermediate_size": 192,
}
_OF_OWN_SIZES: dict[str, dict[str, Any]] = {
    "granite4-h": {**_SCAN, "shared_intermediate_size": 192},
    "granite4-h-moe": {**_SCAN, "shared_intermediate_size": 192, "num_experts_per_tok": 6},
    "bamba": _SCAN,
    "falcon-h1": {**_SCAN, "mamba_d_ssm": 192},
    "mamba2": {"hidden_size": 192, "num_heads": 8, "head_dim": 48, "state_size": 16},
    "zamba2": {"hidden_size": 192, "num_attention_heads": 4, "adapter_rank": 32},
    "hybrid-nemotron": _NEMOTRON,
    "hybrid-nemotron-latent": {**_NEMOTRON, "moe_latent_size": 96, "topk_group": 1},
    **{name: {} for name in ("jais", "plamo2", "plamo3", "deci")},
    "step": {"num_experts_per_tok": 6, "moe_intermediate_size": 64},
    "arctic": {"num_experts_per_tok": 5},
    **dict.fromkeys(("ouro", "solar"), SIZES),
    "mistral-large3": {
        **{**SIZES, "num_key_value_heads": 12, "num_experts_per_tok": 8},
        "moe_intermediate_size": 192,
    },
}
"""Hybrids, whose sizes follow from each other, and families with code of their own: on `cpu` alone."""


def _model(name: str) -> Any:
    """A model of a family; its tokens go through all experts, as rounding may turn a close choice."""
    known = FAMILIES[name][1]
    sizes = SIZES | {size: 192 for size in OTHER_SIZES if size in known}
    if "linear_key_head_dim" in known:
        sizes |= STATE_SIZES
    if "kv_lora_rank" in known:
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    for count in ("num_experts", "num_local_experts", "n_routed_experts"):
        if known.get(count):
            sizes["num_experts_per_tok"] = known[count]
    if "router_jitter_noise" in known:
        sizes |= {"num_local_experts": 2, "num_experts_per_tok": 2}
    if "moe_topk" in known and "zero_expert_num" in known:
        sizes["moe_topk"] = known["n_routed_experts"] + known["zero_expert_num"]
        del sizes["num_experts_per_tok"]
    if "ffn_config" in known:
        return make_model(name, **DBRX)
    if "index_topk" in known:
        sizes["index_topk"] = 256  # rounding may turn a close choice of tokens, too
    if "n_group" in known:
        sizes["topk_group"] = known["n_group"]
    return make_model(name, **sizes)


def _rounding(model: Any) -> float:
    """Mean difference of the model in bfloat16 from itself, of the 20 likeliest tokens at 8 places."""
    prompt = torch.randint(320, (1, 48), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        exact = model(prompt).logits[0, -8:].log_softmax(-1)
        rounded = copy.deepcopy(model).bfloat16()(prompt).logits[0, -8:].float().log_softmax(-1)
    top, tokens = exact.topk(20)
    return float((rounded.gather(1, tokens) - top).abs().mean())


_PLAIN = [name for name in FAMILIES if name not in {*_OF_OWN_SIZES, "zamba2-plain"}]


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *((name, backend) for name in _PLAIN for backend in ("auto", "reference")),
        *((name, "auto") for name in _OF_OWN_SIZES),
    ],
)
def test_formats_are_as_close_as_rounding_allows(name: str, backend: str, tmp_path: Path) -> None:
    if name in OWN_CODE:
        model = make_like(name, **_OF_OWN_SIZES[name])
    elif name in _OF_OWN_SIZES:
        model = make_model(name, **{"initializer_range": 0.06, **_OF_OWN_SIZES[name]})
    else:
        model = _model(name)
    model.save_pretrained(tmp_path)
    if name in OWN_CODE:
        as_makers_publish(name, tmp_path)
    unit = _rounding(model)
    for quantization, allowed in ALLOWED.items():
        runner = load(
            tmp_path,
            dtype="bfloat16",
            quantization=quantization,
            backend=backend,
            max_model_len=128,
        )
        assert answer_differences(runner, model).mean() < allowed * unit
