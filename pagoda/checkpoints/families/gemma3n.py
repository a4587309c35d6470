# SPDX-License-Identifier: Apache-2.0
"""Gemma 3n, whose layers are given embeddings of tokens, and read keys and values of other layers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import NormalDist

from pagoda.checkpoints.families.gemma import NAMES
from pagoda.checkpoints.families.shared import (
    WINDOW_PATTERN,
    every_nth_full,
    gguf_windows,
    text_sizes,
    with_attention,
    with_local_rotary,
)
from pagoda.checkpoints.family import Family, GgufFormat
from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.layer_inputs import GGUF_BESIDE, LayerInputs, StreamsSpec
from pagoda.checkpoints.layer_spec import LayerSpec, MlpSpec
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.multipliers import Multipliers

OWN_NAMES = replace(NAMES, norm_offset=0.0)


def with_shared_kv(spec: ModelSpec, fields: Fields, usual: int) -> ModelSpec:
    """The model whose last layers read keys and values of the last layer of their kind that has its own."""
    usual = usual if spec.num_layers > usual else 0
    first = spec.num_layers - fields.count("num_kv_shared_layers", usual)
    windows = [layer.attention.window for layer in spec.layers]
    kept = {window: index for index, window in enumerate(windows[: max(first, 0)])}
    if set(windows) - set(kept):
        fields.refuse("num_kv_shared_layers", "must leave a layer of each kind with its own")

    def change(index: int, layer: LayerSpec) -> LayerSpec:
        if index < first:
            return layer
        source = kept[layer.attention.window]
        return replace(layer, attention=replace(layer.attention, kv_layer=source))

    return spec.with_layers(change)


def adapted(
    spec: ModelSpec, fields: Fields, every: int, cap: float | None, *, last_full: bool = False
) -> ModelSpec:
    """The part that both share: norms, windows, and embeddings times the root of their size.

    With `last_full`, the last layer sees all, whatever the file says."""
    windows = every_nth_full(fields, spec.num_layers, every, 512)
    windows = (*windows[:-1], None) if last_full else windows
    spec = with_attention(spec, windows, scale=1.0, qk_norm="head", value_norm=True)
    cap = fields.optional_number("final_logit_softcapping") or cap
    if "final_logit_softcapping" in fields and not fields.values["final_logit_softcapping"]:
        cap = None
    multipliers = Multipliers(embedding=math.sqrt(spec.hidden_size), logits_softcap=cap)
    longest = fields.positive("max_position_embeddings")
    spec = replace(spec, multipliers=multipliers, max_position_embeddings=longest)
    spec = with_local_rotary(spec, fields, fields.number("rope_local_base_freq", 10_000.0))
    return spec.with_layers(lambda _, layer: replace(layer, post_norm=True))


# ---- Gemma 3n: several streams of hidden states, gates that are mostly zero (Google DeepMind 2025)


def _adapt_3n(spec: ModelSpec, fields: Fields) -> ModelSpec:
    spec = with_shared_kv(adapted(spec, fields, 5, 30.0), fields, 15)
    fields.require("altup_active_idx", 0)
    streams = StreamsSpec(
        fields.positive("altup_num_inputs", 4, most=64),
        fields.positive("laurel_rank", 64),
        fields.flag("altup_correct_scale", True),
    )
    beside = LayerInputs(
        fields.positive("hidden_size_per_layer_input", 256),
        fields.positive("vocab_size_per_layer_input", 262_144),
        spec.vocab_size,
        spec.num_layers,
        streams,
    )
    sparse = 10 if spec.num_layers > 10 else 0
    usual: list[float] = [0.95] * sparse + [0.0] * (spec.num_layers - sparse)
    shares = _of_layers(fields, "activation_sparsity_pattern", spec.num_layers, usual)
    if not all(0 <= share < 1 for share in shares):
        fields.refuse("activation_sparsity_pattern", "must be of numbers from 0 to below 1")
    sizes = [fields.positive("intermediate_size")] * spec.num_layers
    if fields.values.get(_SIZES) is not None:
        sizes = fields.integers(_SIZES)
        if len(sizes) != spec.num_layers or min(sizes) < 1:
            fields.refuse("intermediate_size", f"must be a list of {spec.num_layers} sizes")

    def change(index: int, layer: LayerSpec) -> LayerSpec:
        share = shares[index]
        deviations = NormalDist().inv_cdf(share) if share else None
        mlp = MlpSpec(sizes[index], activation="gelu_tanh", deviations=deviations)
        return replace(layer, mlp=mlp)

    return replace(spec.with_layers(change), beside=beside)


_SIZES = "intermediate_sizes"


def _values_3n(fields: Fields) -> Mapping[str, object]:
    """Inner channels of MLPs, of which files may have a list."""
    sizes = fields.values.get("intermediate_size")
    if not isinstance(sizes, list):
        return {}
    return {"intermediate_size": sizes[0] if sizes else None, _SIZES: sizes}


def _of_layers(fields: Fields, name: str, num_layers: int, usual: Sequence[float]) -> list[float]:
    """Number of each layer in the field `name`: a list, or one for all."""
    value = fields.values.get(name, usual)
    numbers = value if isinstance(value, list) else [value] * num_layers
    found = [Fields({name: it}, fields.source).amount(name) for it in numbers]
    if len(found) != num_layers:
        fields.refuse(name, f"must be a list of {num_layers} numbers")
    return found


OWN_KEYS = frozenset(
    {"final_logit_softcapping", "hidden_size_per_layer_input", "num_kv_shared_layers"}
    | {"activation_sparsity_pattern", "attention_k_eq_v", "enable_moe_block"}
    | {"use_bidirectional_attention", "num_experts", "query_pre_attn_scalar"}
)
DEFAULTS = {
    "num_attention_heads": 8,
    "head_dim": 256,
    "tie_word_embeddings": True,
}


def _gguf_values(fields: Fields) -> Mapping[str, object]:
    """Shares of gates that are zero, of which files have deviations of a normal distribution, and sizes."""
    fields.require("altup.active_idx", 0)
    name, size = "activation_sparsity_scale", fields.values.get("feed_forward_length")
    shares = [round(NormalDist().cdf(it), 6) for it in fields.numbers(name)]
    return {
        "activation_sparsity_pattern": shares,
        "intermediate_size": size
        if isinstance(size, list)
        else fields.positive("feed_forward_length"),
        "num_kv_shared_layers": fields.count(_SHARED, 0),
        **gguf_windows(fields),
    }


_SHARED = "attention.shared_kv_layers"
_GGUF_KEYS = {
    "attention.sliding_window": "sliding_window",
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
    "final_logit_softcapping": "final_logit_softcapping",
}
GEMMA3N = Family(
    "Gemma3nForCausalLM",
    "Gemma 3n E2B and E4B",
    _adapt_3n,
    names=OWN_NAMES,
    gguf=GgufFormat(
        "gemma3n",
        keys={
            **_GGUF_KEYS,
            "altup.num_inputs": "altup_num_inputs",
            "rope.freq_base_swa": "rope_local_base_freq",
        },
        values=_gguf_values,
        shown=lambda names: {"altup_correct_scale": f"blk.0.{GGUF_BESIDE.output_scale}" in names},
        read=frozenset({_SHARED, "altup.active_idx", "activation_sparsity_scale", WINDOW_PATTERN}),
    ),
    defaults={**DEFAULTS, "num_key_value_heads": 2, "rope_theta": 1e6},
    values=_values_3n,
    activation="gelu_tanh",
    model_types={"gemma3n_text": text_sizes(262_400, 2048, 16_384, 35, 8, 2, 32_768)},
    own_keys=OWN_KEYS,
)
