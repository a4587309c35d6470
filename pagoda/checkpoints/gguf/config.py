# SPDX-License-Identifier: Apache-2.0
"""The model in a GGUF file: its metadata in the words of config.json, and what only tensors say."""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from pagoda.checkpoints import lattices
from pagoda.checkpoints.config_json import parse_model_config
from pagoda.checkpoints.contents import unread_tensors
from pagoda.checkpoints.draft_heads import head_behind
from pagoda.checkpoints.families import gguf_families
from pagoda.checkpoints.family import Family, GgufFormat
from pagoda.checkpoints.fields import Fields, three_nearest
from pagoda.checkpoints.gguf.reader import BlockType, GgufFile, GgufTensor
from pagoda.checkpoints.lattices import Lattice
from pagoda.checkpoints.layer_inputs import GGUF_BESIDE
from pagoda.checkpoints.layer_spec import LayerSpec, MlpSpec
from pagoda.checkpoints.linears import LinearRole, LinearSpec
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.pooling_spec import VectorMap
from pagoda.checkpoints.rope import FrequencyFactors, LongRopeScaling
from pagoda.checkpoints.tensor_names import GGUF_NAMES, TensorNames
from pagoda.checkpoints.weight_formats import (
    IQ1_CODEBOOK,
    IQ2_CODEBOOK,
    IQ3_S_CODEBOOK,
    IQ3_XXS_CODEBOOK,
    IQ4_CODEBOOK,
    MXFP4,
    NVFP4,
    TERNARY,
    TERNARY_CODEBOOK,
    BlockFormat,
    DenseFormat,
    WeightFormat,
    part_format,
)
from pagoda.errors import ConfigError
from pagoda.files import open_regular

DTYPE = "bfloat16"
"""Type of activations unless the operator says otherwise: a GGUF file does not name the type of training."""
DENSE = ("F32", "F16", "BF16")
"""Types whose tensors hold plain numbers."""


def _of_points(lattice: Lattice, group_size: int, codebook: tuple[int, ...]) -> BlockFormat:
    """The format of a type whose codes are those of a lattice's points."""
    bits = lattice.level_bits + 1
    return BlockFormat(
        bits, group_size, 256, integer_scales=True, minima=False, codebook=codebook, lattice=lattice
    )


BLOCKS = {
    "Q4_0": BlockFormat(4, 32, 32, integer_scales=False, minima=False),
    "Q8_0": BlockFormat(8, 32, 32, integer_scales=False, minima=False),
    "Q4_1": BlockFormat(4, 32, 32, integer_scales=False, minima=True),
    "Q5_0": BlockFormat(5, 32, 32, integer_scales=False, minima=False),
    "Q5_1": BlockFormat(5, 32, 32, integer_scales=False, minima=True),
    "IQ4_NL": BlockFormat(4, 32, 32, integer_scales=False, minima=False, codebook=IQ4_CODEBOOK),
    "IQ4_XS": BlockFormat(4, 32, 256, integer_scales=True, minima=False, codebook=IQ4_CODEBOOK),
    "MXFP4": MXFP4,
    "NVFP4": replace(NVFP4, block_size=64),
    "Q2_K": BlockFormat(2, 16, 256, integer_scales=True, minima=True),
    "Q3_K": BlockFormat(3, 16, 256, integer_scales=True, minima=False),
    "Q4_K": BlockFormat(4, 32, 256, integer_scales=True, minima=True),
    "Q5_K": BlockFormat(5, 32, 256, integer_scales=True, minima=True),
    "Q6_K": BlockFormat(6, 16, 256, integer_scales=True, minima=False),
    "IQ1_S": _of_points(lattices.IQ1_S, 32, IQ1_CODEBOOK),
    "IQ1_M": _of_points(lattices.IQ1_M, 16, IQ1_CODEBOOK),
    "IQ2_XXS": _of_points(lattices.IQ2_XXS, 32, IQ2_CODEBOOK),
    "IQ2_XS": _of_points(lattices.IQ2_XS, 16, IQ2_CODEBOOK),
    "IQ2_S": _of_points(lattices.IQ2_S, 16, IQ2_CODEBOOK),
    "IQ3_XXS": _of_points(lattices.IQ3_XXS, 32, IQ3_XXS_CODEBOOK),
    "IQ3_S": _of_points(lattices.IQ3_S, 32, IQ3_S_CODEBOOK),
    "TQ1_0": BlockFormat(
        2, 256, 256, integer_scales=False, minima=False, codebook=TERNARY_CODEBOOK, trits=True
    ),
    **dict.fromkeys(("TQ2_0", "I2_S"), TERNARY),
}
"""Formats in memory of quantized types."""

