# SPDX-License-Identifier: Apache-2.0
"""The one reader of config.json: presets, model directories and GGUF files all pass through here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pagoda.checkpoints.checkpoint import weight_files
from pagoda.checkpoints.config_keys import refuse_other_arithmetic
from pagoda.checkpoints.contents import tensor_names
from pagoda.checkpoints.families import FAMILIES
from pagoda.checkpoints.families.shared import (
    both_ways,
    decoder_head,
    with_head,
    with_masked_head,
)
from pagoda.checkpoints.family import Family
from pagoda.checkpoints.fields import Fields, three_nearest
from pagoda.checkpoints.layer_spec import Activation, AttentionSpec, LayerSpec, MlpSpec, NormSpec
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.pooling_spec import ClassifierSpec, VectorKind, VectorMap
from pagoda.checkpoints.quantization_config import parse_quantization
from pagoda.checkpoints.refused import REFUSED
from pagoda.checkpoints.rope import longest_sequence, parse_rope, rope_table
from pagoda.checkpoints.safetensors_header import read_header
from pagoda.checkpoints.sentence_modules import (
    COLBERT_MAP,
    SPARSE_MAP,
    SentenceModule,
    dense_modules,
    lexical_maps,
    read_modules,
    score_tokens,
)
from pagoda.checkpoints.tensor_names import HF_NAMES, with_apart_experts, with_joined_experts
from pagoda.checkpoints.text_encoder import TextEncoderSpec
from pagoda.errors import ConfigError
from pagoda.files import read_object

_BARE, _WITH_HEAD, _OLD_HEAD = "Model", "ForCausalLM", "LMHeadModel"
_SCORES, _OF_TOKENS = "ForSequenceClassification", "ForTokenClassification"
_REWARDS, _ENDINGS = "RewardModel", ("ForProcessRewardModel", "ForRewardModel")
"""Endings of the names of architectures."""
_BESIDE = {
    "hf_quant_config.json": "modelopt",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
}
"""Files that say how older checkpoints are quantized, with their `quant_method`."""
_COLBERT, _VOYAGE, _COLBERT_MAP = "ColBERT", "VoyageQwen3", "linear"
"""Parts of the names of encoders that give vectors of tokens, or of texts, and the map that makes them."""
_ANY_ENCODER = "HF_ColBERT"
"""Class of Stanford's ColBERT, around an encoder that `model_type` tells."""
_ENCODERS = {"bert": "BertModel", "roberta": "RobertaModel", "xlm-roberta": "XLMRobertaModel"}
_MAPPED: tuple[VectorKind, ...] = ("token_vectors", "vectors")
_SPLADE = "SpladePooling"
_BOTH_WAYS = "Bidirectional"
"""Part of the names of decoders that see all of a text (LlamaBidirectionalModel)."""
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
    "gelu": ("gelu", "gelu_python"),
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
        if not any(values.get(name) for name in ("quantization_config", "compression_config")):
            for beside, method in _BESIDE.items():
                if (directory / beside).is_file():
                    said = read_object(directory / beside)
                    values["quantization_config"] = {"quant_method": method, **said}
                    break
    except FileNotFoundError as error:
        raise ConfigError(f"{path} is missing; give a Hugging Face model directory.") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
    spec = parse_model_config(values, source=str(path))
    # transformers 5 calls the heads of all T5 tied, and takes one that a file has.
    is_doubtful = _ties_differ(values) or isinstance(spec.cross_encoder, TextEncoderSpec)
    if is_doubtful and any(directory.glob("*.safetensors")):
        spec = replace(spec, tie_word_embeddings=not _has_head(directory))
        if spec.names.head_bias:
            spec = replace(spec, head_bias=spec.names.head_bias in tensor_names(directory))
    spec = _with_experts_as_stored(spec, directory)
    modules = read_modules(directory) if modules is None else modules
    tokens = score_tokens(directory, modules)
    if tokens is not None and max(tokens.yes, tokens.no or 0) >= spec.vocab_size:
        raise ConfigError(
            f"{directory}: LogitScore names tokens beyond the model's vocabulary of {spec.vocab_size}."
        )
    spec = _with_vectors(spec, directory, modules)
    # sentence-transformers writes decoders without their heads (Qwen3-Embedding-8B).
    if modules and not spec.tie_word_embeddings and not _has_head(directory):
        spec = replace(spec, headless=True, tie_word_embeddings=True)
    return replace(spec, score_tokens=tokens)


