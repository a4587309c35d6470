# SPDX-License-Identifier: Apache-2.0
"""Specification of a layer: attention, MLP or experts, and norms; no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pagoda.checkpoints.distances import Disentangled, DistanceBuckets
from pagoda.checkpoints.expert_routing import ExpertRouting
from pagoda.checkpoints.latent_attention import LatentSpec
from pagoda.checkpoints.linears import LinearRole, LinearSpec
from pagoda.checkpoints.rope import (
    TemperatureSpec,
)
from pagoda.checkpoints.scan_layers import LightningSpec, Mamba2Spec, MambaSpec
from pagoda.checkpoints.shared_blocks import SharedSpec
from pagoda.checkpoints.state_layers import ChannelDeltaSpec, GatedDeltaSpec, ShortConvSpec
from pagoda.checkpoints.tensor_names import TensorNames

Activation = Literal["silu", "gelu_tanh", "gelu", "relu", "relu2", "xielu"]
"""Activations of MLPs: GELU by tanh or by erf, ReLU, its square, and xIELU, whose numbers are weights."""


XIELU = ("alpha_p", "alpha_n", "beta", "eps")
"""Names of the numbers of xIELU (Huang and Schlag 2024)."""


@dataclass(frozen=True)
class OwnHeads:
    """Sizes of the heads of a layer whose heads are narrower, or whose keys have fewer, than the model's.

    They are filled with zeros, and keys and values repeated, up to the model's sizes."""

    head_dim: int
    """Elements of queries and keys."""
    value_dim: int
    num_kv_heads: int
    num_heads: int | None = None
    """Heads of queries, evenly over those of keys; None where they are as many as the model's."""


@dataclass(frozen=True)
class AttentionSpec:
    """Attention of one layer."""

    scale: float
    """Factor of products of queries and keys."""
    window: int | None = None
    """A token sees itself and `window - 1` tokens before it; None sees all."""
    rotary: str = "default"
    """Name of the rotary table in `ModelSpec.rotary`."""
    qk_norm: Literal["head", "each", "all", "unit", "layer"] | None = None
    """Queries and keys are normed before the rotary embedding, every head by itself or all of a token together.

    Norms of `each` are of every head, too, which have weights of their own (PLaMo 2). Norms of `unit` are
    of every head, and have no weights, so they may as well come behind (Llama 4). Those of `layer` are
    layer norms of every head, others root mean squares."""
    norms_rotated: bool = False
    """Norms of queries and keys come behind the rotary embedding (Hunyuan)."""
    clip: float | None = None
    """Queries, keys and values are brought between this number's negative and itself (OLMo, MPT)."""
    alibi: bool = False
    """Scores are less by the distance of tokens times a slope of each head (ALiBi, Press et al. 2021)."""
    qkv_bias: bool = False
    key_bias: bool = True
    """False of keys that have no bias although queries and values do (Whisper)."""
    output_bias: bool = False
    """Bias of the projection behind attention."""
    chunk: int | None = None
    """A token sees tokens from the last multiple of this on (Llama 4); None sees all."""
    sinks: bool = False
    """Each head has one more score, whose value is zero (gpt-oss)."""
    temperature: TemperatureSpec | None = None
    """Queries are scaled by their positions."""
    softcap: float | None = None
    """Scores s become c tanh(s / c) (Gemma 2)."""
    output_gate: bool = False
    """Outputs are times a sigmoid of a map of hidden states, whose rows lie behind each head's queries."""
    gates_heads: bool = False
    """Gates are numbers of heads, not of their elements (Step 3.5)."""
    causal: bool = True
    """A token sees none behind itself; encoders see all of a text, which is computed in one step."""
    latent: LatentSpec | None = None
    """Sizes of latent attention, the same in all layers of a model; None of plain attention."""
    own_heads: OwnHeads | None = None
    """Sizes where they are not the model's (Gemma 4, MiMo-V2)."""
    value_norm: bool = False
    """Values of every head are brought to a mean square of one (Gemma 3n)."""
    values_are_keys: bool = False
    """Values are keys before their norm and rotation (Gemma 4)."""
    value_scale: float = 1.0
    """Factor of values (MiMo-V2)."""
    output_norm: bool = False
    """Outputs of all heads together are normed in front of the map back (BitNet)."""
    kv_layer: int | None = None
    """The layer before this one whose keys and values it attends to, where it has none of its own (Gemma 3n)."""
    crosses: bool = False
    """Keys and values are those of an encoder's outputs, all of which a token sees (Whisper, T5)."""
    distances: DistanceBuckets | Disentangled | None = None
    """Scores that depend on distances of tokens, alike in all layers of a model that see its own tokens."""

    @property
    def kind(self) -> Literal["full", "latent", "window", "chunk", "step"]:
        if self.latent is not None:
            return "latent"
        if not self.causal:
            return "step"
        if self.chunk is not None:
            return "chunk"
        return "full" if self.window is None else "window"

    @property
    def reach(self) -> int:
        """Tokens of a window or of a chunk; 0 where all are kept, as encoders keep them for a step."""
        return (self.window or self.chunk or 0) if self.causal else 0


