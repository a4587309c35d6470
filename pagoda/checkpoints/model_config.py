"""The shape of a decoder model, the arithmetic that its family chooses, and the names of its tensors."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.rope import RopeScaling
from pagoda.checkpoints.weight_formats import Quantization


class Role(enum.Enum):
    """The place of a linear layer in the model: tensor parallelism and quantization depend on it."""

    EMBEDDING = enum.auto()
    HEAD = enum.auto()
    QUERY = enum.auto()
    KEY = enum.auto()
    VALUE = enum.auto()
    ATTENTION_OUT = enum.auto()
    MLP_IN = enum.auto()
    """Gate or up projection of a dense MLP."""
    MLP_OUT = enum.auto()
    ROUTER = enum.auto()
    """Scores of the experts."""
    EXPERT_IN = enum.auto()
    """Gate or up projection of an expert."""
    EXPERT_OUT = enum.auto()


@dataclass(frozen=True)
class LinearSpec:
    """One linear layer of the model, whole."""

    name: str
    """Name without suffix, such as `model.layers.0.mlp.up_proj`; the weight is the tensor `<name>.weight`."""
    outputs: int
    inputs: int
    role: Role


class AttentionLinears(NamedTuple):
    q: LinearSpec
    k: LinearSpec
    v: LinearSpec
    out: LinearSpec


class MlpLinears(NamedTuple):
    """Linear layers of one MLP, be it a layer's own or an expert."""

    gate: LinearSpec
    up: LinearSpec
    down: LinearSpec


class ExpertLinears(NamedTuple):
    router: LinearSpec
    experts: tuple[MlpLinears, ...]


@dataclass(frozen=True)
class TensorNames:
    """Names of tensors without `.weight` and `.bias`; by default those of Hugging Face checkpoints.

    Tensors of layer 3 are called `<layers>.3.<name>`, those of its expert 5 `<layers>.3.<experts>.5.<name>`.
    """

    embedding: str = "model.embed_tokens"
    norm: str = "model.norm"
    head: str = "lm_head"
    layers: str = "model.layers"
    attention_norm: str = "input_layernorm"
    query: str = "self_attn.q_proj"
    key: str = "self_attn.k_proj"
    value: str = "self_attn.v_proj"
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    attention_out: str = "self_attn.o_proj"
    mlp_norm: str = "post_attention_layernorm"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    expert_gate: str = "gate_proj"
    expert_up: str = "up_proj"
    expert_down: str = "down_proj"

    def of_layer(self, layer: int, name: str) -> str:
        return f"{self.layers}.{layer}.{name}"


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
    mlp_norm="ffn_norm",
    gate="ffn_gate",
    up="ffn_up",
    down="ffn_down",
)


@dataclass(frozen=True)
class GgufFormat:
    architecture: str
    """Value of `general.architecture`."""
    windowed: bool = False
    """Files of this family have a sliding window; those of another family of the same architecture have none."""
    rotates_neighbours: bool = False
    """Rows of queries and keys are permuted: ggml rotates dimensions `2i` and `2i + 1`, not `i` and `i + d/2`."""


@dataclass(frozen=True)
class Family:
    architecture: str
    """Name in `architectures` of config.json."""
    adapt: Callable[[ModelConfig, Fields], ModelConfig]
    """Sets what the family does its own way in a config that has all that families share."""
    names: TensorNames = TensorNames()
    gguf: GgufFormat | None = None
    default_head_dim: int | None = None
    """Width of a head where config.json is silent; None divides the hidden size by the heads."""
    own_keys: frozenset[str] = frozenset()
    """Keys of config.json that `adapt` handles although other families must not have them."""


@dataclass(frozen=True)
class ExpertsConfig:
    """Layers with several MLPs, of which every token goes through a few (Shazeer et al. 2017)."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    """Inner channels of each expert."""
    renormalize: bool
    """The probabilities of a token's experts are scaled to add up to one."""
    layers: frozenset[int]
    """Layers that have experts; the others are dense."""