def _with_experts_as_stored(spec: ModelSpec, directory: Path) -> ModelSpec:
    """The model with the names of its experts' tensors, which some files have joined and others apart; joined ones
    of Qwen3-VL have outputs first where transformers 5 wrote them."""
    names, experts, may_join = spec.names, spec.experts, spec.family.joins_experts
    is_joined = names.expert_layout in ("bare", "transposed")
    if experts is None or not (is_joined or may_join):
        return spec
    if not any(directory.glob("*.safetensors")):
        return spec
    joined = names if is_joined else with_joined_experts(names)
    if not any(name.endswith(joined.expert_down) for name in tensor_names(directory)):
        return replace(spec, names=with_apart_experts(names) if is_joined else names)
    if may_join and joined.expert_layout == "transposed":
        shape = _shape_of(directory, joined.expert_down)
        if shape[1:] == (spec.hidden_size, experts.intermediate_size):
            joined = replace(joined, expert_layout="bare")
    return replace(spec, names=joined)


def _shape_of(directory: Path, ending: str) -> tuple[int, ...]:
    """Shape of the first tensor in a directory whose name ends so."""
    for path in weight_files(directory):
        for name, entry in read_header(path)[0].items():
            if name.endswith(ending):
                return entry.shape
    return ()


def _with_vectors(spec: ModelSpec, directory: Path, modules: Sequence[SentenceModule]) -> ModelSpec:
    """The model with the layers behind its hidden states that the directory has.
    Raises ConfigError: they are not there, or the family has no such layers."""
    maps, hidden = dict(spec.vector_maps), spec.hidden_size
    kinds = {module.kind for module in modules}
    dense = tuple(it.map for it in dense_modules(directory, modules))
    if dense:
        maps["vectors" if "Pooling" in kinds else "token_vectors"] = dense
    else:
        maps |= {kind: (_map_of_vectors(directory, hidden),) for kind in _MAPPED if kind in maps}
    beside = lexical_maps(directory)
    if COLBERT_MAP in beside:
        maps["token_vectors"] = (VectorMap(COLBERT_MAP, hidden, hidden, bias=True),)
    if SPARSE_MAP in beside:
        maps["token_weights"] = (VectorMap(SPARSE_MAP, hidden, 1, bias=True, activation="relu"),)
    spec = replace(spec, vector_maps=maps)
    if _SPLADE not in kinds:
        return spec
    with_masked = with_masked_head(spec)
    if with_masked is None:
        raise ConfigError(
            f"{directory}: modules.json has {_SPLADE}, and {spec.family.architecture} no head of tokens for it."
        )
    return with_masked


def _map_of_vectors(directory: Path, hidden_size: int) -> VectorMap:
    """The map of hidden states to vectors of tokens, whose size config.json does not say."""
    name = f"{_COLBERT_MAP}.weight"
    for path in weight_files(directory):
        entry = read_header(path)[0].get(name)
        if entry is not None:
            return VectorMap(_COLBERT_MAP, hidden_size, entry.shape[0])
    raise ConfigError(f"{directory}: no file holds the tensor {name}, which config.json calls for.")


def _ties_differ(values: Mapping[str, object]) -> bool:
    """True of a model that sees or hears whose head is tied by one flag of its file, and not by the other.

    transformers 5 writes so of Mistral Small 3.1, whose head is its own, and takes a head that differs."""
    text, name = values.get("text_config"), "tie_word_embeddings"
    flags = [part.get(name) for part in (values, text) if isinstance(part, Mapping)]
    return True in flags and False in flags


def _has_head(directory: Path) -> bool:
    return any(name.startswith(HF_NAMES.head) for name in tensor_names(directory))


