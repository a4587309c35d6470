# SPDX-License-Identifier: Apache-2.0
"""The one reader of config.json: presets, model directories and GGUF files all pass through here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pagoda.checkpoints.config_keys import refuse_other_arithmetic
from pagoda.checkpoints.contents import tensor_names
from pagoda.checkpoints.families import FAMILIES
from pagoda.checkpoints.families.shared import score_head
from pagoda.checkpoints.family import Family
from pagoda.checkpoints.fields import Fields, three_nearest
from pagoda.checkpoints.model_spec import (
    Activation,
    AttentionSpec,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    NormSpec,
)
from pagoda.checkpoints.quantization_config import parse_quantization
from pagoda.checkpoints.refused import REFUSED
from pagoda.checkpoints.rope import longest_sequence, parse_rope, rope_table
from pagoda.checkpoints.sentence_modules import SentenceModule, read_modules, score_tokens
from pagoda.checkpoints.tensor_names import HF_NAMES, with_joined_experts
from pagoda.errors import ConfigError
from pagoda.files import read_object

_BARE, _WITH_HEAD, _SCORES = "Model", "ForCausalLM", "ForSequenceClassification"
"""Endings of the names of architectures."""
_COMMON = (
    "tie_word_embeddings",
    "dtype",
    "torch_dtype",
    "quantization_config",
    "compression_config",
)
"""Fields that stand beside `text_config`, or within."""
_MAX_LAYERS = 4096
"""Layers of a model: each is an object, of which a wrong number must not fill memory."""
_FOLLOWING = ("head_dim", "num_key_value_heads")
"""Sizes that follow from others where they are null; a family has its own where they are absent."""
_MAX_HEADS = _MAX_HEAD_DIM = 65_536
DTYPES = ("float32", "bfloat16", "float16")

_ACTIVATIONS: Mapping[Activation, tuple[str, ...]] = {
    "silu": ("silu", "swish"),
    "gelu_tanh": ("gelu_pytorch_tanh", "gelu_new", "gelu_fast"),
    "gelu": ("gelu",),
    "relu": ("relu",),
    "relu2": ("relu2",),
    "xielu": ("xielu",),
}
"""Names of activations in files."""


def read_model_config(
    directory: Path, modules: Sequence[SentenceModule] | None = None
) -> ModelSpec:
    """The model that config.json in a directory describes; `modules` are those of `read_modules`, if read already.
    Raises ConfigError: a file is missing, corrupt or describes a model that Pagoda does not run."""
    path = directory / "config.json"
    try:
        values = read_object(path)
    except FileNotFoundError as error:
        raise ConfigError(f"{path} is missing; give a Hugging Face model directory.") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
    spec = parse_model_config(values, source=str(path))
    if _ties_differ(values) and any(directory.glob("*.safetensors")):
        spec = replace(spec, tie_word_embeddings=not _has_head(directory))
    if spec.family.joins_experts and any(directory.glob("*.safetensors")):
        joined = with_joined_experts(spec.names)
        if any(name.endswith(joined.expert_down) for name in tensor_names(directory)):
            spec = replace(spec, names=joined)
    modules = read_modules(directory) if modules is None else modules
    tokens = score_tokens(directory, modules)
    if tokens is not None and max(tokens.yes, tokens.no or 0) >= spec.vocab_size:
        raise ConfigError(
            f"{directory}: LogitScore names tokens beyond the model's vocabulary of {spec.vocab_size}."
        )
    # sentence-transformers writes decoders without their heads (Qwen3-Embedding-8B).
    if modules and not spec.tie_word_embeddings and not _has_head(directory):
        spec = replace(spec, headless=True, tie_word_embeddings=True)
    return replace(spec, score_tokens=tokens)


def _ties_differ(values: Mapping[str, object]) -> bool:
    """True of a model that sees or hears whose head is tied by one flag of its file, and not by the other.

    transformers 5 writes so of Mistral Small 3.1, whose head is its own, and takes a head that differs."""
    text, name = values.get("text_config"), "tie_word_embeddings"
    flags = [part.get(name) for part in (values, text) if isinstance(part, Mapping)]
    return True in flags and False in flags


def _has_head(directory: Path) -> bool:
    return any(name.startswith(HF_NAMES.head) for name in tensor_names(directory))


def _gives_score(values: Mapping[str, object]) -> bool:
    named = values.get("architectures")
    return isinstance(named, list) and any(str(name).endswith(_SCORES) for name in named[:1])


def parse_model_config(values: Mapping[str, object], *, source: str) -> ModelSpec:
    """Checks the content of a config.json; `source` names the file in errors."""
    fields, family, is_bare = _text_part(Fields(values, source))
    silent = {
        key
        for key in family.defaults
        if key not in fields or (fields.values[key] is None and key not in _FOLLOWING)
    }
    if rope_table(fields) is not None:
        silent.discard("rope_parameters")
    fields = fields.updated({key: family.defaults[key] for key in silent})
    renamed = {
        usual: fields.values[own]
        for own, usual in family.renamed.items()
        if fields.values.get(own) is not None
    }
    fields = fields.updated(renamed)
    fields = fields.updated(family.values(fields))
    activation = _activation(fields, family)
    refuse_other_arithmetic(fields, family.own_keys)
    hidden_size = fields.positive("hidden_size")
    num_layers = fields.positive("num_hidden_layers", most=_MAX_LAYERS)
    num_heads = fields.positive("num_attention_heads", most=_MAX_HEADS)
    num_kv_heads = fields.positive("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        fields.refuse("num_key_value_heads", f"must divide num_attention_heads ({num_heads})")
    head_dim = fields.positive("head_dim", max(1, hidden_size // num_heads), most=_MAX_HEAD_DIM)
    if head_dim % 2:
        fields.refuse("head_dim", "must be even")
    rotary = parse_rope(fields, head_dim, family.partial_rotary)
    attention_bias = fields.flag("attention_bias", False)
    layer = LayerSpec(
        AttentionSpec(scale=head_dim**-0.5, qkv_bias=attention_bias, output_bias=attention_bias),
        MlpSpec(fields.positive("intermediate_size"), activation=activation, gated=family.gated),
    )
    shared = ModelSpec(
        family=family,
        names=family.names,
        vocab_size=fields.positive("vocab_size"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        layers=(layer,) * num_layers,
        norm=NormSpec(fields.number("rms_norm_eps", 1e-6)),
        rotary={"default": rotary},
        max_position_embeddings=longest_sequence(fields, rotary.scaling),
        tie_word_embeddings=fields.flag("tie_word_embeddings", False) or is_bare,
        dtype=_dtype(fields),
        quantization=parse_quantization(fields),
    )
    spec = family.adapt(shared, fields)
    scores = spec.encoder is None and _gives_score(fields.values)
    return score_head(spec, fields, "score") if scores else spec


def _text_part(fields: Fields) -> tuple[Fields, Family, bool]:
    """The fields of the decoder, its family, and whether it is a decoder alone; see `_family`.

    Models that see or hear have their decoder's fields in `text_config`, and some of the common ones beside it.
    """
    text = fields.table("text_config")
    if text is None:
        return fields, *_family(fields)
    common = {name: fields.values[name] for name in _COMMON if fields.values.get(name) is not None}
    by_kind = {kind: family for family in FAMILIES.values() for kind in family.model_types}
    kind = text.text("model_type", "")
    if kind not in by_kind:
        near = three_nearest(kind, {it: it for it in by_kind})
        text.refuse("model_type", f"is none that Pagoda runs, the nearest of which are {near}")
    family = by_kind[kind]
    values = {**family.model_types[kind], **text.values, **common}
    return Fields(values, fields.source, "text_config."), family, False


def _family(fields: Fields) -> tuple[Family, bool]:
    """The family of a model, and whether it is a decoder alone (`Qwen3Model`), which has no head: embedding models
    are published so. Its embedding table is the head then."""
    named = fields.values.get("architectures")
    if not isinstance(named, list) or not named:
        raise ConfigError(
            f'{fields.source} names no architectures; it must have a list such as ["LlamaForCausalLM"].'
        )
    others: dict[str, Family] = {}
    for name in filter(lambda it: isinstance(it, str), named):
        bare = f"{name.removesuffix(_BARE)}{_WITH_HEAD}"
        scores = f"{name.removesuffix(_SCORES)}{_WITH_HEAD}"
        if name in FAMILIES:
            return FAMILIES[name], False
        if name.endswith(_BARE) and bare in FAMILIES:
            return FAMILIES[bare], True
        if name.endswith(_SCORES) and scores in FAMILIES:
            return FAMILIES[scores], False
        # Other names are told by the families themselves, all of which are imported for that.
        others = others or {it: family for family in FAMILIES.values() for it in family.aliases}
        if name in others:
            return others[name], False
    if (refusal := REFUSED.get(str(named[0]))) is not None:
        raise ConfigError(
            f"{fields.source}: {named[0]} {refusal.reason}, which Pagoda does not compute; "
            f"the nearest that it serves is {refusal.nearest}."
        )
    near = three_nearest(_stem(str(named[0])), {_stem(name): name for name in FAMILIES})
    raise ConfigError(
        f"{fields.source}: architecture {named[0]!r} is not supported; the nearest that are supported are {near}."
    )


def _stem(architecture: str) -> str:
    """Name of an architecture without what all of them end with."""
    for ending in (_WITH_HEAD, _SCORES, "ForConditionalGeneration", _BARE):
        architecture = architecture.removesuffix(ending)
    return architecture


def _activation(fields: Fields, family: Family) -> Activation:
    """The activation that the file names, one of the family's."""
    known = [family.activation, *sorted(family.other_activations)]
    found = family.activation
    for name in ("hidden_act", "hidden_activation"):
        if fields.values.get(name) is None:
            continue
        spelled = fields.text(name)
        named = [it for it in known if spelled in _ACTIVATIONS[it]]
        if not named:
            names = " or ".join(repr(_ACTIVATIONS[it][0]) for it in known)
            fields.refuse(name, f"must be {names}")
        found = named[0]
    return found


def _dtype(fields: Fields) -> str:
    name = "dtype" if fields.values.get("dtype") is not None else "torch_dtype"
    dtype = fields.text(name, "float32").removeprefix("torch.")
    if dtype not in DTYPES:
        fields.refuse(name, f"must be one of {', '.join(DTYPES)}")
    return dtype
