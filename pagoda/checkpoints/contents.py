# SPDX-License-Identifier: Apache-2.0
"""Names of the tensors in a model's files, compared with those that its specification calls for."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

from pagoda.checkpoints.checkpoint import INDEX_FILE, read_index, weight_files
from pagoda.checkpoints.distances import Disentangled, distance_linears, distance_tensors
from pagoda.checkpoints.layer_spec import MlpSpec
from pagoda.checkpoints.linears import LinearRole, LinearSpec
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.safetensors_header import read_header
from pagoda.checkpoints.sentence_modules import dense_modules, lexical_maps, read_modules
from pagoda.checkpoints.tensor_names import TEXT_PARTS
from pagoda.errors import ConfigError

_DECODER = "model."
_TOKEN_MAP = "linear."
"""Beginning of the names of the map that makes vectors of tokens (ColBERT)."""
_HEAD = "lm_head."
_TRANSFORMER = "transformer."
"""Beginning of names in files of GPT-2's kind, which are left out in some of them."""
_ENCODERS = (
    *("bert.", "roberta.", "distilbert.", "electra.", "mpnet.", "deberta.", "ernie."),
    *("nomic_bert.", "new.", "gte."),
)
"""Beginnings of names in files of an encoder that has a head."""
_OLD_NORMS = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
"""Names of norms in files that were made from TensorFlow's."""
_BARE = (
    *("embed_tokens.weight", "decoder.embed_tokens.weight", "embeddings.tok_embeddings.weight"),
    "fc.weight",
)
"""Tensors in files of a decoder alone: its embedding table, or the first map of an EAGLE-3 head."""
_EAGLE_LAYER = "midlayer."
"""Beginning of names in an EAGLE-3 head's only layer, which others call its first."""
_WEIGHTS = (".weight", ".qweight", ".weight_packed", ".B")
"""Ends of the names of a linear layer's weight, plain, by AWQ and GPTQ, by compressed-tensors, and by Marlin."""
_PARTS = frozenset(
    {"qweight", "qzeros", "scales", "g_idx", "weight_packed", "weight_scale", "weight_scale_inv"}
    | {"weight_zero_point", "weight_g_idx", "weight_shape", "input_scale", "output_scale"}
    | {"activation_scale", "input_zero_point", "weight_global_scale", "input_global_scale"}
    | {"input_scale_ub", "output_zero_point"}
    | {"weight_scale_2", "SCB", "weight_format", "s", "workspace", "absmax", "quant_map"}
    | {"nested_absmax", "nested_quant_map", "bitsandbytes__nf4", "bitsandbytes__fp4"}
)
"""Ends of the names of what a linear layer's weight is rounded to, and of its inputs' scales."""
_JOINED_PART = re.compile(r"_(scales|scale_inv|((weight|input|activation)_)?scale)$")
"""Ends of the names of scales of tensors that hold all experts."""
_FOLLOWING = re.compile(
    r"(rotary_emb\.inv_freq|attn_rot_embd\.weight"
    r"|(attn|mixer|_proj)\.([qkv]|kv|prob_output)_scale|(attn|mixer|_proj)\.[kv]_zero_point"
    r"|self_attn\.(slope_rate|(query|key|diagonal)_decay)|(attn|attention)\.(masked_)?bias"
    r"|feed_forward_ve\.w[123]\.weight|EncDecAttention\.relative_attention_bias\.weight)$"
)
"""Frequencies and rates that follow from the configuration, scales of KV caches in the files' own format, masks,
MLPs of tokens of pictures (Mono-InternVL), and distances from texts, which nobody reads (T5)."""
_NUMBER = re.compile(r"\.(\d{1,9})(?=\.)")
_BIASED_EXPERTS = (LinearRole.ROUTER, LinearRole.EXPERT_IN, LinearRole.EXPERT_OUT)
"""Linear layers that have biases if experts do."""


