# SPDX-License-Identifier: Apache-2.0
"""Experts, sliding windows, rotary tables and norms, as several families spell them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pagoda.checkpoints.draft_heads import head_behind
from pagoda.checkpoints.expert_routing import ExpertRouting
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.layer_spec import (
    ExpertsSpec,
    LayerSpec,
    MlpSpec,
    NormSpec,
    OwnHeads,
    StateSpec,
)
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.pooling_spec import (
    ClassifierSpec,
    EncoderSpec,
    HeadPooling,
    PositionTable,
    ScoreKind,
    VectorActivation,
    VectorMap,
)
from pagoda.checkpoints.rope import RotarySpec, parse_rope, rope_of_kind
from pagoda.checkpoints.tensor_names import TensorNames

MAX_EXPERTS = 65_536
"""Experts of a layer: each is an object."""
_KINDS = ("full_attention", "sliding_attention")


def text_sizes(
    vocab: int,
    hidden: int,
    inner: int,
    layers: int,
    heads: int,
    kv_heads: int | None,
    longest: int,
) -> Mapping[str, object]:
    """Sizes of a text part whose `text_config` is silent, as transformers' class of its kind has them."""
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": longest,
    }


def with_attention(
    spec: ModelSpec, windows: Sequence[int | None] | None = None, **changes: Any
) -> ModelSpec:
    """The model with a window for each layer, and other values of all its `AttentionSpec`s."""
    windows = (None,) * spec.num_layers if windows is None else windows
    return spec.with_layers(
        lambda index, layer: replace(
            layer, attention=replace(layer.attention, window=windows[index], **changes)
        )
    )


def with_attention_of(spec: ModelSpec, **changes: Any) -> ModelSpec:
    """The model with other values of all its `AttentionSpec`s, whose windows stay."""
    windows = [layer.attention.window for layer in spec.layers]
    return with_attention(spec, windows, **changes)


def with_query_heads(spec: ModelSpec, heads: Sequence[int]) -> ModelSpec:
    """The model whose layers have so many heads of queries, evenly over its heads of keys."""

    def change(index: int, layer: LayerSpec) -> LayerSpec:
        if heads[index] == spec.num_heads:
            return layer
        own = OwnHeads(spec.head_dim, spec.head_dim, spec.num_kv_heads, heads[index])
        return replace(layer, attention=replace(layer.attention, own_heads=own))

    return spec.with_layers(change)


def with_given_window(spec: ModelSpec, fields: Fields) -> ModelSpec:
    """The model with the window that the file gives, if it does, for all its layers."""
    if fields.values.get("sliding_window") is None:
        return spec
    return with_attention(spec, (fields.positive("sliding_window"),) * spec.num_layers)


def with_experts(spec: ModelSpec, experts: ExpertsSpec, layers: Collection[int]) -> ModelSpec:
    """The model with experts in some layers instead of one MLP."""
    chosen = frozenset(layers)
    return spec.with_layers(
        lambda index, layer: replace(layer, mlp=experts) if index in chosen else layer
    )


def expert_counts(
    fields: Fields,
    name: str,
    defaults: tuple[int | None, int | None],
    chosen: str = "num_experts_per_tok",
) -> tuple[int, int]:
    """Experts of a layer (the field `name`), and experts that each token goes through (the field `chosen`).
    Files must have fields whose default is None."""
    num_experts = fields.positive(name, defaults[0], most=MAX_EXPERTS)
    per_token = fields.positive(chosen, defaults[1])
    if per_token > num_experts:
        fields.refuse(chosen, f"must be at most {name} ({num_experts})")
    return num_experts, per_token


def conv_width(fields: Fields, name: str, usual: int) -> int:
    """Tokens that the convolution of a layer with a state sees (the field `name`)."""
    width = fields.positive(name, usual)
    if width < 2:
        fields.refuse(name, "must be at least 2")
    return width


