# SPDX-License-Identifier: Apache-2.0
"""Every key of a family's configuration class in transformers is honoured, refused or known to change nothing."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import huggingface_hub.errors
import pytest
import transformers

from pagoda.checkpoints.config_json import parse_model_config
from pagoda.checkpoints.families import FAMILIES
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.errors import ConfigError

BASE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
HARMLESS = {
    # Of training.
    *("attention_dropout", "embd_pdrop", "hidden_dropout", "initializer_range", "resid_pdrop"),
    *("attention_probs_dropout_prob", "classifier_dropout", "hidden_dropout_prob", "dropout"),
    *("embedding_dropout", "mlp_dropout", "qa_dropout", "seq_classif_dropout", "pooler_dropout"),
    *("initializer_cutoff_factor", "sinusoidal_pos_embds", "sparse_pred_ignore_index"),
    *("sparse_prediction", "summary_last_dropout"),
    # Of heads, which are compared in `test_encoders.py`, and of other tasks.
    *("classifier_activation", "classifier_bias", "classifier_pooling", "decoder_bias", "legacy"),
    *("pooler_hidden_act", "summary_activation", "summary_type", "summary_use_proj"),
    *("output_router_logits", "residual_dropout", "router_aux_loss_coef", "router_jitter_noise"),
    *("attn_pdrop", "emb_pdrop", "embedding_dropout", "dropout", "layerdrop", "init_std"),
    *("init_device", "altup_coef_clip", "input_jitter_noise"),
    # The sum of two others.
    "qk_head_dim",
    # Of number formats within transformers, and of heads for other tasks.
    *("attention_softmax_in_fp32", "reorder_and_upcast_attn", "scale_attention_softmax_in_fp32"),
    *("slow_but_exact", "is_decoder", "summary_activation", "summary_first_dropout"),
    *("summary_proj_to_labels", "summary_type", "summary_use_proj"),
    # Of tensor-parallel training, where it adds up in another order.
    "pretraining_tp",
    # Of layers that predict several tokens at once, and of generation, and of how transformers runs.
    "num_mtp_layers",
    *("bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "cls_token_id", "eod_token_id"),
    *("mask_token_id", "sep_token_id", "deterministic_flash_attn"),
    # Of how layers with a state are trained, and computed within transformers.
    *("chunk_size", "mamba_chunk_size", "mamba_ssm_cache_dtype", "moe_shared_expert_overlap"),
    *("num_logits_to_keep", "rescale_prenorm_residual", "residual_in_fp32", "time_step_floor"),
    *("time_step_init_scheme", "time_step_max", "time_step_min", "time_step_scale"),
    *("use_associative_scan", "use_mamba_kernels", "use_mambapy", "z_loss_coefficient"),
}
"""Keys that change nothing of what an answer is computed of."""
ELSEWHERE = {
    "rope_parameters": "test_config_json.py",
    "layer_types": "test_config_json.py",
    "max_position_embeddings": "not with YaRN, which tells the length itself",
    "original_max_position_embeddings": "part of LongRoPE alone",
    "max_window_layers": "with use_sliding_window",
    "use_sliding_window": "with max_window_layers",
    "sliding_window": "with use_sliding_window or layer_types",
    "num_experts_per_tok": "where there are experts",
    "intermediate_size": "where not all layers have experts",
    **dict.fromkeys(("block_ffn_dim_multiplier", "conv_L_cache", "conv_bias"), "test_families.py"),
    **dict.fromkeys(("mamba_conv_bias", "mamba_d_conv", "mamba_d_head"), "test_families.py"),
    **dict.fromkeys(("mamba_d_state", "mamba_expand", "mamba_n_groups"), "test_families.py"),
    **dict.fromkeys(("mamba_n_heads", "mamba_proj_bias"), "test_families.py"),
    "mamba_norm_before_gate": "with mamba_rms_norm",
    "time_step_limit": "test_scan_layers.py",
    "max_relative_positions": "with relative_attention",
    "num_kv_heads": "with new_decoder_architecture",
    "num_ln_in_parallel_attn": "with new_decoder_architecture",
    "intermediate_size_mlp": "where not all layers have experts",
}
"""Keys that mean something only beside others."""
WITHOUT_USE = {
    **{it: {"attn_logit_softcapping"} for it in ("Gemma3ForCausalLM", "Gemma3TextModel")},
    "MptForCausalLM": {"learned_pos_emb", "logit_scale", "norm_type"},
    "Mamba2ForCausalLM": {"time_step_rank"},
    "MiniMaxForCausalLM": {"block_size"},
    "Zamba2ForCausalLM": {"use_conv_bias", "use_mem_eff_path"},
    "NemotronHForCausalLM": {
        *("attention_bias", "expand", "mtp_layers_block_type", "num_nextn_predict_layers"),
    },
}
"""Keys that transformers' classes have, and no use of: `test_families.py` compares answers."""