def full_names(stored: Collection[str]) -> dict[str, str]:
    """Names in a file by the names that a decoder with its head has.

    Files of a decoder alone (`Qwen3Model`) have them without `model.`, those of models that see or hear have one
    of `TEXT_PARTS` in front or within. The table that an encoder and a decoder share has any of its names.
    """
    bare = [name for name in _BARE if name in stored]
    if bare and any(name.startswith("encoder.") for name in stored):
        bare = [name for name in bare if not name.startswith("decoder.")]
    names = {_full_name(name, bool(bare)): name for name in stored}
    for front in ("", _DECODER):
        table, parts = f"{front}shared.weight", (f"{front}decoder.", f"{front}encoder.")
        others = *(f"{part}embed_tokens.weight" for part in parts), f"{_HEAD}weight"
        found = next((name for name in others if name in names), None)
        has_parts = all(any(name.startswith(part) for name in names) for part in parts)
        if found is not None and has_parts and table not in names:
            names[table] = names[found]
            if found == others[-1]:
                del names[found]
    return names


def _full_name(stored: str, is_bare: bool) -> str:
    for encoder in _ENCODERS:
        if stored.startswith(encoder):
            stored = stored.removeprefix(encoder)
            for old, new in _OLD_NORMS.items():
                stored = stored.replace(old, new)
            return stored.removeprefix(_TRANSFORMER)
    stored = stored.removeprefix(_TRANSFORMER)
    if stored.startswith(_EAGLE_LAYER):
        stored = f"layers.0.{stored.removeprefix(_EAGLE_LAYER)}"
    if is_bare and not stored.startswith((_HEAD, _DECODER, _TOKEN_MAP)):
        return f"{_DECODER}{stored}"
    for part in TEXT_PARTS:
        if stored.startswith(f"{_DECODER}{part}"):
            return f"{_DECODER}{stored.removeprefix(_DECODER + part)}"
        if stored.startswith(part):
            return stored.removeprefix(part)
    return stored


def tensor_names(directory: Path) -> Collection[str]:
    """Full names of the tensors in a model directory. Raises ConfigError: a file is missing or damaged."""
    index = directory / INDEX_FILE
    if index.exists():
        names = full_names(read_index(index)).keys()
    else:
        (path,) = weight_files(directory)
        names = full_names(read_header(path)[0].keys()).keys()
    dense = dense_modules(directory, read_modules(directory))
    maps = [*lexical_maps(directory), *(it.map.name for it in dense if it.file.is_file())]
    return names | {f"{it}.{end}" for it in maps for end in ("weight", "bias")}


def missing_tensor(spec: ModelSpec, names: Collection[str]) -> str | None:
    """The first tensor that the model needs and that is not among `names`; None if all are there."""
    for choices in _needed(spec):
        if not any(name in names for name in choices):
            return choices[0]
    return None


def unread_tensors(spec: ModelSpec, names: Iterable[str]) -> Iterator[str]:
    """Names among `names`, of tensors of the model's layers that it is not computed with.

    Layers behind the model's own predict several tokens at once, and have none. Takes time by the number of names,
    however many layers and experts the model should have."""
    layer = re.compile(rf"{re.escape(spec.names.layers)}\.(\d{{1,9}})\.")
    by_layer: dict[int, list[str]] = {}
    for name in names:
        within = layer.match(name)
        if within is not None:
            by_layer.setdefault(int(within[1]), []).append(name)
    layers: dict[int, list[int]] = {}
    for index in range(spec.num_layers):
        number = spec.names.number_of(index)
        for own in {number, number + bool(spec.names.numbers)}:
            layers.setdefault(own, []).append(index)
    for number, named in by_layer.items():
        if number not in layers:
            continue
        read = {
            name
            for index in layers[number]
            for choices in _of_layer(spec, index, _experts(spec, named))
            for name in choices
        }
        linears = {
            name.removesuffix(end) for end in _WEIGHTS for name in read if name.endswith(end)
        }
        linears |= {name.removesuffix("_blocks") for name in read if name.endswith("_blocks")}
        read |= {name for name, _ in distance_tensors(spec)}
        for index in layers[number]:
            if spec.layers[index].attention.kv_layer is not None:
                # Keys and values that nobody reads, as their makers publish them.
                stems = spec.names.key, spec.names.value, spec.names.key_norm
                read |= {f"{spec.names.of_layer(index, stem)}.weight" for stem in stems}
        for name in named:
            stem, _, end = name.rpartition(".")
            # bitsandbytes hangs what a weight needs on the weight's own name.
            stem = stem.removesuffix(".quant_state").removesuffix(".weight")
            is_part = end in _PARTS and stem in linears
            is_part |= _JOINED_PART.sub("", name) in linears
            if name not in read and not is_part and not _FOLLOWING.search(name):
                yield name


