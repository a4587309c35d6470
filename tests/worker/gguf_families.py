# SPDX-License-Identifier: Apache-2.0
"""GGUF files of families whose weights or metadata llama.cpp's converter changes in a way of their own.

A row has what the converter says of a family's config.json, and what it does to tensors.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter
from gguf_changes import (
    Config,
    Named,
    by_kind,
    common,
    corrected,
    multiplied,
    one_by_one,
    permuted,
    rotated,
    rotations,
    scanned,
    sigmoids,
    turned,
    weighed,
)
from gguf_files import add_values, finish
from gguf_models import Choose, frequency_factors, published, quantized
from gguf_states import (
    bamba,
    channels,
    hybrid,
    jamba,
    kimi,
    latent,
    mamba,
    nemotron,
    offset,
    permuted_and_scanned,
    plamo2,
)
from own_code_models import as_makers_publish
from safetensors.torch import load_file
from torch import Tensor


def _as_they_are(name: str, values: Tensor, _: Config) -> Iterator[Named]:
    yield name, values


class Row(NamedTuple):
    architecture: str
    values: Callable[[Config], Mapping[str, Any]] = lambda _: {}
    """Metadata besides the usual, by the names behind the architecture; None takes one away."""
    change: Callable[[str, Tensor, Config], Iterator[Named]] = _as_they_are
    """What becomes of a tensor, by names that the package `gguf` knows, or in files if they begin with `blk.`."""
    joins: bool = False
    """Queries, keys and values become one tensor."""
    makers: str = ""
    """The name in `own_code_models` of a family whose makers' files are converted, not those of transformers."""


# ---- what is said of a family


def _gpt2(config: Config) -> Mapping[str, Any]:
    return {"feed_forward_length": 4 * config["n_embd"]}


def _neox(config: Config) -> Mapping[str, Any]:
    parallel = config["use_parallel_residual"]
    return {"rope.dimension_count": rotated(config), "use_parallel_residual": parallel}


def _wide(config: Config) -> Mapping[str, Any]:
    size = config["hidden_size"]
    kv_heads = config.get("num_kv_heads", config.get("n_head"))
    if config.get("multi_query") and not config["new_decoder_architecture"]:
        kv_heads = 1
    return {"feed_forward_length": config.get("ffn_hidden_size") or 4 * size} | {
        "attention.head_count_kv": kv_heads,
        "context_length": 512,
    }


def _mpt(config: Config) -> Mapping[str, Any]:
    return {
        "feed_forward_length": 4 * config["d_model"],
        "attention.layer_norm_epsilon": 1e-5,
        "attention.clamp_kqv": config["attn_config"]["clip_qkv"],
        "attention.max_alibi_bias": float(config["attn_config"]["alibi_bias_max"]),
    }


def _dbrx(config: Config) -> Mapping[str, Any]:
    attention, experts = config["attn_config"], config["ffn_config"]
    return {
        "feed_forward_length": experts["ffn_hidden_size"],
        "attention.head_count_kv": attention["kv_n_heads"],
        "rope.freq_base": attention["rope_theta"],
        "attention.clamp_kqv": attention["clip_qkv"],
        "expert_count": experts["moe_num_experts"],
        "expert_used_count": experts["moe_top_k"],
        "attention.layer_norm_epsilon": 1e-5,
    }


def _phimoe(config: Config) -> Mapping[str, Any]:
    rope = config["rope_parameters"]
    length = rope["original_max_position_embeddings"]
    return {
        "rope.dimension_count": rotated(config),
        "rope.scaling.original_context_length": length,
        "rope.scaling.attn_factor": rope["long_mscale"],
        "attention.sliding_window": config["sliding_window"] or 0,
    }