@dataclass(frozen=True)
class MlpSpec:
    """A gated MLP, `down(activation(gate(x)) * up(x))` (Shazeer 2020), or a plain `down(activation(up(x)))`."""

    intermediate_size: int
    """Inner channels."""
    bias: bool = False
    activation: Activation = "silu"
    gated: bool = True
    down_bias: bool | None = None
    """Bias of the map back to hidden states, where it is not as `bias`."""
    deviations: float | None = None
    """Gates count by how much they are above the mean of all plus so many standard deviations (Gemma 3n)."""
    gate_factor: float = 1.0
    """Multiplier of gates, and of what the map back gives (Falcon-H1)."""
    down_factor: float = 1.0
    inner_norm: bool = False
    """Inner channels are normed in front of the map back (BitNet)."""
    limit: float | None = None
    """Activated gates are at most this, and ups from its negative to it (Step 3.5)."""
    numbers: tuple[float, ...] = ()
    """Numbers of xIELU, in the order of `XIELU`, where they are not tensors."""

    @property
    def has_number_tensors(self) -> bool:
        return self.activation == "xielu" and not self.numbers

    @property
    def has_down_bias(self) -> bool:
        return self.bias if self.down_bias is None else self.down_bias

    def vectors(self, names: TensorNames, _: int) -> list[tuple[str, int]]:
        """Names within a layer, and sizes, of its numbers besides maps."""
        return [(f"{names.activation}.{name}", 1) for name in XIELU * self.has_number_tensors]


@dataclass(frozen=True)
class ClampedGate:
    """Gates of experts: (up + 1) gate sigmoid(alpha gate), both clamped (gpt-oss)."""

    alpha: float
    limit: float
    """Gates are at most this; ups are from its negative to it."""


@dataclass(frozen=True)
class ExpertsSpec:
    """Several MLPs, of which every token goes through a few (Shazeer et al. 2017)."""

    routing: ExpertRouting
    intermediate_size: int
    """Inner channels of each expert."""
    correction: bool = False
    """A number of each expert is added to its score for the choice (Wang et al. 2024)."""
    shared_size: int = 0
    """Inner channels of the MLP that every token goes through besides (Dai et al. 2024); 0 for none."""
    scores_shared: bool = False
    """The output of the shared MLP is times a sigmoid of a score of its own."""
    bias: bool = False
    """Biases of the router and of all linear layers of experts."""
    clamp: ClampedGate | None = None
    """Gates of experts where they are not plain SiLU."""
    limit: float | None = None
    """Limit of the experts' activated gates and ups, and `shared_limit` of the shared MLP's."""
    shared_limit: float | None = None
    jitter: float | None = None
    """Weights of experts come of sparse mixing, with this reach (Phi-3.5-MoE)."""
    identities: int = 0
    """The last experts, so many of them, give back what they are given (LongCat-Flash)."""
    carried: bool = False
    """Outputs of experts count behind the next layer."""
    early: bool = False
    """Experts have the input of attention, behind a norm of their own, and the shared MLP its output (Arctic)."""
    apart: bool = False
    """Experts and the shared MLP have norms of their own, and experts factors of their weights (Gemma 4)."""
    activation: Literal["silu", "gelu_tanh"] = "silu"
    """Activation of gated experts without clamped gates, and of the shared MLP."""
    latent_size: int | None = None
    """Elements of the vectors that experts are given and give in place of hidden states (Nemotron 3 Super)."""
    gated: bool = True
    """False of experts, and of a shared one, that are plain MLPs of squared ReLU (Nemotron-H)."""

    @property
    def num_stored(self) -> int:
        """Experts that have weights."""
        return self.routing.num_experts - self.identities

    def latent_linears(self, names: TensorNames, layer: int, hidden: int) -> tuple[LinearSpec, ...]:
        """Map of hidden states to what experts are given, and the one back; none where that is hidden states."""
        if self.latent_size is None:
            return ()
        sizes = {
            names.expert_latent: (self.latent_size, hidden),
            names.expert_latent_back: (hidden, self.latent_size),
        }
        return tuple(
            LinearSpec(names.of_layer(layer, name), *size, LinearRole.WHOLE_MAP)
            for name, size in sizes.items()
        )

    def vectors(self, names: TensorNames, hidden: int) -> list[tuple[str, int]]:
        """Names within a layer, and sizes, of its vectors besides maps."""
        count = self.routing.num_experts
        found = [(f"{names.experts_norm}.weight", hidden)] * self.early
        if self.apart:
            norms = ((name, hidden) for name in names.apart_norms)
            found += [*norms, (names.expert_factors, count)]
        return [*found, (names.correction, count)] if self.correction else found

    @property
    def shared(self) -> MlpSpec | None:
        """The MLP that every token goes through besides."""
        if not self.shared_size:
            return None
        activation: Activation = self.activation if self.gated else "relu2"
        limit = self.shared_limit
        return MlpSpec(self.shared_size, activation=activation, gated=self.gated, limit=limit)


