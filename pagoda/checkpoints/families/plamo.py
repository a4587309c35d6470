# SPDX-License-Identifier: Apache-2.0
"""PLaMo 2 and 3: norms on both sides of attention and MLP, with offsets of their own (Preferred Networks)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pagoda.checkpoints.families.mamba import GGUF_SCAN, MIXER_NAMES, gguf_heads
from pagoda.checkpoints.families.shared import (
    WINDOW_PATTERN,
    conv_width,
    every_nth_full,
    gguf_kv_heads,
    gguf_windows,
    with_attention,
    with_local_rotary,
    with_state,
)
from pagoda.checkpoints.family import Family, GgufFormat
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.scan_layers import MambaSpec
from pagoda.checkpoints.tensor_names import GGUF_NAMES, TensorNames

_QKV, _GATE_UP = "mixer.qkv_proj", "mlp.gate_up_proj"
_NAMES = TensorNames(
    layers="model.layers.layers",
    attention_norm="pre_mixer_norm",
    query=_QKV,
    key=_QKV,
    value=_QKV,
    query_norm="mixer.q_norm",
    key_norm="mixer.k_norm",
    attention_out="mixer.o_proj",
    attention_post_norm="post_mixer_norm",
    mlp_norm="pre_mlp_norm",
    mlp_post_norm="post_mlp_norm",
    gate=_GATE_UP,
    up=_GATE_UP,
    norm_offset=1.0,
    norm_offsets={"post_mixer_norm": 1 / 5, "post_mlp_norm": 5**-1.5},
)

# ---- PLaMo 2: Mamba with heads in most layers, and norms of queries and keys with weights for each head


def _values2(fields: Fields) -> Mapping[str, object]:
    """The longest sequence, which no layer of attention sees through a window."""
    longest = fields.positive("max_position_embeddings", 2048)
    window = fields.positive("attention_window_size", 2048)
    layers = range(fields.positive("num_hidden_layers", 32))
    named = fields.values.get("full_attention_idx")
    whole = fields.integers("full_attention_idx") if named is not None else []
    attending = [at for at in layers if not _is_mamba(fields, at)]
    sees_all = set(attending) <= set(whole)
    return {"max_position_embeddings": longest if sees_all else min(longest, window)}


def _is_mamba(fields: Fields, layer: int) -> bool:
    step, count = fields.positive("mamba_step", 2), fields.positive("num_hidden_layers", 32)
    if not fields.flag("mamba_enabled", True):
        return False
    if count <= step // 2:
        return layer != count - 1
    return layer % step != step // 2


def _adapt2(spec: ModelSpec, fields: Fields) -> ModelSpec:
    theta = fields.number("rope_theta", 10_000.0)
    fields.require(
        "rope_local_theta", theta
    )  # of layers with a window; no model of the makers has another
    spec = with_attention(
        spec.with_layers(lambda _, layer: replace(layer, post_norm=True)), qk_norm="each"
    )
    layers = [at for at in range(spec.num_layers) if _is_mamba(fields, at)]
    heads = fields.positive("mamba_num_heads", 64)
    state = MambaSpec(
        heads * spec.head_dim,
        fields.positive("mamba_d_state", 64),
        max(64, spec.hidden_size // 16),
        conv_width(fields, "mamba_d_conv", 4),
        bias=False,
        norms="weighed",
        norm_eps=spec.norm.eps,
        heads=heads,
    )
    return with_state(spec, state, layers, bias=False)


def _gguf_values2(fields: Fields) -> Mapping[str, object]:
    """Sizes of Mamba's heads, and kinds of layers, which heads of keys and values tell; none has a window."""
    counts = gguf_kv_heads(fields)
    first = next((at for at, count in enumerate(counts) if count), len(counts))
    # The first layer with attention lies half a step, rounded down, from the begin.
    both = (2 * first, 2 * first + 1)
    step = next((it for it in both if it and _steps_alike(counts, it)), None)
    if step is None:
        fields.refuse("attention.head_count_kv", "must be of every so manyth layer, and else 0")
    heads, size = gguf_heads(fields)
    return {
        "head_dim": size,
        "mamba_num_heads": heads,
        "mamba_step": step,
        "full_attention_idx": [at for at, count in enumerate(counts) if count],
    }