def _ernie(config: Config) -> Mapping[str, Any]:
    return {
        "expert_count": config["moe_num_experts"],
        "expert_used_count": config["moe_k"],
        "interleave_moe_layer_step": config["moe_layer_interval"],
        "leading_dense_block_count": config["moe_layer_start_index"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_count": config["moe_num_shared_experts"],
        "expert_shared_feed_forward_length": config["intermediate_size"] // 2,
    }


def _hunyuan(config: Config) -> Mapping[str, Any]:
    return {
        "expert_shared_feed_forward_length": config["intermediate_size"],
        "expert_feed_forward_length": config["intermediate_size"],
        "expert_used_count": config["moe_topk"],
        "expert_shared_count": 1,
    }


def _unscaled(_: Config) -> Mapping[str, Any]:
    return {"rope.scaling.type": "linear", "rope.scaling.factor": 1.0}


def _first_names(name: str, values: Tensor, _: Config) -> Iterator[Named]:
    """Norms of BitNet by the names that its first models have, for which the architecture was made."""
    changed = name.replace("attn_sub_norm", "inner_attn_ln")
    yield changed.replace("ffn_sub_norm", "ffn_layernorm"), values


def _solar(config: Config) -> Mapping[str, Any]:
    return {**sigmoids(config), "leading_dense_block_count": 0}


def _windowed(config: Config) -> Mapping[str, Any]:
    kinds = [kind[0] == "s" for kind in config["layer_types"]]
    return {
        **sigmoids(config),
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": kinds,
        "nextn_predict_layers": 0,
    }


def _minimax(config: Config) -> Mapping[str, Any]:
    return {
        "rope.dimension_count": rotated(config),
        "expert_feed_forward_length": config["intermediate_size"],
        "expert_gating_func": 2,
    }


def _minicpm3(config: Config) -> Mapping[str, Any]:
    return {
        "attention.kv_lora_rank": config["kv_lora_rank"],
        "attention.q_lora_rank": config["q_lora_rank"],
        "attention.key_length": config["qk_nope_head_dim"] + config["qk_rope_head_dim"],
        "attention.value_length": None,
        "rope.dimension_count": config["qk_rope_head_dim"],
    }


def _minicpm(config: Config) -> Mapping[str, Any]:
    return {
        **rotations(config),
        "embedding_scale": config["embedding_multiplier"],
        "residual_scale": config["residual_multiplier"],
        "logit_scale": config["logits_scaling"],
    }


def _qwen(config: Config) -> Mapping[str, Any]:
    return {"feed_forward_length": 2 * config["intermediate_size"]}


def _shared(config: Config) -> Mapping[str, Any]:
    return {
        **rotations(config),
        "rope.scaling.type": None,
        "leading_dense_block_count": 0,
        "expert_feed_forward_length": config["intermediate_size"],
        "expert_weights_scale": 1.0,
        "expert_shared_count": 1,
        "expert_weights_norm": True,
    }


def _predicting(config: Config) -> Mapping[str, Any]:
    return {**sigmoids(config), "nextn_predict_layers": 0}


def _of_pictures(config: Config) -> Mapping[str, Any]:
    inner = config.get("moe_intermediate_size")
    return {
        "rope.dimension_sections": [2, 3, 3, 0],
        **({"n_deepstack_layers": 3} if config["model_type"] != "qwen2" else {}),
        **({"expert_feed_forward_length": inner} if inner else {}),
    }


def _with_index(config: Config) -> Mapping[str, Any]:
    rank, rotary = config["kv_lora_rank"], config["qk_rope_head_dim"]
    return {
        **sigmoids({**config, "head_dim": rotary}),
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": rank,
        "attention.q_lora_rank": config["q_lora_rank"],
        "attention.key_length": rank + rotary,
        "attention.value_length": rank,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rotary,
        "attention.value_length_mla": config["v_head_dim"],
        "attention.indexer.head_count": config["index_n_heads"],
        "attention.indexer.key_length": config["index_head_dim"],
        "attention.indexer.top_k": config["index_topk"],
    }


def _layered(config: Config) -> dict[str, Any]:
    """Windows, and embeddings of layers, of Gemma 3n and 4."""
    return {
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": [kind[0] == "s" for kind in config["layer_types"]],
        "attention.shared_kv_layers": config["num_kv_shared_layers"],
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "final_logit_softcapping": config["final_logit_softcapping"],
    }


def _gemma3n(config: Config) -> Mapping[str, Any]:
    shares = torch.tensor(config["activation_sparsity_pattern"])
    return {
        **_layered(config),
        "altup.active_idx": 0,
        "altup.num_inputs": config["altup_num_inputs"],
        "activation_sparsity_scale": torch.distributions.Normal(0, 1).icdf(shares).tolist(),
    }


def _gemma4(config: Config) -> Mapping[str, Any]:
    layers, inner = config["num_hidden_layers"], config["intermediate_size"]
    own = config["per_layer_config"] or {}
    full = next(iter(own.values()), {})
    first = layers - config["num_kv_shared_layers"]
    wide, narrow = full.get("head_dim", config["head_dim"]), config["head_dim"]
    found = {
        **_layered(config),
        "attention.key_length": wide,
        "attention.value_length": wide,
        "attention.key_length_swa": narrow,
        "attention.value_length_swa": narrow,
        "rope.dimension_count": wide,
        "rope.dimension_count_swa": narrow,
        "rope.scaling.type": None,
    }
    if config["use_double_wide_mlp"]:
        found["feed_forward_length"] = [inner * (1 + (at >= first)) for at in range(layers)]
    if (few := full.get("num_key_value_heads")) is not None:
        kinds = config["layer_types"]
        heads = config["num_key_value_heads"]
        found["attention.head_count_kv"] = [heads if kind[0] == "s" else few for kind in kinds]
    if config["enable_moe_block"]:
        found["expert_feed_forward_length"] = config["moe_intermediate_size"]
    return found


def _mimo(config: Config) -> Mapping[str, Any]:
    """Three layers that guess tokens are counted as well."""
    windows = [kind[0] == "s" for kind in config["layer_types"]] + [True] * 3
    heads = config["num_key_value_heads"], 2 * config["num_key_value_heads"]
    experts = sigmoids(config)
    gone = ("expert_shared_count", "expert_shared_feed_forward_length", "leading_dense_block_count")
    return {
        **{key: it for key, it in experts.items() if key not in gone},
        "block_count": len(windows),
        "rope.dimension_count": int(config["head_dim"] * 0.334),
        "attention.head_count_kv": [heads[it] for it in windows],
        "attention.value_length": config["v_head_dim"],
        "attention.value_scale": config["attention_value_scale"],
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": windows,
        "nextn_predict_layers": 3,
    }


def _sunk(name: str, values: Tensor, config: Config) -> Iterator[Named]:
    """Scores of sinks have a name like a weight."""
    if name.endswith("attention_sink_bias"):
        name += ".weight"
    yield from corrected(name, values, config)


ROWS: dict[str, Row] = {
    "gpt2-new": Row("gpt2", _gpt2, turned),
    "gpt-bigcode": Row("starcoder", lambda c: {**_gpt2(c), "attention.head_count_kv": 1}),
    "gpt-neox": Row("gptneox", _neox, by_kind),
    "gpt-neox-sequential": Row("gptneox", _neox, by_kind),
    "bloom": Row("bloom", _wide, by_kind),
    "falcon": Row("falcon", _wide, by_kind),
    "falcon-groups": Row("falcon", _wide, by_kind),
    "falcon-one-norm": Row("falcon", _wide, by_kind),
    "mpt": Row("mpt", _mpt),
    "dbrx": Row("dbrx", _dbrx, one_by_one),
    "phimoe": Row("phimoe", _phimoe),
    "ernie4.5-moe": Row("ernie4_5-moe", _ernie, corrected),
    "hunyuan-moe": Row("hunyuan-moe", _hunyuan),
    "jais2": Row("jais2", rotations),
    "bitnet": Row("bitnet", _unscaled, _first_names),
    "apertus": Row("apertus", rotations),
    "exaone-moe": Row("exaone-moe", _windowed, corrected),
    "afmoe": Row("afmoe", _windowed, corrected),
    "minimax-m2": Row("minimax-m2", _minimax, corrected),
    "solar-open": Row("glm4moe", _solar, corrected),
    "minicpm3": Row("minicpm3", _minicpm3),
    "mamba": Row("mamba", mamba, scanned),
    "falcon-mamba": Row("mamba", mamba, scanned),
    "mamba2": Row("mamba2", mamba, scanned),
    "jamba": Row("jamba", jamba, scanned),
    "falcon-h1": Row("falcon-h1", hybrid, multiplied),
    "hybrid-nemotron": Row("nemotron_h_moe", nemotron, scanned),
    "glm4-moe-groups": Row("glm4moe", sigmoids, corrected),
    "glm-5": Row("glm-dsa", _with_index, corrected),
    "gemma3n": Row("gemma3n", _gemma3n, weighed),
    "gemma4": Row("gemma4", _gemma4, weighed),
    "gemma4-plain": Row("gemma4", _gemma4, weighed),
    "gemma4-moe": Row("gemma4", _gemma4, weighed),
    "hybrid-nemotron-dense": Row("nemotron_h", nemotron, scanned),
    "hybrid-nemotron-latent": Row("nemotron_h_moe", latent, scanned),
    "bamba": Row("granitehybrid", bamba, permuted_and_scanned),
    "kimi-linear-sparse": Row("kimi-linear", kimi, channels),
    "mimo-v2": Row("mimo2", _mimo, _sunk),
}
"""Families by names of `family_models`."""


def _jais(config: Config) -> Mapping[str, Any]:
    return {"attention.max_alibi_bias": 8.0, "feed_forward_length": config["n_inner"]}


def _jais_weights(name: str, values: Tensor, config: Config) -> Iterator[Named]:
    """Outputs before inputs, and tables with their factors."""
    factors = {
        "wte": config["mup_embeddings_scale"],
        "lm_head": config["mup_output_alpha"] * config["mup_width_scale"],
    }
    is_map = ".c_" in name and name.endswith(".weight")
    factor = next((it for part, it in factors.items() if part in name), 1.0)
    yield name, values.t() if is_map else values * factor


def _plamo3(config: Config) -> Mapping[str, Any]:
    return {
        "attention.sliding_window": config["window_size"],
        "attention.sliding_window_pattern": config["sliding_window_pattern"],
        "rope.freq_base": config["rope_theta"],
        "rope.freq_base_swa": config["rope_local_theta"],
    }


OF_MAKERS = {
    "jais": Row("jais", _jais, _jais_weights, makers="jais"),
    "plamo2": Row("plamo2", plamo2, offset, makers="plamo2"),
    "plamo3": Row("plamo3", _plamo3, offset, makers="plamo3"),
    "internlm": Row("pangu-embedded", rotations),
    "internlm3": Row("llama", rotations, permuted),
    "minicpm": Row("minicpm", _minicpm, permuted),
    "qwen": Row("qwen", _qwen, joins=True),
    "baichuan": Row("baichuan", rotations, permuted),
    "deepseek": Row("deepseek", _shared, permuted),
    "ling": Row("bailingmoe", _shared, permuted),
    "ling2": Row("bailingmoe2", _predicting, corrected, joins=True),
}
"""Families by names of `own_code_models`."""
SEEING = {
    "llama": Row("xverse", rotations, permuted),
    "qwen2": Row("qwen2vl", _of_pictures),
    "qwen3": Row("qwen3vl", _of_pictures),
    "qwen3-moe": Row("qwen3vlmoe", _of_pictures),
}
"""Text parts of models that see, by names of `tiny_models`."""


def save_family(
    model: transformers.PreTrainedModel,
    path: Path,
    row: Row,
    choose: Choose = lambda _: Kind.F32,
) -> None:
    """Writes a file as the converter does, with matrices of the types that `choose` gives, if blocks of 32 fit."""
    config = model.config.to_dict()
    theirs: dict[str, Tensor] = {}
    if row.makers:
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            model.save_pretrained(scratch)
            as_makers_publish(row.makers, Path(scratch))
            config = json.loads((Path(scratch) / "config.json").read_bytes())
            theirs = load_file(Path(scratch) / "model.safetensors")
    writer = GGUFWriter(path, row.architecture)
    values = {**common(config), **row.values(config)}
    told = {key: value for key, value in values.items() if value is not None}
    add_values(writer, {f"{row.architecture}.{key}": value for key, value in told.items()})
    arch = next(it for it, name in gguf.MODEL_ARCH_NAMES.items() if name == row.architecture)
    names = gguf.get_tensor_name_map(arch, 99)
    numbers: dict[str, list[float]] = {}
    joins = row.architecture not in ("glm-dsa", "kimi-linear")
    tensors = theirs or published(model, path.parent, {}, joins_latents=joins)
    if row.architecture == "gemma3n":
        tensors = _stacked(tensors)
    for name, tensor in (_joined(tensors) if row.joins else tensors).items():
        if ".act_fn." in name:  # numbers of xIELU
            numbers.setdefault(name.rpartition(".")[2], []).append(tensor.item())
            continue
        for changed, own in row.change(name, tensor, config):
            short = changed
            if not changed.startswith("blk."):
                short = names.get_name(changed, try_suffixes=(".weight", ".bias"))
            assert short is not None, changed
            matrix = own if own.shape[-1:] == (1,) or own.dim() == 4 else own.squeeze()
            kind = choose(short)
            size, _ = gguf.GGML_QUANT_SIZES[kind]
            if matrix.dim() < 2 or matrix.shape[-1] % max(size, 32):
                kind = Kind.F32
            data = quantized(matrix.contiguous().numpy(), kind)
            writer.add_tensor(short, data, raw_dtype=kind)
    add_values(writer, {f"xielu.{name}": its for name, its in numbers.items()})
    _add_factors(writer, config)
    rope = None if row.makers else config.get("rope_parameters")
    if rope and (its := frequency_factors(model.config)) is not None:
        writer.add_tensor("rope_freqs.weight", its)
    finish(writer)


def _stacked(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of which one has all maps to streams, and one all maps back."""
    names = ("model.altup_projections", "model.altup_unembed_projections")
    maps = {name: [it for at, it in tensors.items() if at.startswith(f"{name}.")] for name in names}
    found = {at: it for at, it in tensors.items() if not at.startswith(names)}
    return found | {f"{name}.weight": torch.stack(its) for name, its in maps.items()}


def _joined(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of which one has queries, keys and values."""
    found = {name: it for name, it in tensors.items() if not re.search("[kv]_proj", name)}
    for name in [it for it in found if ".q_proj." in it]:
        three = [tensors[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
        del found[name]
        found[name.replace("q_proj", "qkv_proj")] = torch.cat(three)
    return found


def _add_factors(writer: GGUFWriter, config: Config) -> None:
    """Factors of frequencies for short and for long contexts."""
    rope = config.get("rope_parameters") or {}
    full = rope.get("full_attention", {})
    if full.get("rope_type") == "proportional":
        pairs = _gemma4(config)["attention.key_length"] // 2
        own = int(2 * pairs * full["partial_rotary_factor"] / 2)
        factors = torch.tensor([1.0] * own + [1e30] * (pairs - own))
        writer.add_tensor("rope_freqs.weight", factors.numpy())
    for kind in ("long", "short"):
        if f"{kind}_factor" in rope:
            factors = torch.tensor(rope[f"{kind}_factor"]).numpy()
            writer.add_tensor(f"rope_factors_{kind}.weight", factors)