def with_shared_blocks(
    spec: ModelSpec,
    block: LayerSpec,
    behind: LayerSpec,
    hybrids: Sequence[bool],
    count: int,
    parts: tuple[str, str],
) -> ModelSpec:
    """The model with layers like `behind`, in front of some of which lies a use of one of `count` blocks, in turn.

    `block` is its first use. A block has the number of the layer that it is first used in, and `parts` are the
    words for a use and for the layer behind in names."""
    layers, numbers, words, firsts = list[LayerSpec](), list[int](), list[str](), list[int]()
    uses = 0
    for number, has_block in enumerate(hybrids):
        if has_block and block.shared is not None:
            firsts += [number] * (uses < count)
            layers.append(replace(block, shared=replace(block.shared, use=uses)))
            numbers.append(firsts[uses % count])
            uses += 1
        layers.append(replace(behind, joins_before=has_block))
        numbers.append(number)
        words += parts if has_block else [""]
    names = replace(spec.names, numbers=tuple(numbers), parts=tuple(words))
    return replace(spec, layers=tuple(layers), names=names)


def with_state(
    spec: ModelSpec, state: StateSpec, layers: Collection[int], *, bias: bool
) -> ModelSpec:
    """The model with a state in some layers instead of attention; `bias` is that of their maps."""
    chosen = frozenset(layers)

    def change(index: int, layer: LayerSpec) -> LayerSpec:
        if index not in chosen:
            return layer
        attention = replace(layer.attention, qkv_bias=bias, output_bias=bias)
        return replace(layer, attention=attention, state=state)

    return spec.with_layers(change)


def sigmoid_experts(
    fields: Fields, defaults: Mapping[str, int], *, scale: float, groups: tuple[int, int] = (1, 1)
) -> ExpertsSpec:
    """Experts scored by sigmoids, chosen by corrected scores within groups, and one for all tokens (DeepSeek-V3).

    `defaults` are sizes where the file is silent, `scale` is that of `routed_scaling_factor`, and `groups` are
    those of an expert layer and of a token.
    """
    fields.require("scoring_func", "sigmoid")
    fields.require("topk_method", "noaux_tc")
    usual = defaults["n_routed_experts"], defaults["num_experts_per_tok"]
    counts = expert_counts(fields, "n_routed_experts", usual)
    num_groups, chosen = expert_groups(fields, *counts, groups, least=2)
    routing = ExpertRouting(
        *counts,
        fields.flag("norm_topk_prob", True),
        scores="sigmoid",
        num_groups=num_groups,
        groups_per_token=chosen,
        group_score="best_two",
        scaling_factor=fields.number("routed_scaling_factor", scale),
    )
    inner = fields.positive("moe_intermediate_size", defaults["moe_intermediate_size"])
    shared = fields.count("n_shared_experts", 1) * inner
    return ExpertsSpec(routing, inner, correction=True, shared_size=shared)


