# SPDX-License-Identifier: Apache-2.0
"""Tiny models that have the features of a set: kinds of layers, experts, formats of weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import torch
import transformers
from encoder_models import make_encoder
from family_models import FAMILIES as MORE_FAMILIES
from family_models import make_model as make_other_model
from gguf_encoders import save_gguf_encoder
from gguf_models import save_gguf
from head_models import add_tensors, calm, change_config, layer_alone, make_mtp_head
from more_quantized_models import bitsandbytes_format, nvfp4_format
from quantized_models import (
    Format,
    awq_format,
    fp8_format,
    fp8_tensors_format,
    gptq_format,
    int8_format,
    packed_format,
    store_quantized,
)
from safetensors.torch import load_file, save_file
from tiny_models import make_model

import pagoda

_DECODER, _ENCODER = (
    r"(?<!linear_attn\.out)(?<!eh)(?<!input)_proj(_with_mqa)?",
    r"layer\..*(query|key|value|dense)",
)
"""Ends of the names of linear maps."""
_TINY = Path(pagoda.__file__).parent / "checkpoints" / "pagoda_tiny"
"""The model whose tokenizer these models have."""
TOKENIZER = _TINY / "tokenizer.json"
VOCAB = 960
ENDS: list[int] = json.loads((_TINY / "generation_config.json").read_text())["eos_token_id"]
"""Tokens behind answers."""
_SIZES = {
    "vocab_size": VOCAB,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "kv_lora_rank": 64,
    "q_lora_rank": 64,
    "v_head_dim": 32,
    "linear_value_head_dim": 16,
}
"""Sizes that groups and blocks of 32 inputs divide, where a family has them."""
FLAGS = {"int8": "int8", "int4": "int4", "fp8": "fp8"}
"""Weights that are rounded as they are loaded: values of `--quantization`."""
_FILES: dict[str, tuple[Format, ...]] = {
    "W8A8 files": (int8_format(),),
    "W4A16 files": (
        *(packed_format(4, 32, symmetric=False), awq_format(32), gptq_format(4, 32)),
        *(bitsandbytes_format("nf4", nested=True), nvfp4_format()),
    ),
    "FP8 files": (fp8_tensors_format("channel"), fp8_format((32, 32))),
}
"""Checkpoints that are quantized, each format in the layouts that there are."""


_HEADED = {
    "MLA": "deepseek-v3",
    "states": "qwen3-next",
    "expert parallelism": "glm4-moe",
    "GGUF files": "glm4-moe",
}
"""Families with a head that guesses tokens; else MiMo has one."""


def has_head(features: Collection[str]) -> bool:
    """Whether a model has a head that guesses tokens, as those of these kinds never have."""
    return "MTP" in features and not {"windows", "MXFP4 files", "encoders"} & set(features)


def family_of(features: Collection[str]) -> str:
    has_experts = "expert parallelism" in features
    if "MXFP4 files" in features:
        return "gpt-oss"
    if "encoders" in features:
        return "bert"
    if "windows" in features:
        if "GGUF files" in features and has_experts:
            return "gpt-oss"
        if has_experts:
            return "qwen2-moe"
        if "pypto" in features:
            return "qwen3-windowed"
        return "gemma3" if "GGUF files" in features else "qwen2-windowed"
    if has_head(features):
        return next((it for name, it in _HEADED.items() if name in features), "mimo")
    if "states" in features:
        return "qwen3-next" if has_experts else "qwen3.5-dense"
    if "MLA" in features:
        return "deepseek-v3"
    return "qwen3-moe" if has_experts else "qwen3"


def _make(family: str, **more: Any) -> transformers.PreTrainedModel:
    """`more` are values of its configuration."""
    if family == "bert":
        return make_encoder("BertModel")
    if family == "qwen3-windowed":
        windows = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}
        return make_model("qwen3", vocab_size=VOCAB, **windows)
    if family == "mimo":
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
        return make_model("qwen2", **{"vocab_size": VOCAB, **sizes, **more})
    known = MORE_FAMILIES[family][1] if family in MORE_FAMILIES else {"moe_intermediate_size": 0}
    sizes = {name: it for name, it in _SIZES.items() if name == "vocab_size" or known.get(name)}
    if family == "gpt-oss":
        sizes["intermediate_size"] = 64
    if family in ("gpt-oss", "deepseek-v3", "qwen2-moe"):
        sizes["num_hidden_layers"] = 2
    if family == "qwen2-moe":
        sizes |= {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}
    make = make_other_model if family in MORE_FAMILIES else make_model
    return make(family, **sizes | more)


def save_featured(
    features: Collection[str], directory: Path, number: int = 0
) -> transformers.PreTrainedModel:
    """Saves a model with the features in `directory`, a GGUF file as `model.gguf`; sets of other numbers have
    other layouts of a format."""
    family, head, changes = family_of(features), dict[str, torch.Tensor](), dict[str, Any]()
    model = _make(family)
    if has_head(features):
        calm(model)
        layer = _make(family, **layer_alone(family))
        with TemporaryDirectory(dir=directory.parent) as scratch:
            _, head, changes = make_mtp_head(family, model, layer, Path(scratch))
    if "GGUF files" in features:
        directory.mkdir(exist_ok=True)
        if "encoders" in features:
            save_gguf_encoder(model, directory / "model.gguf")
        else:
            save_gguf(model, directory / "model.gguf", _kind_of, head=head)
    elif "MXFP4 files" in features:
        _save_mxfp4(model, directory)
    else:
        layouts = next((it for name, it in _FILES.items() if name in features), ())
        if layouts:
            layout = layouts[number % len(layouts)]
            if {"states", "windows", "encoders"} & set(features):
                layout = _with_others_dense(layouts[0])
            store_quantized(
                model, directory, layout, _ENCODER if "encoders" in features else _DECODER, head
            )
        else:
            model.save_pretrained(directory)
            add_tensors(directory, head)
        change_config(directory, changes)
    for name in ("tokenizer.json", "generation_config.json"):
        shutil.copy(_TINY / name, directory)
    return model


def _with_others_dense(how: Format) -> Format:
    """The format, with maps around states and gates as they were; published files leave them so, too."""
    config = how.quantization_config
    ignored = {"ignore": [*config["ignore"], "re:.*linear_attn.*", "re:.*_gate$", "re:pooler.*"]}
    return replace(how, quantization_config=config | ignored, top={})


def _kind_of(name: str) -> gguf.GGMLQuantizationType:
    """Blocks of 32, but for maps of narrow heads and for routers."""
    kinds = gguf.GGMLQuantizationType
    return (
        kinds.F32 if "attn_k_b" in name or "ffn_gate_inp" in name or "ssm" in name else kinds.Q8_0
    )


def _save_mxfp4(model: transformers.PreTrainedModel, directory: Path) -> None:
    """Writes a gpt-oss as its makers do, its experts in blocks of 4-bit floats."""
    model.save_pretrained(directory)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith("_proj") and "experts" in name]:
        rows = tensors.pop(name).transpose(1, 2).contiguous()
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = packed_mxfp4(rows)
    save_file(tensors, path)
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    modules = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": modules}
    (directory / "config.json").write_text(json.dumps(config))


def packed_mxfp4(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [..., in] as blocks [..., in / 32, 16] and exponents [..., in / 32]."""
    octets = torch.from_numpy(gguf.quantize(rows.numpy(), gguf.GGMLQuantizationType.MXFP4))
    blocks = octets.view(*rows.shape[:-1], -1, 17)
    halves = blocks[..., 1:]
    codes = torch.cat((halves & 15, halves >> 4), dim=-1).unflatten(-1, (16, 2))
    return codes[..., 0] | codes[..., 1] << 4, blocks[..., 0].contiguous()