@dataclass(frozen=True)
class ModelConfig:
    family: Family
    names: TensorNames
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position_embeddings: int
    """Tokens of the longest sequence that the model was made for, rotary scaling included."""
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    """Bias of the projection behind attention."""
    sliding_windows: tuple[int | None, ...]
    """Window of each layer: a token sees itself and `window - 1` tokens before it; None sees all."""
    dtype: str
    """Number format of the checkpoint; of a quantized one, that of activations."""
    quantization: Quantization | None
    """Format of the checkpoint's linear layers; None where all are dense."""
    qk_norm: bool = False
    """Queries and keys are normalised per head before the rotary embedding."""
    mlp_bias: bool = False
    experts: ExpertsConfig | None = None
    """None where all layers are dense."""

    @property
    def embedding(self) -> LinearSpec:
        return LinearSpec(self.names.embedding, self.vocab_size, self.hidden_size, Role.EMBEDDING)

    @property
    def head(self) -> LinearSpec:
        """The layer that computes logits; a tied head is the embedding table."""
        if self.tie_word_embeddings:
            return self.embedding
        return LinearSpec(self.names.head, self.vocab_size, self.hidden_size, Role.HEAD)

    def attention_linears(self, layer: int) -> AttentionLinears:
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        names, hidden = self.names, self.hidden_size

        def spec(name: str, outputs: int, inputs: int, role: Role) -> LinearSpec:
            return LinearSpec(names.of_layer(layer, name), outputs, inputs, role)

        return AttentionLinears(
            q=spec(names.query, q_size, hidden, Role.QUERY),
            k=spec(names.key, kv_size, hidden, Role.KEY),
            v=spec(names.value, kv_size, hidden, Role.VALUE),
            out=spec(names.attention_out, hidden, q_size, Role.ATTENTION_OUT),
        )

    def mlp_linears(self, layer: int) -> MlpLinears:
        names = self.names
        spelled = (names.gate, names.up, names.down)
        return self._mlp(layer, spelled, self.intermediate_size, (Role.MLP_IN, Role.MLP_OUT))

    def expert_linears(self, layer: int) -> ExpertLinears | None:
        """Router and experts of a layer; None where the layer is dense, and has `mlp_linears` instead."""
        experts, names = self.experts, self.names
        if experts is None or layer not in experts.layers:
            return None
        ends = (names.expert_gate, names.expert_up, names.expert_down)
        router, count = names.of_layer(layer, names.router), experts.num_experts
        return ExpertLinears(
            LinearSpec(router, count, self.hidden_size, Role.ROUTER),
            tuple(
                self._mlp(
                    layer,
                    [f"{names.experts}.{index}.{end}" for end in ends],
                    experts.intermediate_size,
                    (Role.EXPERT_IN, Role.EXPERT_OUT),
                )
                for index in range(count)
            ),
        )

    def _mlp(
        self, layer: int, names: Sequence[str], inner: int, roles: tuple[Role, Role]
    ) -> MlpLinears:
        """The MLP of `inner` channels whose linear layers have these names in a layer."""
        gate, up, down = (self.names.of_layer(layer, name) for name in names)
        hidden, (into, out) = self.hidden_size, roles
        return MlpLinears(
            LinearSpec(gate, inner, hidden, into),
            LinearSpec(up, inner, hidden, into),
            LinearSpec(down, hidden, inner, out),
        )

    def layer_linears(self, layer: int, experts: range) -> Iterator[LinearSpec]:
        """All linear layers of a layer; of its experts, if it has any, those in the range."""
        yield from self.attention_linears(layer)
        sparse = self.expert_linears(layer)
        if sparse is None:
            yield from self.mlp_linears(layer)
        else:
            yield sparse.router
            for mlp in sparse.experts[experts.start : experts.stop]:
                yield from mlp

    def weights_per_token(self, layer: int) -> int:
        """Weights of a layer that one token is multiplied with."""
        chosen = range(self.experts.experts_per_token if self.experts else 0)
        return sum(m.outputs * m.inputs for m in self.layer_linears(layer, chosen))