NAMES = [
    name
    for name in FAMILIES
    if not name.endswith(("ForConditionalGeneration", "MarianMTModel"))
    and hasattr(transformers, name.replace("MiMo", "Qwen2"))
]
"""Families of which transformers has the class, and not as the text part of another alone."""


def _parse(values: dict[str, Any]) -> ModelSpec:
    return parse_model_config(values, source="config.json")


def _others(value: object) -> list[object]:
    """Values that are not `value`, of its kind."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [2 * value + 2]
    if isinstance(value, str):
        return ["other"]
    return [True, 6, [1]]


@pytest.mark.parametrize("name", NAMES)
def test_no_key_is_dropped_silently(name: str) -> None:
    config_class = _config_class(name)
    own = {field.name: field.default for field in dataclasses.fields(config_class)}
    general = {field.name for field in dataclasses.fields(transformers.PreTrainedConfig)}
    base = {**_base(name), "architectures": [name]}
    if name.startswith("GraniteMoeHybrid"):
        base["position_embedding_type"] = "rope"
    expected = _parse(base)
    dropped = set()
    for key, usual in own.items():
        if key in general | HARMLESS | ELSEWHERE.keys() | WITHOUT_USE.get(name, set()):
            continue
        if key == "tie_word_embeddings" and expected.encoder is not None:
            continue  # encoders have no head for words
        if key == "head_dim" and expected.latent is not None:
            continue  # transformers takes qk_rope_head_dim for it
        usual = base.get(key, usual)
        taken = []
        for other in _others(usual):
            with contextlib.suppress(ConfigError):
                taken.append(_parse({**base, key: other}))
        if expected in taken:
            dropped.add(key)
    assert not dropped


def _base(name: str) -> dict[str, Any]:
    base = dict(BASE)
    if name.startswith("GraniteMoeHybrid"):
        base |= {"layer_types": ["attention"] * 4, "num_local_experts": 0}
        base |= {"shared_intermediate_size": 96}
    if name.startswith(("Bert", "XLM")):
        base |= {"hidden_act": "gelu", "num_labels": 1}
    if name.startswith("Gemma3n"):
        base["num_kv_shared_layers"] = 0
    if name.startswith("Gemma4"):
        base |= {"layer_types": ["sliding_attention", "full_attention"] * 2}
        base |= {"num_kv_shared_layers": 1, "enable_moe_block": True, "num_experts": 4}
        base |= {"top_k_experts": 2, "moe_intermediate_size": 32}
    if name.startswith("GPTJ"):
        base["rotary_dim"] = 8
    if name.startswith(("MambaFor", "FalconMamba")):
        del base["intermediate_size"]  # follows from `expand`
    if name.startswith("Mamba2"):
        base |= {"num_heads": 8, "n_groups": 2}
    if name.startswith("Bamba"):
        base["attn_layer_indices"] = [2]
    if name.startswith("Jamba"):
        base |= {"attn_layer_period": 2, "attn_layer_offset": 1}
    if name.startswith("Zamba2"):
        base |= {"layers_block_type": ["linear_attention", *["hybrid"] * 3], "rms_norm_eps": 1e-5}
    if name.startswith(("Falcon", "Zamba2")):
        del base["head_dim"]  # its class computes it
    return base


def _config_class(name: str) -> Any:
    """The class of a family; that of MiMo, which is its makers', is Qwen2's with another name."""
    return getattr(transformers, name.replace("MiMo", "Qwen2")).config_class


def _config(name: str, values: dict[str, Any]) -> transformers.PreTrainedConfig:
    return _config_class(name)(**values)


@pytest.mark.parametrize("name", NAMES)
def test_absent_keys_have_the_values_of_transformers(name: str) -> None:
    base = _base(name)
    filled = _config(name, base).to_dict() | {"architectures": [name]}
    assert _parse(base | {"architectures": [name]}) == _parse(filled)


_ALL_HEADS = ("GPT", "OPT", "Bloom", "Falcon", "Mamba", "Mpt", "Persimmon", "Dbrx", "Gemma4")
"""Families without fields for heads of keys, and for the size of heads, of all layers."""


@pytest.mark.parametrize("name", NAMES)
def test_absent_sizes_are_those_of_transformers(name: str) -> None:
    """Each size alone, and those that follow from others together; a size that must be there is named."""
    base = _base(name) | {"hidden_size": 8192, "num_attention_heads": 128}
    refused: dict[str, set[str]] = {}
    for absent in ({key} for key in BASE):
        if name.startswith(("GraniteMoeHybrid", "Gemma4", "Zamba2")) and absent == {
            "num_hidden_layers"
        }:
            continue  # there must be a kind for each
        for others in ({"head_dim", "num_key_value_heads"}, set[str]()):
            values = {key: size for key, size in base.items() if key not in absent | others}
            try:
                config = _config(name, values)
            except huggingface_hub.errors.StrictDataclassError:
                continue  # a usual size does not go with the others
            if name.startswith("BitNet") and absent | others >= {"num_key_value_heads"}:
                continue  # nor do five heads
            try:
                spec = _parse(values | {"architectures": [name]})
            except ConfigError as error:
                refused[str(error)] = absent
                continue
            if spec.latent is None:
                if not name.startswith(_ALL_HEADS):
                    head_dim = getattr(config, "head_dim", None)
                    kv_heads = getattr(config, "num_key_value_heads", None)
                    heads = config.num_attention_heads
                    expected = (head_dim or 8192 // heads, kv_heads or heads)
                    assert (spec.head_dim, spec.num_kv_heads) == expected
                assert spec == _parse(config.to_dict() | {"architectures": [name]})
    assert all(f"lacks {key}," in said for said, absent in refused.items() for key in absent)


def _text_configs() -> dict[str, type[transformers.PreTrainedConfig]]:
    names = [it for it in dir(transformers) if it.endswith("Config")]
    classes = [getattr(transformers, it) for it in names]
    kinds = {it.model_type: it for it in classes if getattr(it, "model_type", "")}
    return {
        kind: kinds[kind]
        for family in FAMILIES.values()
        for kind in family.model_types & kinds.keys()
    }


def test_a_text_part_that_is_silent_has_the_sizes_of_transformers() -> None:
    """Published files leave out what is the default of the text part's class (LLaVA 1.5, Idefics2)."""
    compared = _text_configs()
    assert {"llama", "mistral", "qwen2", "gemma3_text", "qwen3_vl_text"} <= compared.keys()
    for kind, config_class in compared.items():
        silent, filled = {"model_type": kind}, config_class().to_dict() | {"model_type": kind}
        assert _parse({"text_config": silent}) == _parse({"text_config": filled}), kind


def test_a_size_that_is_null_follows_from_others() -> None:
    """As transformers computes where a class takes null."""
    for name in NAMES:
        for key in ("head_dim", "num_key_value_heads"):
            if name.startswith("Falcon") and key == "head_dim":
                continue  # its class computes it
            values = _base(name) | {"hidden_size": 4096, "num_attention_heads": 128, key: None}
            with contextlib.suppress(huggingface_hub.errors.StrictDataclassError):
                filled = _config(name, values).to_dict() | {"architectures": [name]}
                spec, expected = _parse(values | {"architectures": [name]}), _parse(filled)
                assert spec.latent is not None or spec == expected, (name, key)