def _experts(spec: ModelSpec, names: Iterable[str]) -> list[int]:
    """Experts that the names of tensors may be of; the first one also stands for tensors of all together."""
    if spec.experts is None:
        return []
    numbers = {int(number) for name in names for number in _NUMBER.findall(name)}
    return sorted(number for number in numbers | {0} if number < spec.experts.routing.num_experts)


def no_place(name: str, where: Path, spec: ModelSpec) -> ConfigError:
    """The error about a tensor that a model is not computed with."""
    return ConfigError(
        f"{where}: tensor {name} has no place in the {spec.family.architecture} that config.json calls for."
    )


def _needed(spec: ModelSpec) -> Iterator[list[str]]:
    """Names of each tensor of a model, any one of which will do."""
    experts = range(spec.experts.num_stored if spec.experts else 0)
    for linear in spec.outer_linears:
        if not linear.sinusoidal:
            yield _weight(linear)
    for index in range(spec.num_layers):
        yield from _of_layer(spec, index, experts)
    if spec.cross_encoder is not None:
        for index in range(spec.cross_encoder.encoder.num_layers):
            yield from _of_layer(spec.cross_encoder.encoder, index, ())
    if spec.head_bias:
        yield [spec.names.head_bias or f"{spec.names.head}.bias"]
    for name, _ in spec.map_vectors:
        yield [name]
    for name, _ in spec.embedding_norm_tensors + spec.last_norm_tensors:
        yield [name]
    if spec.embedding_projection is not None:
        yield [f"{spec.embedding_projection.name}.bias"]
    for name, _ in distance_tensors(spec):
        yield [name]
    if spec.draft_head is not None and spec.draft_head.token_offsets:
        yield [spec.draft_head.token_offsets]


def _of_layer(spec: ModelSpec, index: int, experts: Sequence[int]) -> Iterator[list[str]]:
    """Names of each tensor of a layer, with those of some of its experts, any one of which will do."""
    layer = spec.layers[index]
    linears = [*spec.layer_linears(index, experts)]
    for linear in linears:
        yield _weight(linear)
    for name, _ in spec.norm_tensors(index):
        yield [name]
    attention = spec.attention_linears(index)
    biased = [*attention.into] * layer.attention.qkv_bias
    if layer.attention.crosses and layer.attention.qkv_bias:
        biased += spec.plain_linears(index)[1:3]
    biased += [*filter(None, (attention.out,))] * layer.attention.output_bias
    if isinstance(layer.attention.distances, Disentangled):
        for linear in distance_linears(spec, index):
            yield _weight(linear)
            yield [linear.stored.bias]
    if isinstance(layer.mlp, MlpSpec):
        biased += spec.mlp_biases(index)
    elif layer.mlp is not None and layer.mlp.bias:
        biased += [linear for linear in linears if linear.role in _BIASED_EXPERTS]
    for linear in biased:
        if linear.has_bias:
            yield [linear.stored.bias]


def _weight(linear: LinearSpec) -> list[str]:
    stored = linear.stored
    if stored.bare:
        return [stored.weight, f"{stored.tensor}_blocks"]
    return [f"{stored.tensor}{end}" for end in _WEIGHTS]