def expert_groups(
    fields: Fields, num_experts: int, per_token: int, usual: tuple[int, int], least: int
) -> tuple[int, int]:
    """Groups of at least `least` experts each, and those that a token's experts are chosen from."""
    num_groups = fields.positive("n_group", usual[0])
    chosen = fields.positive("topk_group", usual[1])
    if num_experts % num_groups or num_experts // num_groups < min(least, num_experts):
        rule = f"must divide n_routed_experts ({num_experts})"
        fields.refuse("n_group", rule if least == 1 else f"{rule} into two or more")
    if not per_token <= chosen * (num_experts // num_groups) <= num_experts:
        fields.refuse("topk_group", f"must be at most n_group and have {per_token} experts")
    return num_groups, chosen


def layers_behind_dense(fields: Fields, num_layers: int, usual: int) -> list[int]:
    """Every `moe_layer_freq`-th layer behind the first `first_k_dense_replace`, by default `usual`, ones."""
    first = fields.count("first_k_dense_replace", usual)
    every = fields.positive("moe_layer_freq", 1)
    return [layer for layer in range(first, num_layers) if layer % every == 0]


_MLP_KINDS = "mlp_layer_types"


def sparse_by_kind(fields: Fields, num_layers: int, usual: int = 1) -> list[int]:
    """Layers that `mlp_layer_types` call sparse; those behind the first `usual` ones where the file is silent."""
    if fields.values.get(_MLP_KINDS) is None:
        return layers_behind_dense(fields, num_layers, usual)
    kinds = fields.texts(_MLP_KINDS)
    if len(kinds) != num_layers or set(kinds) - {"dense", "sparse"}:
        fields.refuse(_MLP_KINDS, f"must be a list of {num_layers} of dense, sparse")
    return [layer for layer, kind in enumerate(kinds) if kind == "sparse"]


def sparse_layers(fields: Fields, num_layers: int) -> frozenset[int]:
    """Every `decoder_sparse_step`-th layer but those in `mlp_only_layers`."""
    step = fields.positive("decoder_sparse_step", 1)
    dense = fields.values.get("mlp_only_layers")
    dense = [] if dense is None else dense
    if not isinstance(dense, list) or any(
        not isinstance(layer, int) or isinstance(layer, bool) or not 0 <= layer < num_layers
        for layer in dense
    ):
        fields.refuse("mlp_only_layers", f"must be a list of layers from 0 to {num_layers - 1}")
    return frozenset(range(step - 1, num_layers, step)) - frozenset(dense)


def layer_windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    """Window of each layer: by `layer_types`, or of the layers from `max_window_layers` on."""
    if not fields.flag("use_sliding_window", False):
        return (None,) * num_layers
    if fields.values.get("layer_types") is not None:
        return typed_windows(fields, num_layers, [])
    window = fields.positive("sliding_window", 4096)
    num_full = fields.count("max_window_layers", 28)
    return tuple(None if layer < num_full else window for layer in range(num_layers))


def typed_windows(
    fields: Fields, num_layers: int, usual: Sequence[str], usual_window: int = 4096
) -> tuple[int | None, ...]:
    """Window of each layer by `layer_types`, which are the `usual` ones where the file is silent."""
    kinds = layer_kinds(fields, num_layers, _KINDS, usual)
    if "sliding_attention" not in kinds:
        return (None,) * num_layers
    window = fields.positive("sliding_window", usual_window)
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def layer_kinds(
    fields: Fields, num_layers: int, known: Sequence[str], usual: Sequence[str]
) -> Sequence[str]:
    """Kind of each layer by `layer_types`, one that is `known`; the `usual` ones where the file is silent."""
    kinds = fields.values.get("layer_types")
    kinds = usual if kinds is None else kinds
    if (
        not isinstance(kinds, list)
        or len(kinds) != num_layers
        or any(kind not in known for kind in kinds)
    ):
        fields.refuse("layer_types", f"must be a list of {num_layers} of {', '.join(known)}")
    return kinds


def every_nth_full(
    fields: Fields, num_layers: int, every: int, usual_window: int = 4096
) -> tuple[int | None, ...]:
    """Window of each layer: all but each `sliding_window_pattern`-th, by default `every`-th, have one."""
    if fields.values.get("sliding_window", 4096) is None:
        return (None,) * num_layers
    if fields.values.get("layer_types") is None:
        every = fields.positive("sliding_window_pattern", every)
    usual = [_KINDS[(layer + 1) % every != 0] for layer in range(num_layers)]
    return typed_windows(fields, num_layers, usual, usual_window)


NEXT_LAYERS = "nextn_predict_layers"


def with_next_token(spec: ModelSpec, fields: Fields) -> ModelSpec:
    """The model with the head behind its layers, which files may lack although config.json does not deny it."""
    if fields.count(f"num_{NEXT_LAYERS}", 1) == 0:
        return spec
    return replace(spec, next_token=head_behind(spec.names, spec.num_layers))


def gguf_layers(fields: Fields) -> Mapping[str, int]:
    """Layers of a model without those for the prediction of several tokens, which files count as well."""
    extra = fields.count(NEXT_LAYERS, 0)
    num_layers = fields.positive("block_count") - extra
    return {"num_hidden_layers": num_layers, f"num_{NEXT_LAYERS}": extra}


def gguf_kv_heads(fields: Fields) -> list[int]:
    """Heads of keys of each layer, 0 of one that keeps a state. Raises ConfigError: a layer lacks its number."""
    name, count = "attention.head_count_kv", fields.positive("block_count")
    counts = fields.integers(name)
    if len(counts) != count:
        fields.refuse(name, f"must have {count} numbers, one for each layer")
    return counts


WINDOW_PATTERN = "attention.sliding_window_pattern"


def gguf_windows(fields: Fields) -> Mapping[str, object]:
    """Kinds of layers, of which files say whether each has a window, or that every so manyth has none."""
    flags = fields.values.get(WINDOW_PATTERN)
    if flags is None:
        return {}
    if not isinstance(flags, list):
        return {"sliding_window_pattern": fields.positive(WINDOW_PATTERN)}
    return {"layer_types": ["sliding_attention" if flag else "full_attention" for flag in flags]}


def with_local_rotary(spec: ModelSpec, fields: Fields, theta: float) -> ModelSpec:
    """The model whose layers with a window have a rotary table of their own, by default one that is not scaled."""
    own = rope_of_kind(fields, "sliding_attention")
    table = (
        RotarySpec(spec.head_dim, theta) if own is None else parse_rope(own, spec.head_dim, None)
    )

    def change(_: int, layer: LayerSpec) -> LayerSpec:
        if layer.attention.window is None:
            return layer
        return replace(layer, attention=replace(layer.attention, rotary="local"))

    return replace(spec.with_layers(change), rotary={**spec.rotary, "local": table})


def with_layer_norm(spec: ModelSpec, fields: Fields, *, bias: bool) -> ModelSpec:
    """The model with layer norms."""
    norm = NormSpec(fields.number("layer_norm_eps", 1e-5), "layer", bias)
    return replace(spec, norm=norm)


def both_ways(spec: ModelSpec) -> ModelSpec:
    """A decoder whose tokens see all of their text: it gives vectors."""
    encoder = EncoderSpec(norms_embeddings=False, norms_output=True)
    return replace(with_attention_of(spec, causal=False), tie_word_embeddings=True, encoder=encoder)


def with_biases(
    spec: ModelSpec, *, qkv: bool = True, out: bool = True, mlp: bool = True
) -> ModelSpec:
    """The model with biases of queries, keys and values, of the map behind attention, and of dense MLPs."""

    def change(_: int, layer: LayerSpec) -> LayerSpec:
        attention = replace(layer.attention, qkv_bias=qkv, output_bias=out)
        own = layer.mlp
        if isinstance(own, MlpSpec):
            own = replace(own, bias=mlp)
        return replace(layer, attention=attention, mlp=own)

    return spec.with_layers(change)


def with_position_table(spec: ModelSpec, first: int = 0, *, sinusoidal: bool = False) -> ModelSpec:
    """The model with learned or fixed positions in place of rotary ones; `first` is the row of the first one."""
    spec = without_rotation(spec, [True] * spec.num_layers)
    table = PositionTable(spec.max_position_embeddings + first, first, sinusoidal)
    return replace(spec, position_table=table)


def with_alibi(spec: ModelSpec) -> ModelSpec:
    """The model whose scores depend on distances, and that knows no other positions."""
    spec = without_rotation(spec, [True] * spec.num_layers)
    return with_attention(spec, alibi=True)


def with_cross_attention(spec: ModelSpec) -> ModelSpec:
    """The decoder whose layers come in pairs: one sees its own tokens and has no MLP, the next one what an encoder
    gives."""

    def change(index: int, layer: LayerSpec) -> LayerSpec:
        if index % 2:
            crossing = replace(layer.attention, crosses=True, distances=None)
            return replace(layer, attention=crossing)
        return replace(layer, mlp=None)

    return spec.with_layers(change)


MAX_CODER_LAYERS = 256
"""Layers of an encoder, or of a decoder beside it, at most."""


def encoder_names(names: TensorNames, changes: Mapping[str, str]) -> TensorNames:
    """Names of the encoder beside a decoder that has these, by parts of names that it spells otherwise."""
    changed: dict[str, Any] = {}
    for name, told in vars(names).items():
        if isinstance(told, str):
            for old, new in changes.items():
                told = told.replace(old, new)
            changed[name] = told
    return replace(names, **changed, halves=None)


def own_heads(fields: Fields) -> Mapping[str, object]:
    """Sizes of models whose heads of queries all have keys and values, and of whose size files are silent."""
    heads = fields.positive("num_attention_heads")
    return {"num_key_value_heads": heads, "head_dim": None}


def following_sizes(
    fields: Fields, inner_name: str = "", usual: int | None = None
) -> Mapping[str, object]:
    """The same with inner channels of MLPs: those in the field `inner_name`, the usual ones, or four times as many
    as there are hidden ones."""
    usual = usual or 4 * fields.positive("hidden_size")
    return {**own_heads(fields), "intermediate_size": fields.positive(inner_name, usual)}


def with_head(spec: ModelSpec, fields: Fields, head: ClassifierSpec) -> ModelSpec:
    """The model with a head that scores texts or tokens, with a score for each label.

    Of one score, sentence-transformers says whether it becomes a share of one; of several, `problem_type`.
    """
    labels = _labels(fields)
    if len(labels) == 1 and head.pooling != "all":
        said = fields.table("sentence_transformers")
        name = said.text("activation_fn", "") if said is not None else ""
        name = name or fields.text("sbert_ce_default_activation_function", "Sigmoid")
        kind = name.rpartition(".")[2]
        if kind not in ("Sigmoid", "Identity"):
            fields.refuse("sentence_transformers", "must name the activation Sigmoid or Identity")
        head = replace(head, scores="sigmoid" if kind == "Sigmoid" else "identity")
    else:
        kinds: Mapping[str, ScoreKind]
        kinds = {"regression": "identity", "multi_label_classification": "sigmoid"}
        head = replace(head, scores=kinds.get(fields.text("problem_type", ""), "softmax"))
    return replace(spec, tie_word_embeddings=True, classifier=replace(head, labels=labels))


def dense_mlp(layer: LayerSpec) -> MlpSpec:
    """The MLP of a layer that has no experts so far."""
    if not isinstance(layer.mlp, MlpSpec):
        raise TypeError("The layer is not dense.")
    return layer.mlp


def with_masked_head(spec: ModelSpec) -> ModelSpec | None:
    """The model with its head of masked language modelling, which weighs the vocabulary; None without one."""
    known: Mapping[str, VectorActivation] = {
        "gelu": "gelu",
        "gelu_tanh": "gelu_tanh",
        "relu": "relu",
        "silu": "silu",
    }
    if spec.family.masked_head is None:
        return None
    dense, norm, bias = spec.family.masked_head
    activation = known[dense_mlp(spec.layers[0]).activation]
    layer = VectorMap(dense, spec.hidden_size, spec.embedding_size, True, activation, norm)
    maps = {**spec.vector_maps, "masked": (layer,)}
    return replace(spec, vector_maps=maps, logit_bias=bias)


def _labels(fields: Fields) -> tuple[str, ...]:
    """Names of a head's labels, in the order of its outputs."""
    names = fields.values.get("id2label")
    count = len(names) if isinstance(names, dict) else fields.positive("num_labels", 2)
    if not isinstance(names, dict):
        return tuple(f"LABEL_{i}" for i in range(count))
    by_number = {str(number): name for number, name in names.items()}
    found = [by_number.get(str(i)) for i in range(count)]
    labels = tuple(name for name in found if isinstance(name, str))
    if not labels or len(labels) != count:
        fields.refuse("id2label", "must be an object with a name for each number from 0 on")
    return labels


def decoder_head(spec: ModelSpec, fields: Fields) -> ClassifierSpec:
    """Head of a decoder that scores texts by their last tokens, or as `pooling` says of one that sees all."""
    if spec.encoder is None:
        return ClassifierSpec("score", bias=False, pooling="last")
    known: Mapping[str, HeadPooling] = {"avg": "mean", "cls": "first", "last": "last"}
    pooling = head_pooling(fields, "pooling", "last", known)
    return ClassifierSpec("score", bias=False, pooling=pooling)


def head_pooling(
    fields: Fields, name: str, usual: str, known: Mapping[str, HeadPooling]
) -> HeadPooling:
    """Pooling of a head by the field `name`."""
    said = fields.text(name, usual)
    if said not in known:
        fields.refuse(name, f"must be one of {', '.join(known)}")
    return known[said]


def unrotated_layers(fields: Fields, num_layers: int) -> list[bool]:
    """True of every `no_rope_layer_interval`-th layer, or of those whose place in `no_rope_layers` is 0."""
    name = "no_rope_layers"
    if not fields.values.get(name):
        interval = fields.positive("no_rope_layer_interval", 4)
        return [(layer + 1) % interval == 0 for layer in range(num_layers)]
    flags = fields.integers(name)
    if len(flags) != num_layers or any(flag not in (0, 1) for flag in flags):
        fields.refuse(name, f"must be a list of {num_layers} numbers, each 0 or 1")
    return [not flag for flag in flags]


def without_rotation(spec: ModelSpec, layers: Sequence[bool]) -> ModelSpec:
    """The model in which positions are not told in those layers whose flag is True."""

    def change(index: int, layer: LayerSpec) -> LayerSpec:
        if not layers[index]:
            return layer
        return replace(layer, attention=replace(layer.attention, rotary="none"))

    still = RotarySpec(dim=0, theta=1.0)
    return replace(spec.with_layers(change), rotary={**spec.rotary, "none": still})