def _sees_all(fields: Fields) -> bool:
    """True of a decoder that was trained to see all of a text."""
    named = fields.values.get("architectures")
    names = named if isinstance(named, list) else []
    return not fields.flag("is_causal", True) or any(_BOTH_WAYS in str(name) for name in names)


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
    if "num_hidden_layers" in fields:  # which families count through
        fields.positive("num_hidden_layers", most=_MAX_LAYERS)
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
    if spec.encoder is None and _sees_all(fields):
        if any(layer.kv_kind not in ("full", "window") for layer in spec.layers):
            fields.refuse(
                "is_causal", "must be true of a model whose layers keep states or latents"
            )
        spec = both_ways(spec)
    spec = _with_named_vectors(spec, fields)
    head = None if spec.classifier is not None else _head(spec, fields)
    return spec if head is None else with_head(spec, fields, head)


def _with_named_vectors(spec: ModelSpec, fields: Fields) -> ModelSpec:
    """The model with the layers behind hidden states that its architecture is named after."""
    named = fields.values.get("architectures")
    names = " ".join(map(str, named)) if isinstance(named, list) else ""
    usual = VectorMap(_COLBERT_MAP, spec.hidden_size, spec.hidden_size)
    if _COLBERT in names:
        spec = replace(spec, vector_maps={"token_vectors": (usual,)})
    if _VOYAGE in names:
        spec = replace(spec, vector_maps={"vectors": (usual,)})
    return (with_masked_head(spec) or spec) if "Splade" in names else spec


def _head(spec: ModelSpec, fields: Fields) -> ClassifierSpec | None:
    """The head that the architecture's name says a model has, in place of one that gives logits."""
    named = fields.values.get("architectures")
    name = str(named[0]) if isinstance(named, list) and named else ""
    family = spec.family
    if name == family.architecture or name in family.aliases:
        return None
    for ending, make in family.heads.items():
        if name.endswith(ending):
            return make(fields)
    if not name.endswith((_SCORES, _OF_TOKENS)):
        return None
    head = decoder_head(spec, fields)
    return replace(head, bias=True, pooling="all") if name.endswith(_OF_TOKENS) else head


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
    spelled = [it for it in named if isinstance(it, str)]
    if _ANY_ENCODER in spelled:
        spelled = [_encoder_within(fields)]
    for name in dict.fromkeys([*spelled, *(it.replace(_BOTH_WAYS, "") for it in spelled)]):
        bare = f"{name.removesuffix(_BARE)}{_WITH_HEAD}"
        stem = _stem(name)
        if name in FAMILIES:
            return FAMILIES[name], False
        if name.endswith(_BARE) and bare in FAMILIES:
            return FAMILIES[bare], True
        for ending in (_WITH_HEAD, _OLD_HEAD):
            decoder = f"{stem}{ending}"
            if name.endswith((_SCORES, _OF_TOKENS, _REWARDS)) and decoder in FAMILIES:
                return FAMILIES[decoder], False
        # Other names are told by the families themselves, all of which are imported for that.
        others = others or {it: family for family in FAMILIES.values() for it in family.aliases}
        encoder = f"{stem}{_BARE}"
        if name in others or encoder in others:
            return others.get(name) or others[encoder], False
        if encoder in FAMILIES:
            return FAMILIES[encoder], False
    if (refusal := REFUSED.get(str(named[0]))) is not None:
        raise ConfigError(
            f"{fields.source}: {named[0]} {refusal.reason}, which Pagoda does not compute; "
            f"the nearest that it serves is {refusal.nearest}."
        )
    near = three_nearest(_stem(str(named[0])), {_stem(name): name for name in FAMILIES})
    raise ConfigError(
        f"{fields.source}: architecture {named[0]!r} is not supported; the nearest that are supported are {near}."
    )


def _encoder_within(fields: Fields) -> str:
    """The encoder of a file that names Stanford's class, one whose positions rotate vectors being Jina's."""
    kind = fields.text("model_type", "bert")
    if kind not in _ENCODERS:
        fields.refuse("model_type", f"must be one of {', '.join(_ENCODERS)} of {_ANY_ENCODER}")
    if kind == "xlm-roberta" and fields.values.get("position_embedding_type") == "rotary":
        fields.number("rotary_emb_base")
        return "JinaEmbeddingsV3Model"
    return _ENCODERS[kind]


def _stem(architecture: str) -> str:
    """Name of an architecture without what all of them end with."""
    for ending in (*_ENDINGS, _WITH_HEAD, _SCORES, _OF_TOKENS, "ForConditionalGeneration", _BARE):
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