StateSpec = (
    ShortConvSpec | GatedDeltaSpec | ChannelDeltaSpec | Mamba2Spec | MambaSpec | LightningSpec
)
"""Kinds of layers that keep a state."""
LayerKind = LatentSpec | StateSpec
"""Kinds of layers besides plain attention; `pagoda.model.loader` has what loads each."""


@dataclass(frozen=True)
class LayerSpec:
    attention: AttentionSpec
    mlp: MlpSpec | ExpertsSpec | None
    """None of a layer of attention, or of a state, alone."""
    pre_norm: bool = True
    """Norms in front of attention and of the MLP."""
    bare_attention: bool = False
    """No norm is in front of attention all the same (ModernBERT's first layer)."""
    post_norm: bool = False
    """Norms behind attention and behind the MLP, before their outputs are added."""
    norms_sums: bool = False
    """The norms behind attention and MLP are of the sums with their outputs (Vaswani et al. 2017)."""
    state: StateSpec | None = None
    """Kind of a layer that keeps a state, in place of attention."""
    replaced: Literal["map", "nothing"] | None = None
    """A map of hidden states, or nothing, is in the place of attention (Bercovich et al. 2024, Puzzle)."""
    same_input: bool = False
    """Attention, or a state, has the normed input of the layer in front, not its output (Falcon-H1)."""
    input_factor: float = 1.0
    """Multiplier of that input, and of what comes of it (Falcon-H1)."""
    output_factor: float = 1.0
    normed_residuals: tuple[float, float] | None = None
    """Outputs of attention, and of the MLP, are added to their normed inputs, times these (MiniMax-Text-01)."""
    begins_loop: bool = False
    """Hidden states come from the last layer, behind the norm there, as layers are gone through again (Ouro)."""
    shared: SharedSpec | None = None
    """The layer is a use of a block; what it gives is for the layer behind alone (Zamba2)."""
    joins_before: bool = False
    """A map of what the layer in front gives is added to the input of this one."""
    mixed_with: tuple[tuple[int, float], ...] = ()
    """Layers in front, of whose inputs that of this one takes up a share, one after the other (Solar Pro)."""
    parallel: bool = False
    """Attention and MLP have the same input, behind one norm (Wang and Komatsuzaki 2021)."""
    parallel_norms: bool = False
    """The MLP beside attention has a norm of its own of that input (GPT-NeoX)."""

    @property
    def has_mlp_norm(self) -> bool:
        """True if there is a norm in front of the MLP alone."""
        beside = self.parallel and not self.parallel_norms
        return self.mlp is not None and self.pre_norm and not beside

    @property
    def has_mlp_post_norm(self) -> bool:
        return self.mlp is not None and self.post_norm

    def inner_norms(self, names: TensorNames, layer: int, heads: int) -> list[tuple[str, int]]:
        """Names and sizes of norms in front of maps back, of elements of all `heads` and of an MLP."""
        found = [(names.output_norm, heads)] if self.attention.output_norm else []
        if isinstance(self.mlp, MlpSpec) and self.mlp.inner_norm:
            found.append((names.inner_norm, self.mlp.intermediate_size))
        return [(f"{names.of_layer(layer, name)}.weight", size) for name, size in found]

    @property
    def held(self) -> int:
        """Hidden states of a token that are there at once while the layer is computed, about."""
        early = isinstance(self.mlp, ExpertsSpec) and self.mlp.early
        return 2 + 2 * self.parallel + len(self.mixed_with) + early

    @property
    def keeps(self) -> bool:
        """False of a layer that keeps nothing of a sequence, or reads what another one keeps."""
        return self.replaced is None and self.attention.kv_layer is None

    @property
    def kv_kind(self) -> Literal["full", "latent", "window", "chunk", "step", "state"]:
        """Kind of the layer by what it keeps of a sequence."""
        return self.attention.kind if self.state is None else "state"

    @property
    def kind(self) -> LayerKind | None:
        """Sizes of that which is in the place of plain attention; None of plain attention."""
        return self.attention.latent if self.state is None else self.state


@dataclass(frozen=True)
class NormSpec:
    """Norms of hidden states."""

    eps: float
    kind: Literal["rms", "layer"] = "rms"
    """Root mean square (Zhang and Sennrich 2019), or mean and variance (Ba et al. 2016)."""
    bias: bool = False
    weight: bool = True
    """False of norms without weights (OLMo)."""
