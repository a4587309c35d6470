# SPDX-License-Identifier: Apache-2.0
"""Decoders that their makers publish with code of their own, and that compute as others, by other names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from pagoda.checkpoints.expert_routing import ExpertRouting
from pagoda.checkpoints.families.deepseek import with_latents
from pagoda.checkpoints.families.shared import (
    NEXT_LAYERS,
    expert_counts,
    gguf_layers,
    layers_behind_dense,
    own_heads,
    sigmoid_experts,
    with_alibi,
    with_attention,
    with_biases,
    with_experts,
    with_layer_norm,
)
from pagoda.checkpoints.family import Family, GgufFormat
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.layer_spec import ExpertsSpec, MlpSpec
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.multipliers import Multipliers
from pagoda.checkpoints.pooling_spec import ClassifierSpec
from pagoda.checkpoints.tensor_names import GGUF_NEIGHBOURS, TensorNames

# ---- InternLM 1 and openPangu Embedded: Llama with biases of attention; InternLM 3 with some of them


def _adapt_internlm(spec: ModelSpec, fields: Fields) -> ModelSpec:
    bias = fields.flag("bias", False)
    return with_biases(spec, qkv=bias, out=bias, mlp=False)


def _adapt_internlm3(spec: ModelSpec, fields: Fields) -> ModelSpec:
    bias = fields.flag("bias", False)
    return with_biases(spec, qkv=fields.flag("qkv_bias", False), out=bias, mlp=bias)


INTERNLM = Family(
    "InternLMForCausalLM",
    "InternLM 7B and 20B, openPangu Embedded",
    _adapt_internlm,
    gguf=GgufFormat("pangu-embedded"),
    aliases=frozenset({"PanguEmbeddedForCausalLM"}),
)
INTERNLM3 = replace(
    INTERNLM,
    architecture="InternLM3ForCausalLM",
    models="InternLM 3 8B",
    adapt=_adapt_internlm3,
    gguf=None,  # files are of Llama's architecture
    own_keys=frozenset({"qkv_bias"}),
    aliases=frozenset(),
)


# ---- InternLM 2: Llama whose queries, keys and values are one tensor (Cai et al. 2024)

_WQKV = "attention.wqkv"
INTERNLM2 = replace(
    INTERNLM,
    architecture="InternLM2ForCausalLM",
    models="InternLM 2 and 2.5, text of Mono-InternVL",
    names=TensorNames(
        embedding="model.tok_embeddings",
        head="output",
        attention_norm="attention_norm",
        query=_WQKV,
        key=_WQKV,
        value=_WQKV,
        attention_out="attention.wo",
        mlp_norm="ffn_norm",
        gate="feed_forward.w1",
        up="feed_forward.w3",
        down="feed_forward.w2",
        joins_by_head=True,
    ),
    gguf=GgufFormat("internlm2", names=GGUF_NEIGHBOURS),
    aliases=frozenset({"InternLM2VEForCausalLM"}),
    heads={"ForRewardModel": lambda _: ClassifierSpec("v_head", bias=False, pooling="all")},
)


# ---- EXAONE 3: Llama (LG AI Research 2024)


def _as_it_is(spec: ModelSpec, _: Fields) -> ModelSpec:
    return spec


EXAONE = Family(
    "ExaoneForCausalLM",
    "EXAONE 3.0 and 3.5, EXAONE Deep",
    _as_it_is,
    names=TensorNames(
        embedding="wte",
        norm="ln_f",
        layers="h",
        attention_norm="ln_1",
        query="attn.attention.q_proj",
        key="attn.attention.k_proj",
        value="attn.attention.v_proj",
        attention_out="attn.attention.out_proj",
        mlp_norm="ln_2",
        gate="mlp.c_fc_0",
        up="mlp.c_fc_1",
        down="mlp.c_proj",
    ),
    gguf=GgufFormat("exaone"),
    renamed={
        "num_layers": "num_hidden_layers",
        "layer_norm_epsilon": "rms_norm_eps",
        "activation_function": "hidden_act",
    },
)


# ---- Orion: Llama with layer norms (Chen et al. 2024)


def _adapt_orion(spec: ModelSpec, fields: Fields) -> ModelSpec:
    return with_layer_norm(spec, fields, bias=True)


ORION = Family(
    "OrionForCausalLM",
    "Orion 14B",
    _adapt_orion,
    gguf=GgufFormat("orion", keys={"attention.layer_norm_epsilon": "layer_norm_eps"}),
    renamed={"rms_norm_eps": "layer_norm_eps"},
)


# ---- MiniCPM: Llama with factors; MiniCPM 3 with latent attention as well (Hu et al. 2024)


def _with_factors(spec: ModelSpec, fields: Fields) -> ModelSpec:
    logits = fields.positive("dim_model_base", 1) / spec.hidden_size
    factors = Multipliers(
        embedding=fields.number("scale_emb", 1.0),
        residual=fields.number("scale_depth", 1.0) / math.sqrt(spec.num_layers),
        logits=logits if fields.values.get("dim_model_base") is not None else 1.0,
    )
    return replace(spec, multipliers=factors)


def _adapt_minicpm3(spec: ModelSpec, fields: Fields) -> ModelSpec:
    return _with_factors(with_latents(spec, fields, usual_query_rank=768), fields)


def _minicpm3_values(fields: Fields) -> Mapping[str, object]:
    heads, hidden = fields.positive("num_attention_heads"), fields.positive("hidden_size")
    value = fields.positive("v_head_dim", max(1, hidden // heads))
    rotated = fields.positive("qk_rope_head_dim", 32)
    return {"v_head_dim": value, "head_dim": rotated}


def _gguf_minicpm(fields: Fields) -> Mapping[str, object]:
    """Factors, of which files of 2024 have none: these are of the first models."""
    layers, hidden = fields.positive("block_count"), fields.positive("embedding_length")
    depth = fields.optional_number("residual_scale") or 1.4 / math.sqrt(layers)
    logits = fields.optional_number("logit_scale") or hidden / 256
    base = hidden / logits
    if not 1 <= base <= hidden or abs(base - round(base)) > 1e-4 * base:
        fields.refuse("logit_scale", f"must be {hidden} over a whole number")
    return {
        "scale_emb": fields.optional_number("embedding_scale") or 12.0,
        "scale_depth": depth * math.sqrt(layers),
        "dim_model_base": round(base),
    }


def _gguf_minicpm3(fields: Fields) -> Mapping[str, object]:
    """Files do not say the size of values, and scale as the published model."""
    rotated, key = (fields.positive(it) for it in ("rope.dimension_count", _KEY_LENGTH))
    if key <= rotated:
        fields.refuse(_KEY_LENGTH, f"must be above the {rotated} elements that are rotated")
    rank = "attention.q_lora_rank"
    return {
        "q_lora_rank": fields.positive(rank) if rank in fields else None,
        "qk_nope_head_dim": key - rotated,
        "qk_rope_head_dim": rotated,
        "rope_scaling": {"rope_type": "default"},
    }


_KEY_LENGTH = "attention.key_length"
_FACTORS = frozenset({"scale_depth", "scale_emb"})
MINICPM = Family(
    "MiniCPMForCausalLM",
    "MiniCPM 1B and 2B",
    _with_factors,
    gguf=GgufFormat(
        "minicpm",
        names=GGUF_NEIGHBOURS,
        values=_gguf_minicpm,
        read=frozenset({"embedding_scale", "residual_scale", "logit_scale"}),
    ),
    defaults={"tie_word_embeddings": True},
    own_keys=_FACTORS,
)
MINICPM3 = Family(
    "MiniCPM3ForCausalLM",
    "MiniCPM 3 4B",
    _adapt_minicpm3,
    gguf=GgufFormat(
        "minicpm3",
        keys={"attention.kv_lora_rank": "kv_lora_rank"},
        values=_gguf_minicpm3,
        read=frozenset({"attention.q_lora_rank"}),
    ),
    values=_minicpm3_values,
    defaults={
        **{"kv_lora_rank": 256, "qk_nope_head_dim": 64, "rms_norm_eps": 1e-5},
        **{"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256},
        "tie_word_embeddings": True,
    },
    own_keys=_FACTORS | {"kv_lora_rank", "q_lora_rank"},
)


# ---- TeleFLM: Llama with factors of embeddings and logits (Li et al. 2024)


def _adapt_teleflm(spec: ModelSpec, fields: Fields) -> ModelSpec:
    if not fields.flag("use_mup", False):
        return spec
    logits = fields.number("output_mult", 1.0) / fields.number("mup_scale_factor", 1.0)
    factors = Multipliers(embedding=fields.number("input_mult", 1.0), logits=logits)
    return replace(spec, multipliers=factors)


TELEFLM = Family("TeleFLMForCausalLM", "Tele-FLM 52B", _adapt_teleflm)


# ---- TeleChat: Llama with biases of the maps back, and keys and values in one tensor (China Telecom 2024)


def _adapt_telechat(spec: ModelSpec, fields: Fields) -> ModelSpec:
    mlp = MlpSpec(fields.positive("intermediate_size"), down_bias=True)
    spec = with_attention(spec, qkv_bias=False, output_bias=True)
    return spec.with_layers(lambda _, layer: replace(layer, mlp=mlp))


_KEY_VALUE = "self_attention.key_value"
TELECHAT = Family(
    "TeleChat2ForCausalLM",
    "TeleChat and TeleChat 2",
    _adapt_telechat,
    names=TensorNames(
        embedding="word_embeddings",
        norm="ln_f",
        layers="h",
        query="self_attention.query",
        key=_KEY_VALUE,
        value=_KEY_VALUE,
        attention_out="self_attention.dense",
        joins_by_head=True,
    ),
    renamed={
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "ffn_hidden_size": "intermediate_size",
        "layer_norm_epsilon": "rms_norm_eps",
        "seq_length": "max_position_embeddings",
    },
    aliases=frozenset({"TeleChatForCausalLM"}),
)


# ---- Qwen 1: Llama with biases of queries, keys and values (Bai et al. 2023)


def _qwen_values(fields: Fields) -> Mapping[str, object]:
    """Inner channels, of which files count those of gate and up together."""
    return {**own_heads(fields), "intermediate_size": fields.positive("intermediate_size") // 2}


def _adapt_qwen(spec: ModelSpec, fields: Fields) -> ModelSpec:
    fields.require("no_bias", True)
    return with_attention(spec, qkv_bias=True)


_C_ATTN = "attn.c_attn"
QWEN = Family(
    "QWenLMHeadModel",
    "Qwen 1.8B, 7B, 14B and 72B of 2023",
    _adapt_qwen,
    names=TensorNames(
        embedding="wte",
        norm="ln_f",
        layers="h",
        attention_norm="ln_1",
        query=_C_ATTN,
        key=_C_ATTN,
        value=_C_ATTN,
        attention_out="attn.c_proj",
        mlp_norm="ln_2",
        gate="mlp.w2",
        up="mlp.w1",
        down="mlp.c_proj",
    ),
    renamed={
        "layer_norm_epsilon": "rms_norm_eps",
        "rotary_emb_base": "rope_theta",
        "seq_length": "max_position_embeddings",
    },
    gguf=GgufFormat("qwen"),
    values=_qwen_values,
)


# ---- Baichuan: Llama; the larger model scores by distance, and rows of Baichuan 2's head are of length one


def _adapt_baichuan(spec: ModelSpec, fields: Fields) -> ModelSpec:
    spec = replace(spec, norms_head="rows" if spec.vocab_size == 125_696 else None)
    return with_alibi(spec) if fields.flag("alibi", False) else spec


def _baichuan_values(fields: Fields) -> Mapping[str, object]:
    """Files of the larger model are silent on positions."""
    own = own_heads(fields)
    if fields.values.get("max_position_embeddings") is not None:
        return own
    return {**own, "alibi": True, "max_position_embeddings": fields.positive("model_max_length")}


_W_PACK = "self_attn.W_pack"
BAICHUAN = Family(
    "BaichuanForCausalLM",
    "Baichuan and Baichuan 2, 7B and 13B",
    _adapt_baichuan,
    names=TensorNames(query=_W_PACK, key=_W_PACK, value=_W_PACK),
    gguf=GgufFormat(
        "baichuan",
        names=GGUF_NEIGHBOURS,
        # Files do not say so: llama.cpp knows the larger model by its layers.
        values=lambda fields: {"alibi": fields.positive("block_count") == 40},
    ),
    values=_baichuan_values,
    own_keys=frozenset({"alibi"}),
    aliases=frozenset({"BaiChuanForCausalLM"}),
)


# ---- ChatGLM 2 and 3: GLM-4-9B by other names


def _adapt_chatglm(spec: ModelSpec, fields: Fields) -> ModelSpec:
    for name in ("rmsnorm", "post_layer_norm", "multi_query_attention"):
        fields.require(name, True)
    return with_attention(spec, qkv_bias=fields.flag("add_qkv_bias", False), output_bias=False)


def _chatglm_values(fields: Fields) -> Mapping[str, object]:
    return {"rope_theta": 10_000.0 * fields.number("rope_ratio", 1.0)}


_QKV = "self_attention.query_key_value"
CHATGLM = Family(
    "ChatGLMForConditionalGeneration",
    "ChatGLM 2 and 3, GLM-4-9B as first published",
    _adapt_chatglm,
    names=TensorNames(
        embedding="embedding.word_embeddings",
        norm="encoder.final_layernorm",
        head="output_layer",
        layers="encoder.layers",
        query=_QKV,
        key=_QKV,
        value=_QKV,
        attention_out="self_attention.dense",
        gate="mlp.dense_h_to_4h",
        up="mlp.dense_h_to_4h",
        down="mlp.dense_4h_to_h",
        rotates_neighbours=True,
    ),
    renamed={
        "num_layers": "num_hidden_layers",
        "padded_vocab_size": "vocab_size",
        "ffn_hidden_size": "intermediate_size",
        "kv_channels": "head_dim",
        "multi_query_group_num": "num_key_value_heads",
        "layernorm_epsilon": "rms_norm_eps",
        "seq_length": "max_position_embeddings",
    },
    values=_chatglm_values,
    partial_rotary=0.5,
    aliases=frozenset({"ChatGLMModel"}),
)


# ---- DeepSeek-MoE: Llama with experts, and some for all tokens (Dai et al. 2024)


def _adapt_deepseek(spec: ModelSpec, fields: Fields) -> ModelSpec:
    counts = expert_counts(fields, "n_routed_experts", (64, 6))
    inner = fields.positive("moe_intermediate_size", 1407)
    shared = fields.count("n_shared_experts", 0) * inner
    routing = ExpertRouting(*counts, fields.flag("norm_topk_prob", False))
    experts = ExpertsSpec(routing, inner, shared_size=shared)
    return with_experts(spec, experts, layers_behind_dense(fields, spec.num_layers, 0))


_GGUF_EXPERTS = {
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_shared_count": "n_shared_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "leading_dense_block_count": "first_k_dense_replace",
}


def _gguf_experts(fields: Fields) -> Mapping[str, object]:
    return {"norm_topk_prob": fields.flag("expert_weights_norm", False)}


_EXPERT_KEYS = frozenset({"first_k_dense_replace", "n_routed_experts", "n_shared_experts"})
DEEPSEEK = Family(
    "DeepseekForCausalLM",
    "DeepSeek-MoE 16B",
    _adapt_deepseek,
    gguf=GgufFormat("deepseek", names=GGUF_NEIGHBOURS, keys=_GGUF_EXPERTS, values=_gguf_experts),
    own_keys=_EXPERT_KEYS,
)


# ---- Ling: the same with joined maps; Ling 2 scores experts by sigmoids (Ling Team 2025)


def _adapt_bailing(spec: ModelSpec, fields: Fields) -> ModelSpec:
    bias, qk_norm = fields.flag("use_bias", False), fields.flag("use_qk_norm", False)
    spec = with_attention(
        replace(spec, norms_head="columns" if fields.flag("norm_head", False) else None),
        qkv_bias=fields.flag("use_qkv_bias", False) or bias,
        output_bias=bias,
        qk_norm="head" if qk_norm else None,
    )
    if fields.values.get("score_function") != "sigmoid":
        silent = fields.values.get("norm_topk_prob") is None
        return _adapt_deepseek(spec, fields.updated({"norm_topk_prob": True}) if silent else fields)
    sizes = {"n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512}
    experts = sigmoid_experts(fields, sizes, scale=1.0)
    return with_experts(spec, experts, layers_behind_dense(fields, spec.num_layers, 0))


def _gguf_second(fields: Fields) -> Mapping[str, object]:
    """Values of Ling 2, whose number of blocks may count layers that predict several tokens at once."""
    fields.require("expert_gating_func", 2)
    return {
        **gguf_layers(fields),
        **_gguf_experts(fields),
        "score_function": "sigmoid",
        "use_qk_norm": True,
        "n_group": fields.positive("expert_group_count", 1),
        "topk_group": fields.positive("expert_group_used_count", 1),
        "routed_scaling_factor": fields.number("expert_weights_scale", 1.0),
    }


_JOINED = "attention.query_key_value"
BAILING = Family(
    "BailingMoeForCausalLM",
    "Ling lite, plus and 2.0",
    _adapt_bailing,
    names=TensorNames(
        embedding="model.word_embeddings",
        query=_JOINED,
        key=_JOINED,
        value=_JOINED,
        query_norm="attention.query_layernorm",
        key_norm="attention.key_layernorm",
        attention_out="attention.dense",
        correction="mlp.gate.expert_bias",
    ),
    gguf=GgufFormat("bailingmoe", names=GGUF_NEIGHBOURS, keys=_GGUF_EXPERTS, values=_gguf_experts),
    other_gguf=(
        GgufFormat(
            "bailingmoe2",
            keys=_GGUF_EXPERTS,
            values=_gguf_second,
            read=frozenset({"expert_gating_func", "expert_group_count", NEXT_LAYERS})
            | {"expert_group_used_count", "expert_weights_scale"},
        ),
    ),
    renamed={"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"},
    partial_rotary=1.0,
    own_keys=_EXPERT_KEYS
    | {"n_group", "num_experts", "num_shared_experts", "routed_scaling_factor", "topk_group"}
    | {"use_qk_norm", "use_qkv_bias"},
    aliases=frozenset({"BailingMoeV2ForCausalLM"}),
)