EMBEDDING, HEAD = f"{GGUF_NAMES.embedding}.weight", f"{GGUF_NAMES.head}.weight"
_JOINED, _SECOND_NORM = "attn_qkv", "attn_norm_2"
_LAYER_NORM = "attention.layer_norm_epsilon"
_DENSE_MAPS = ("dense_2", "dense_3")
"""Layers behind pooling, of EmbeddingGemma."""
SCORE = "cls.output"
"""Layer that gives the score of a text; behind `cls`."""
_COUNTED = {
    "type_vocab_size": "token_types.weight",
    "num_labels": f"{SCORE}.weight",
    "vocab_size_per_layer_input": f"{GGUF_BESIDE.table}.weight",
    "laurel_rank": f"blk.0.{GGUF_BESIDE.laurel_in}.weight",
}
"""Keys of config.json that only tensors say, by their rows."""
FREQUENCY_FACTORS = "rope_freqs.weight"
SHORT_FACTORS, LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"
_BESIDE = "xielu."
"""Beginning of keys that do not begin with the architecture."""
_CONV_WIDTH, _SCAN_WIDTH = "shortconv.l_cache", "ssm.conv_kernel"

_COMMON = frozenset(
    {"block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size"}
    | {"attention.head_count", "attention.head_count_kv", "attention.key_length"}
    | {"attention.value_length", "attention.layer_norm_rms_epsilon", "attention.causal"}
    | {"expert_feed_forward_length", "expert_shared_feed_forward_length", "expert_used_count"}
    | {"expert_weights_norm", "rope.dimension_count", "rope.freq_base", "rope.scale_linear"}
    | {"rope.scaling.type", "rope.scaling.factor", "rope.scaling.attn_factor"}
    | {"rope.scaling.original_context_length", "rope.scaling.finetuned"}
    | {"rope.scaling.yarn_log_multiplier", "rope.scaling.yarn_ext_factor"}
    | {"rope.scaling.yarn_attn_factor", "rope.scaling.yarn_beta_fast"}
    | {"rope.scaling.yarn_beta_slow"}
    # These change nothing of what an answer to a text is computed of.
    | {"pooling_type", "rope.dimension_sections", "tensor_data_layout"}
)
"""Keys that files of all families may have; any other only those which name it in `GgufFormat`."""