def _steps_alike(counts: list[int], step: int) -> bool:
    fields = Fields({"mamba_step": step, "num_hidden_layers": len(counts)}, "")
    return all(_is_mamba(fields, at) == (count == 0) for at, count in enumerate(counts))


PLAMO2 = Family(
    "Plamo2ForCausalLM",
    "PLaMo 2 1B and 8B, PLaMo 2.1",
    _adapt2,
    names=replace(
        _NAMES,
        query_norm="mixer.q_weight",
        key_norm="mixer.k_weight",
        state_x="mixer.bcdt_proj",
        state_step_norm="mixer.dt_norm_weight",
        state_b_norm="mixer.B_norm_weight",
        state_c_norm="mixer.C_norm_weight",
        **{key: it for key, it in MIXER_NAMES.items() if key not in ("state_norm", "state_x")},
    ),
    gguf=GgufFormat(
        "plamo2",
        names=replace(
            GGUF_NAMES,
            query_norm="attn_q_norm.weight",
            key_norm="attn_k_norm.weight",
            **GGUF_SCAN,
        ),
        keys={"ssm.conv_kernel": "mamba_d_conv", "ssm.state_size": "mamba_d_state"},
        values=_gguf_values2,
        read=frozenset({"ssm.inner_size", "ssm.time_step_rank", "ssm.group_count"}),
    ),
    renamed={"hidden_size_per_head": "head_dim"},
    values=_values2,
    defaults={"num_key_value_heads": 4, "head_dim": 128, "tie_word_embeddings": True},
)


# ---- PLaMo 3: windows in most layers, with a rotary table of their own


def _values(fields: Fields) -> Mapping[str, object]:
    """The window, which older files tell layer by layer, and the table of layers that see all."""
    fields.require("hidden_activation", "swiglu")
    found: dict[str, object] = {"hidden_activation": None}
    windows = fields.values.get("sliding_window")
    if isinstance(windows, list):
        found["sliding_window"] = next((it for it in windows if it is not None), None)
    factor = fields.number("rope_scaling_factor", 1.0)
    if factor != 1:
        original = fields.positive("initial_context_length")
        found["rope_parameters"] = {
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": fields.number("rope_theta", 150_000.0),
                "factor": factor,
                "original_max_position_embeddings": original,
                "truncate": False,
            }
        }
    return found


def _adapt(spec: ModelSpec, fields: Fields) -> ModelSpec:
    fields.require("scale_embedding", False)
    spec = spec.with_layers(lambda _, layer: replace(layer, post_norm=True))
    windows = every_nth_full(fields, spec.num_layers, 8, 2048)
    spec = with_attention(spec, windows, qk_norm="head")
    return with_local_rotary(spec, fields, fields.number("rope_local_theta", 10_000.0))


PLAMO3 = Family(
    "Plamo3ForCausalLM",
    "PLaMo 3 NICT 2B, 8B and 31B",
    _adapt,
    names=_NAMES,
    gguf=GgufFormat(
        "plamo3",
        keys={
            "attention.sliding_window": "sliding_window",
            "rope.freq_base_swa": "rope_local_theta",
        },
        values=gguf_windows,
        read=frozenset({WINDOW_PATTERN}),
    ),
    renamed={"window_size": "sliding_window", "rope_global_theta": "rope_theta"},
    values=_values,
    defaults={
        "num_key_value_heads": 4,
        "head_dim": 128,
        "tie_word_embeddings": True,
        "max_position_embeddings": 2048,
        "rope_theta": 150_000.0,
    },
)
