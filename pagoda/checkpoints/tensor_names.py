# SPDX-License-Identifier: Apache-2.0
"""Names of a model's weights in files, and which rows of a tensor are a weight's."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

TEXT_PARTS = ("language_model.", "text_model.")
"""Prefixes of the names of a decoder that is part of a model that sees or hears, also behind `model.`."""


@dataclass(frozen=True)
class StoredRows:
    """Place of a weight in a tensor that holds several, which lie one behind the other."""

    tensor: str
    """Name of the tensor without `.weight`."""
    shape: tuple[int, ...]
    """Shape of the tensor; its last dimension are the inputs, all before it count rows."""
    first: int
    """Row that the weight begins with, in each group of rows."""
    step: int = 1
    """Distance of the weight's rows."""
    transposed: bool = False
    """Inputs come before rows in the file (experts of gpt-oss and Llama 4)."""
    group: int = 0
    """Rows of a group, of each of which the weight has equally many; 0 where they are one."""
    bare: bool = False
    """Names in the file have no `.weight`."""
    flat: bool = False
    """Experts have no dimension of their own in the file, but lie one behind the other (DBRX)."""

    @property
    def weight(self) -> str:
        return self.tensor if self.bare else f"{self.tensor}.weight"

    @property
    def bias(self) -> str:
        return f"{self.tensor}_bias" if self.bare else f"{self.tensor}.bias"

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of the tensor in the file."""
        *experts, rows, inputs = self.shape
        if self.transposed:
            rows, inputs = inputs, rows
        return (math.prod(experts) * rows, inputs) if self.flat else (*experts, rows, inputs)

    def rows(self, count: int) -> slice:
        """The rows of a weight of so many outputs, in the tensor with all its rows in one dimension."""
        return slice(self.first, self.first + (count - 1) * self.step + 1, self.step)


ExpertLayout = Literal["linear", "bare", "transposed", "interleaved", "flat"]
"""Tensors [experts, outputs, inputs], whose names may be bare, or [experts, inputs, outputs], whose names are, and
in which gates and ups may take turns; or bare ones [experts inner, hidden], be inner ones outputs or inputs."""


HeadNormLayout = Literal["stacked", "listed", "shared"]
"""Tensors of layer norms of heads: [heads, head_dim], one of each head, or one for all heads with a bias."""


@dataclass(frozen=True)
class HeadLayerNorm:
    """Layer norms of the heads of queries, or of keys."""

    name: str
    """Name without `.weight`, in full."""
    head_dim: int
    layout: HeadNormLayout

    def tensors(self, heads: int) -> list[tuple[str, tuple[int, ...]]]:
        """Names and shapes of the tensors of so many heads."""
        if self.layout == "listed":
            return [(f"{self.name}.norms.{head}.weight", (self.head_dim,)) for head in range(heads)]
        if self.layout == "stacked":
            return [(f"{self.name}.weight", (heads, self.head_dim))]
        return [(f"{self.name}.{end}", (self.head_dim,)) for end in ("weight", "bias")]


@dataclass(frozen=True)
class TensorNames:
    """Names of tensors without `.weight` and `.bias`; by default those of Hugging Face checkpoints.

    Tensors of layer 3 are called `<layers>.3.<name>`. Where queries, keys and values, or gate and up, have one
    name, they are rows of one tensor, in this order. `{expert}` stands for the number of an expert; without it,
    one tensor [experts, outputs, inputs] holds those of all experts.
    """

    embedding: str = "model.embed_tokens"
    positions: str = "embeddings.position_embeddings"
    token_types: str = "embeddings.token_type_embeddings"
    embedding_norm: str = "embeddings.LayerNorm"
    """Norm of an encoder's embeddings."""
    embedding_projection: str = "embeddings_project"
    """Map of an encoder's normed embeddings to hidden states."""
    distances: str = "encoder.relative_attention_bias"
    """Table [buckets, heads] of what distances of tokens add to scores; layers with tables of their own have their
    numbers in place of `{layer}`."""
    distance_embeddings: str = "encoder.rel_embeddings"
    """Table [buckets, hidden] of distances, of which layers make queries and keys, and its norm."""
    distance_norm: str = "encoder.LayerNorm"
    distance_query: str = "attention.self.pos_query_proj"
    distance_key: str = "attention.self.pos_key_proj"
    norm: str = "model.norm"
    head: str = "lm_head"
    head_bias: str = ""
    """Numbers [1, tokens] that are added to logits, in full; empty where they are named after the head."""
    layers: str = "model.layers"
    first_layer: int = 0
    """Number that files give the first layer."""
    attention_norm: str = "input_layernorm"
    """Norm in front of attention."""
    query: str = "self_attn.q_proj"
    key: str = "self_attn.k_proj"
    value: str = "self_attn.v_proj"
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    attention_gate: str = ""
    """Gate of attention's outputs; empty where its rows lie behind each head's queries."""
    attention_out: str = "self_attn.o_proj"
    query_down: str = "self_attn.q_a_proj"
    """Latent vector of queries, with its norm, and the queries of all heads, made of it."""
    query_down_norm: str = "self_attn.q_a_layernorm"
    query_up: str = "self_attn.q_b_proj"
    latents: str = "self_attn.kv_a_proj_with_mqa"
    """Latent vector of keys and values, with the rotated part of keys behind it."""
    latent_norm: str = "self_attn.kv_a_layernorm"
    latent_up: str = "self_attn.kv_b_proj"
    """Keys and values of all heads, of which those of each head lie together."""
    key_up: str = ""
    """Tensor of keys [heads, rank, nope_dim], `value_up` of values [heads, value_dim, rank]; empty where they
    are in `latent_up`."""
    value_up: str = ""
    index_query: str = "self_attn.indexer.wq_b"
    """Queries of an indexer, the key that they meet, with its norm, and weights of their scores."""
    index_key: str = "self_attn.indexer.wk"
    index_norm: str = "self_attn.indexer.k_norm"
    index_weights: str = "self_attn.indexer.weights_proj"
    attention_post_norm: str = "post_attention_layernorm"
    """Norm behind attention, in families that have one."""
    mlp_norm: str = "post_attention_layernorm"
    """Norm in front of the MLP or the experts."""
    mlp_post_norm: str = "post_feedforward_layernorm"
    """Norm behind the MLP or the experts, in families that have one."""
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    state_in: str = "conv.in_proj"
    """Maps of hidden states of a layer with a state."""
    state_conv: str = "conv.conv"
    state_out: str = "conv.out_proj"
    state_gates: str = "linear_attn.in_proj_ba"
    """Gates of a delta rule, two of each head of values."""
    state_output_gate: str = ""
    """Gate of a delta rule's outputs; empty where it takes turns with queries, keys and values in `state_in`."""
    state_b: str = ""
    """Gates of a delta rule, as `state_a`; empty where they take turns in `state_gates`."""
    channel_gate: str = "self_attn.{gate}_{part}_proj"
    """Two maps, a and b, one behind the other, to gates f of channels and g of outputs (Kimi Linear)."""
    channel_b: str = "self_attn.b_proj"
    channel_conv: str = "self_attn.{what}_conv1d"
    """Convolution of queries, keys or values."""
    state_a: str = ""
    state_decay: str = "linear_attn.A_log"
    """Factors within the exponent of what a state keeps, or, with `log_decay`, logarithms of their negatives."""
    log_decay: bool = True
    state_bias: str = "linear_attn.dt_bias"
    state_norm: str = "linear_attn.norm"
    state_skip: str = "mamba.D"
    """Factors of what goes past the state of a Mamba layer; the tensor's name in full."""
    state_x: str = "mamba.x_proj"
    """Map of a Mamba layer's channels to steps' numbers, B and C."""
    state_step: str = "mamba.dt_proj"
    """Map of those numbers to steps, whose bias is that of steps."""
    state_step_norm: str = "mamba.dt_layernorm.weight"
    state_b_norm: str = "mamba.b_layernorm.weight"
    state_c_norm: str = "mamba.c_layernorm.weight"
    """Norms of those numbers, B and C; the tensors' names in full."""
    router: str = "mlp.gate"
    expert_gate: str = "mlp.experts.{expert}.gate_proj"
    expert_up: str = "mlp.experts.{expert}.up_proj"
    expert_down: str = "mlp.experts.{expert}.down_proj"
    expert_latent: str = "mlp.fc1_latent_proj"
    """Map of hidden states to the vectors that experts are given, where these are others, and the map back."""
    expert_latent_back: str = "mlp.fc2_latent_proj"
    correction: str = "mlp.gate.e_score_correction_bias"
    """Numbers that are added to scores for the choice of experts; the tensor's name in full."""
    correction_rows: bool = False
    """The tensor is a matrix of one row (ERNIE 4.5)."""
    shared_gate: str = "mlp.shared_experts.gate_proj"
    shared_up: str = "mlp.shared_experts.up_proj"
    shared_down: str = "mlp.shared_experts.down_proj"
    shared_router: str = "mlp.shared_expert_gate"
    """Score of the shared expert."""
    output_norm: str = "self_attn.attn_sub_norm"
    inner_norm: str = "mlp.ffn_sub_norm"
    """Norms in front of the maps back of attention and of an MLP."""
    apart_norms: tuple[str, str, str, str] = (
        "router.scale",
        "pre_feedforward_layernorm_2.weight",
        "post_feedforward_layernorm_1.weight",
        "post_feedforward_layernorm_2.weight",
    )
    """Norms of the router's input, of that of experts, and of what the shared MLP and experts give (Gemma 4), by
    names in full, as that of the factors of experts' weights."""
    expert_factors: str = "router.per_expert_scale"
    expert_layout: ExpertLayout = "linear"
    """Order in tensors of all experts, where one is not as in other linear layers."""
    sinks: str = "self_attn.sinks"
    """Scores of the sinks of heads; the tensor's name in full."""
    up_first: bool = False
    """Ups come first where gates and ups have one tensor."""
    head_norms: HeadNormLayout = "stacked"
    activation: str = "mlp.act_fn"
    """Numbers of an activation that has weights."""
    joins_by_head: bool = False
    """Queries, keys and values are one tensor, in which those of each KV head lie together (GPT-NeoX, Falcon)."""
    transposes: bool = False
    """Inputs come before outputs in the tensors of layers (GPT-2)."""
    rotates_neighbours: bool = False
    """Dimensions `2i` and `2i + 1` of a head turn together in the order of the file, not `i` and `i + r/2`."""
    permutes_heads: bool = False
    """All of a head is in that order, though a part of it turns, in pairs of another one (Bamba's GGUF files)."""
    norm_offset: float = 0.0
    """Number that is added to the weights of RMS norms in the file."""
    norm_offsets: Mapping[str, float] = field(default_factory=dict)
    """The same of norms in layers that have another one, by their names (PLaMo 2 and 3)."""
    tiled_values: bool = False
    """Heads of values of a delta rule lie one for each head of keys, then the next for each, and so on."""
    flat_convolutions: bool = False
    """Weights of convolutions are [channels, width], not [channels, 1, width]."""

    halves: tuple[str, str] | None = None
    """Two layers have one number; `{half}` stands for the word of a layer in its pair (LongCat-Flash, Whisper)."""
    parts: tuple[str, ...] = ()
    """Meanings of `{part}` in the names of each layer (Zamba2, where a layer is a part of another one)."""
    joined: str = "linear"
    """Map of what the layer in front gives, which is added to the input of a layer."""
    numbers: tuple[int, ...] = ()
    """Numbers that files give the layers, where these do not count on; names with a plus in front are of the
    number behind (Nemotron-H, whose MLPs have numbers of their own)."""

    def number_of(self, layer: int) -> int:
        """Number that files give a layer."""
        if self.numbers:
            return self.numbers[layer]
        return self.first_layer + (layer // 2 if self.halves else layer)

    def offset_of(self, norm: str) -> float:
        """Number that is added to the weight of a norm, which is named in full."""
        own = (it for name, it in self.norm_offsets.items() if norm.endswith(f".{name}"))
        return next(own, self.norm_offset)

    def of_layer(self, layer: int, name: str) -> str:
        number = self.number_of(layer) + name.startswith("+")
        if self.parts:
            name = name.replace("{part}", self.parts[layer])
        if self.halves:
            name = name.replace("{half}", self.halves[layer % 2])
        return f"{self.layers}.{number}.{name.removeprefix('+')}"


def places(
    tensors: Sequence[str],
    sizes: Mapping[str, int],
    inputs: int,
    expert: int | None,
    experts: int,
    layout: ExpertLayout = "linear",
) -> list[tuple[str, StoredRows | None]]:
    """Name and place of each of some weights of the same inputs.

    `tensors` are names in full, one for each of `sizes`, the outputs by what a weight is called where it shares
    its tensor. `expert` is the number of the expert of `experts` that they belong to, whose tensors have a
    `layout`. A weight that is a whole tensor has no place.
    """
    spelled = [name.format(expert=expert) for name in tensors]
    shares = Counter(spelled)
    rows = Counter[str]()
    for tensor, size in zip(spelled, sizes.values(), strict=True):
        rows[tensor] += size
    found: list[tuple[str, StoredRows | None]] = []
    begun = Counter[str]()
    for template, tensor, (what, size) in zip(tensors, spelled, sizes.items(), strict=True):
        stacked = expert is not None and template == tensor
        if shares[tensor] == 1 and not stacked:
            found.append((tensor, None))
            continue
        shape: tuple[int, ...] = (rows[tensor], inputs)
        first, name = begun[tensor], tensor
        if stacked and expert is not None:
            shape, first = (experts, *shape), first + expert * rows[tensor]
            name = f"{name}.{expert}"
        if shares[tensor] > 1:
            name = f"{name}.{what}"
        takes_turns = layout == "interleaved" and stacked
        begun[tensor] += 1 if takes_turns else size
        step = shares[tensor] if takes_turns else 1
        turned = layout in ("transposed", "interleaved") or (layout == "flat" and what == "down")
        flat, bare = layout == "flat", layout != "linear"
        rows_of = StoredRows(tensor, shape, first, step, turned, bare=bare, flat=flat)
        found.append((name, rows_of))
    return found


def with_joined_experts(names: TensorNames) -> TensorNames:
    """Names of files in which one tensor has gates and ups of all experts of a layer, and one the maps back."""
    both, down = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
    return replace(names, expert_gate=both, expert_up=both, expert_down=down, expert_layout="bare")


def with_apart_experts(names: TensorNames) -> TensorNames:
    """Names of files in which each expert has tensors of its own, of a family whose makers join them: tools that
    quantize take them apart."""
    stem = f"{names.expert_down.rpartition('.')[0]}.{{expert}}"
    gate, up, down = (f"{stem}.{name}_proj" for name in ("gate", "up", "down"))
    return replace(names, expert_gate=gate, expert_up=up, expert_down=down, expert_layout="linear")


HF_NAMES = TensorNames()
"""Names of Llama's, which most families share."""
GGUF_NAMES = TensorNames(
    embedding="token_embd",
    norm="output_norm",
    head="output",
    layers="blk",
    attention_norm="attn_norm",
    query="attn_q",
    key="attn_k",
    value="attn_v",
    query_norm="attn_q_norm",
    key_norm="attn_k_norm",
    attention_out="attn_output",
    query_down="attn_q_a",
    query_down_norm="attn_q_a_norm",
    query_up="attn_q_b",
    latents="attn_kv_a_mqa",
    latent_norm="attn_kv_a_norm",
    latent_up="attn_kv_b",
    attention_post_norm="post_attention_norm",
    mlp_norm="ffn_norm",
    mlp_post_norm="post_ffw_norm",
    output_norm="attn_sub_norm",
    inner_norm="ffn_sub_norm",
    gate="ffn_gate",
    up="ffn_up",
    down="ffn_down",
    state_in="shortconv.in_proj",
    state_conv="shortconv.conv",
    state_out="shortconv.out_proj",
    flat_convolutions=True,
    router="ffn_gate_inp",
    expert_gate="ffn_gate_exps",
    expert_up="ffn_up_exps",
    expert_down="ffn_down_exps",
    correction="exp_probs_b.bias",
    shared_gate="ffn_gate_shexp",
    shared_up="ffn_up_shexp",
    shared_down="ffn_down_shexp",
    shared_router="ffn_gate_inp_shexp",
    sinks="attn_sinks.weight",
)
"""Names that most architectures have in GGUF files (gguf-py/gguf/constants.py of llama.cpp)."""
GGUF_NEIGHBOURS = replace(GGUF_NAMES, rotates_neighbours=True)
"""Names of Llama's architecture in GGUF files, in which rows of queries and keys are permuted."""

GGUF_LATENTS = replace(GGUF_NEIGHBOURS, key_up="attn_k_b", value_up="attn_v_b")
"""Names of latent attention in GGUF files; older ones have `latent_up` instead of `key_up` and `value_up`."""


def head_order(head_dim: int, rotated: int) -> tuple[int, ...]:
    """The dimensions of a head that has neighbours turn together, in the order that turns `i` with `i + r/2`.

    The first `rotated` dimensions turn. Products of queries and keys do not depend on the order of both.
    """
    return (*range(0, rotated, 2), *range(1, rotated, 2), *range(rotated, head_dim))