def gguf_model_config(file: GgufFile) -> ModelSpec:
    """The model that metadata and tensors of a file describe; its tensors have the names of the file.
    Raises ConfigError: the file is not of a model that Pagoda runs."""
    _, form = _family(file)
    config, fields = parse_model_config(config_values(file), source=str(file.path)), _fields(file)
    names = replace(_spelled(form.names, file), numbers=config.names.numbers)
    rotary = config.rotary["default"]
    scaling = rotary.scaling
    if FREQUENCY_FACTORS in file.tensors:
        if scaling is not None:
            raise ConfigError(
                f"{file.path} scales rotary frequencies twice: by {FREQUENCY_FACTORS} and by its metadata."
            )
        scaling = FrequencyFactors(_frequency_factors(file, FREQUENCY_FACTORS, rotary.dim // 2))
    if SHORT_FACTORS in file.tensors:
        scaling = _longrope(file, rotary.dim // 2)

    def with_biases(index: int, layer: LayerSpec) -> LayerSpec:
        def has_bias(*places: str) -> bool:
            """One bias calls for those of the same place, so that none is left out unseen."""
            return any(f"{names.of_layer(index, place)}.bias" in file.tensors for place in places)

        into, out = (names.query, names.key, names.value), names.attention_out
        if layer.state is not None:
            into, out = (names.state_in,) * 3, names.state_out
        attention = replace(layer.attention, qkv_bias=has_bias(*into), output_bias=has_bias(out))
        mlp = layer.mlp
        if isinstance(mlp, MlpSpec):
            mlp = replace(mlp, bias=has_bias(names.gate, names.up, names.down))
        return replace(layer, attention=attention, mlp=mlp)

    classifier, head = config.classifier, config.next_token
    if head is not None:
        within, norm = "nextn.", "shared_head_norm"
        behind = head_behind(names, config.num_layers, within=within, norm=norm)
        head = replace(behind, passes_normed=head.passes_normed)
    dense = tuple(
        VectorMap(
            name, file.tensors[f"{name}.weight"].shape[1], file.tensors[f"{name}.weight"].shape[0]
        )
        for name in _DENSE_MAPS
        if f"{name}.weight" in file.tensors
    )
    spec = replace(
        config.with_layers(with_biases),
        vector_maps={**config.vector_maps, **({"vectors": dense} if dense else {})},
        names=names,
        beside=None if config.beside is None else replace(config.beside, names=GGUF_BESIDE),
        next_token=head,
        classifier=None if classifier is None else replace(classifier, out=SCORE, dense="cls"),
        rotary={**config.rotary, "default": replace(rotary, scaling=scaling)},
        quantization=None if all(map(is_dense, matrices(file))) else GgufQuantization(file),
    )
    _check_tensors(file, spec)
    if spec.experts is not None:
        fields.require("expert_weights_norm", spec.experts.routing.renormalize)
    return spec


def _spelled(names: TensorNames, file: GgufFile) -> TensorNames:
    """Names of a file, which may hold queries, keys and values in one tensor, and gates and ups in one.

    Older files have keys and values of latent vectors in one, too. Falcon's norm of the MLP comes first where
    attention has one of its own."""
    found = {name.rpartition(".")[0].partition(".")[2].partition(".")[2] for name in file.tensors}
    if _JOINED in found and names.query not in found:
        names = replace(names, query=_JOINED, key=_JOINED, value=_JOINED)
    if names.up in found and names.gate not in found:
        names = replace(names, gate=names.up)
    if names.latent_up in found:
        names = replace(names, key_up="", value_up="")
    if _SECOND_NORM in found:
        names = replace(names, attention_norm=_SECOND_NORM, mlp_norm=names.attention_norm)
    return names


def _check_tensors(file: GgufFile, spec: ModelSpec) -> None:
    """Raises ConfigError: a tensor is in no model that Pagoda runs."""
    others = {FREQUENCY_FACTORS, SHORT_FACTORS, LONG_FACTORS}
    others |= {linear.stored.weight for linear in spec.outer_linears}
    others |= {name for name, _ in spec.map_vectors}
    others |= {f"{spec.names.head}.bias"} if spec.head_bias else set()
    others |= {name for name, _ in spec.last_norm_tensors + spec.embedding_norm_tensors}
    num_blocks = _fields(file).positive("block_count")

    def is_in_block(name: str) -> bool:
        layers, _, rest = name.partition(".")
        index = rest.partition(".")[0]
        return layers == spec.names.layers and index.isdecimal() and int(index) < num_blocks

    names = [name for name in file.tensors if not _is_scale(file, name)]
    beside = (name for name in names if name not in others and not is_in_block(name))
    for name in itertools.chain(unread_tensors(spec, names), beside):
        raise ConfigError(
            f"{file.path} has a tensor {name!r}, which is in no model of its kind that Pagoda runs."
        )


def _is_scale(file: GgufFile, name: str) -> bool:
    """True of the scale of a whole matrix of NVFP4, and of that of its inputs, which is worked out anew."""
    stem, _, end = name.rpartition(".")
    matrix = file.tensors.get(f"{stem}.weight")
    return end in ("scale", "input_scale") and matrix is not None and matrix.type.name == "NVFP4"


def scale_of_all(file: GgufFile, tensor: GgufTensor, expert: int) -> float:
    """Factor of all weights of a matrix, or of one expert's, besides the scales of their blocks.
    Raises ConfigError: it is of no use."""
    name = f"{tensor.name.removesuffix('.weight')}.scale"
    if tensor.type.name != "NVFP4" or name not in file.tensors:
        return 1.0
    stored = file.tensor(name)
    count = math.prod(stored.shape)
    if stored.type.name != "F32" or count not in (1, *tensor.shape[:-2]):
        raise ConfigError(
            f"{stored.path}: tensor {name} must have one number of type F32, or one for each expert."
        )
    scale = _numbers(stored, slice(expert, expert + 1) if count > 1 else slice(1))[0]
    # Beyond these float16 has no number of full precision.
    if not 2.0**-21 <= scale <= 2.0**8:
        raise ConfigError(
            f"{stored.path}: tensor {name} holds {scale}, which must be from 2^-21 to 256."
        )
    return scale


def _numbers(tensor: GgufTensor, own: slice = slice(None)) -> tuple[float, ...]:
    """Numbers of a tensor of type F32, all of them or a part."""
    places = range(tensor.num_bytes // 4)[own]
    with open(tensor.path, "rb", opener=open_regular) as opened:
        opened.seek(tensor.start + 4 * places.start)
        return struct.unpack(f"<{len(places)}f", opened.read(4 * len(places)))


def _longrope(file: GgufFile, count: int) -> LongRopeScaling:
    scaling = _fields(file).below("rope.scaling.")
    factor = scaling.number("attn_factor", 1.0)
    return LongRopeScaling(
        short_factors=_frequency_factors(file, SHORT_FACTORS, count),
        long_factors=_frequency_factors(file, LONG_FACTORS, count),
        original_max_position_embeddings=scaling.positive("original_context_length"),
        attention_factor=factor,
        short_attention_factor=factor,
    )


def _frequency_factors(file: GgufFile, name: str, count: int) -> tuple[float, ...]:
    """Divisors of frequencies in the tensor `name`."""
    tensor = checked_tensor(file, name, (count,))
    if tensor.type.name != "F32":
        raise ConfigError(f"{file.path}: tensor {name} must be of type F32.")
    factors = _numbers(tensor)
    if not all(0 < factor < math.inf for factor in factors):
        raise ConfigError(f"{file.path}: tensor {name} must hold positive numbers.")
    return factors


@dataclass(frozen=True)
class GgufQuantization:
    """Formats of the matrices of a file in memory."""

    file: GgufFile

    @property
    def summary(self) -> str:
        used = {tensor.type.name for tensor in matrices(self.file) if not is_dense(tensor)}
        return f"GGUF {', '.join(sorted(used))} weights"

    def format_of(self, linear: LinearSpec) -> WeightFormat:
        """Raises ConfigError if the file has no such linear layer."""
        if linear.role is LinearRole.LATENT_HEADS or linear.unit is not None:
            return DenseFormat()
        stored = self.file.tensor(f"{linear.stored.tensor}.weight")
        held, fill = stored_format(stored.type), linear.fill
        if fill is not None and linear.role is LinearRole.ATTENTION_OUT:
            one = math.gcd(fill.stored_dim, fill.dim)
            return _cut(stored, fill.stored_heads * fill.stored_dim, one)
        if linear.role is not LinearRole.STATE_OUT or linear.value_order is None:
            return held
        # Its heads are brought into another order.
        return _cut(stored, linear.inputs, linear.inputs // len(linear.value_order))


def _cut(stored: GgufTensor, inputs: int, size: int) -> WeightFormat:
    """Format in memory of a matrix whose inputs are cut into parts of `size`, those of a head or of a part of it.
    Raises ConfigError: the matrix cannot be cut so."""
    cut = part_format(stored_format(stored.type), inputs, range(size))
    if cut is None:
        raise ConfigError(
            f"{stored.path}: tensor {stored.name} is of type {stored.type.name}, "
            "whose blocks are not those of one head."
        )
    return cut


def matrices(file: GgufFile) -> Iterator[GgufTensor]:
    return (tensor for tensor in file.tensors.values() if len(tensor.shape) > 1)


def is_dense(tensor: GgufTensor) -> bool:
    return tensor.type.name in DENSE


def stored_format(block: BlockType) -> WeightFormat:
    """Format in memory of a matrix that a file holds in blocks of one type."""
    if block.name in DENSE:
        return DenseFormat()
    return BLOCKS[block.name]


def checked_tensor(file: GgufFile, name: str, shape: tuple[int, ...]) -> GgufTensor:
    """The tensor `name` of a file. Raises ConfigError if the file has no such tensor, or one of another shape."""
    tensor = file.tensor(name)
    if tensor.shape != shape:
        raise ConfigError(
            f"{tensor.path}: tensor {name} has shape {list(tensor.shape)}, "
            f"the metadata calls for {list(shape)}."
        )
    return tensor


def config_values(file: GgufFile) -> dict[str, object]:
    """Returns the values of an equivalent config.json."""
    family, form = _family(file)
    fields = _fields(file)
    silent = {name: value for name, value in form.usual.items() if not fields.values.get(name)}
    fields = fields.updated(silent)
    told = {**form.values(fields), **form.shown(file.tensors)}
    told |= {name: fields.values[key] for key, name in form.keys.items() if fields.values.get(key)}
    hidden_size = fields.positive("embedding_length")
    num_heads = _num_heads(fields, form)
    values: dict[str, object] = {
        "architectures": [family.architecture],
        "vocab_size": _vocab_size(file, hidden_size),
        "hidden_size": hidden_size,
        "num_hidden_layers": fields.positive("block_count"),
        "num_attention_heads": num_heads,
        "rope_theta": fields.number("rope.freq_base", 10_000.0),
        "rope_scaling": {"rope_type": "default"}
        if SHORT_FACTORS in file.tensors
        else _rope_scaling(fields, form),
        "max_position_embeddings": fields.positive("context_length"),
        "tie_word_embeddings": HEAD not in file.tensors,
        "torch_dtype": DTYPE,
    }
    # Numbers that some families have layer by layer.
    if "intermediate_size" not in told:
        values["intermediate_size"] = _inner_size(fields, family)
    if "num_key_value_heads" not in told:
        values["num_key_value_heads"] = _num_kv_heads(fields, form, num_heads)
    if "head_dim" not in told:
        head_dim = values["head_dim"] = _head_dim(fields, max(1, hidden_size // num_heads))
        values |= _rotated(fields, family, form, head_dim)
    for key, name in _COUNTED.items():
        if name in file.tensors:
            values[key] = _num_rows(file.tensors[name])
    if fields.positive("block_count") > len(file.tensors):
        fields.refuse("block_count", f"must not be more than the {len(file.tensors)} tensors")
    if _LAYER_NORM not in form.keys:
        values["rms_norm_eps"] = fields.number("attention.layer_norm_rms_epsilon")
    fields.require("attention.causal", form.causal)
    rope, more = values["rope_scaling"], told.pop("rope_scaling", {})
    if isinstance(rope, dict) and isinstance(more, dict):
        values["rope_scaling"] = {**rope, **more}
    return {**values, **told}


def _inner_size(fields: Fields, family: Family) -> int | None:
    """Inner channels of dense MLPs; None where files may not tell how many, as no layer is dense."""
    if "feed_forward_length" in fields or "intermediate_size" not in family.defaults:
        return fields.positive("feed_forward_length")
    return None


def _rotated(
    fields: Fields, family: Family, form: GgufFormat, head_dim: int
) -> Mapping[str, object]:
    """The part of a head that is rotated, of which files tell the dimensions."""
    name = "rope.dimension_count"
    count = fields.positive(name, head_dim)
    if family.partial_rotary is not None:
        # A half more, as what is left of a dimension counts nothing.
        return {"partial_rotary_factor": 1 if count == head_dim else (count + 0.5) / head_dim}
    if count != head_dim and name not in form.read:
        fields.refuse(name, f"must be the key length {head_dim}")
    return {}


def _num_rows(tensor: GgufTensor) -> int:
    """Rows of a matrix, of which llama.cpp writes a single one as a vector."""
    return tensor.shape[0] if len(tensor.shape) > 1 else 1


def _num_heads(fields: Fields, form: GgufFormat) -> int:
    """Heads of queries, of which PLaMo 2's files tell the number in each layer: 0 where one keeps a state."""
    name = "attention.head_count"
    if _SCAN_WIDTH not in form.keys or not isinstance(fields.values.get(name), list):
        return fields.positive(name)
    return fields.updated({name: max(fields.integers(name), default=0)}).positive(name)


def _num_kv_heads(fields: Fields, form: GgufFormat, num_heads: int) -> int:
    """Heads of keys and values, of which some files tell the number in each layer: 0 where one keeps a state."""
    name = "attention.head_count_kv"
    if not isinstance(fields.values.get(name), list):
        return fields.positive(name, num_heads)
    counts = set(fields.integers(name))
    some = counts - {0} if _CONV_WIDTH in form.keys or _SCAN_WIDTH in form.keys else counts
    if len(some) != 1 or min(some) <= 0:
        fields.refuse(name, "must be the same positive integer for all layers with attention")
    return some.pop()


def _family(file: GgufFile) -> tuple[Family, GgufFormat]:
    """The family of a file, by its architecture and by what its metadata asks for beyond the usual."""
    fields = _fields(file)
    architecture = file.metadata.text("general.architecture")
    asked = {name for name in fields.values if name not in _COMMON and _is_set(fields, name)}
    candidates = gguf_families()[architecture]
    fits = [
        (family, form)
        for family, form in candidates
        if form.required <= asked <= {*form.keys, *form.read}
        and (form.tensor is None or form.tensor in file.tensors)
    ]
    if not fits:
        known = {key for _, form in candidates for key in (*form.keys, *form.read)}
        missing = candidates[0][1].required - asked
        wrong = [*sorted(asked - known), *sorted(missing), *sorted(asked)][0]
        fields.refuse(wrong, f"is not supported in models of {architecture}")
    return max(fits, key=lambda it: it[1].tensor is not None)


def _fields(file: GgufFile) -> Fields:
    """Metadata of the file's architecture, by the names behind it."""
    architecture = file.metadata.text("general.architecture")
    families = gguf_families()
    if architecture not in families:
        near = three_nearest(architecture, {it: it for it in families})
        rule = f"is none that Pagoda runs, the nearest of which are {near}"
        file.metadata.refuse("general.architecture", rule)
    fields = file.metadata.below(f"{architecture}.")
    beside = {it: value for it, value in file.metadata.values.items() if it.startswith(_BESIDE)}
    return fields.updated(beside)


_USUAL = {
    **{"expert_gating_func": 1, "expert_group_count": 1, "expert_group_used_count": 1},
    **{"logit_scale": 1, "residual_scale": 1, "embedding_scale": 1, "expert_weights_scale": 1},
    **{"attention.output_scale": 1, "rope.scaling.alpha": 1},
}
"""Values besides 0 that say nothing where a family has no such key: a softmax, one group, and factors of 1."""


def _is_set(fields: Fields, name: str) -> bool:
    value = fields.values.get(name)
    if isinstance(value, list):
        return any(value)
    return value not in (None, 0, False, _USUAL.get(name))


def _vocab_size(file: GgufFile, hidden_size: int) -> int:
    """The rows of the embedding table; tokens without a row could not be computed."""
    table = file.tensor(EMBEDDING)
    if len(table.shape) != 2 or table.shape[1] != hidden_size:
        raise ConfigError(
            f"{file.path}: tensor {EMBEDDING} has shape {list(table.shape)}, "
            f"but its rows must be of the embedding length {hidden_size}."
        )
    rows, key = table.shape[0], "tokenizer.ggml.tokens"
    num_tokens = len(file.metadata.texts(key, []))
    if num_tokens > rows:
        raise ConfigError(
            f"{file.path}: {key} has {num_tokens} tokens, but {EMBEDDING} {rows} rows."
        )
    return rows


def _head_dim(fields: Fields, usual: int) -> int:
    if (
        "attention.kv_lora_rank" in fields
    ):  # lengths are those of latent vectors, or of parts of heads
        return fields.positive("rope.dimension_count", usual)
    head_dim = fields.positive("attention.key_length", usual)
    if fields.positive("attention.value_length", head_dim) != head_dim:
        fields.refuse("attention.value_length", f"must be the key length {head_dim}")
    if head_dim % 2:
        fields.refuse("attention.key_length", "must be even")
    return head_dim


def _rope_scaling(fields: Fields, form: GgufFormat) -> dict[str, object]:
    rope = fields.below("rope.scaling.")
    kind = rope.text("type", "none")
    if kind != "yarn" and rope.number("attn_factor", 1.0) != 1:
        rope.refuse("attn_factor", "must be 1")
    if kind == "none":
        # Files of 2023 have one factor instead.
        factor = fields.number("rope.scale_linear", 1.0)
        return (
            {"rope_type": "default"} if factor == 1 else {"rope_type": "linear", "factor": factor}
        )
    if kind == "linear":
        return {"rope_type": kind, "factor": rope.number("factor")}
    if kind != "yarn":
        rope.refuse("type", "must be one of none, linear, yarn")
    factor = rope.number("factor")
    if rope.number("yarn_ext_factor", 1.0) != 1:
        rope.refuse("yarn_ext_factor", "must be 1")
    # OLMo 3's files name the temperature of YaRN, which others leave to its formula.
    usual = 1 + 0.1 * math.log(factor)
    for name in ("attn_factor", "yarn_attn_factor"):
        named = rope.number(name, 1.0)
        if named != 1 and not math.isclose(named, usual, rel_tol=1e-5):
            rope.refuse(name, f"must be 1, or {usual:.5g} as the factor has it")
    if not form.scales_yarn:
        rope.require("yarn_log_multiplier", 0)
    return {
        "rope_type": kind,
        "factor": factor,
        "original_max_position_embeddings": rope.positive("original_context_length"),
        "beta_fast": rope.number("yarn_beta_fast", 32.0),
        "beta_slow": rope.number("yarn_beta_slow", 1.0),
    }
