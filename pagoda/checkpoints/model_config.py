"""The shape of a decoder model, read from a Hugging Face config.json."""

from __future__ import annotations

import enum
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.quantization_config import parse_quantization
from pagoda.checkpoints.weight_formats import Quantization
from pagoda.errors import ConfigError

DTYPES = ("float32", "bfloat16", "float16")
MAX_EXPERTS = 1024
"""Of a layer; what kernels have room for."""


@dataclass(frozen=True)
class LinearScaling:
    """Positions are divided by `factor` (Chen et al. 2023)."""

    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """Low frequencies are divided by `factor`, high ones kept, those between blended (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class YarnScaling:
    """NTK-by-parts interpolation, with attention scaled by `attention_factor` (Peng et al. 2023)."""

    factor: float
    original_max_position_embeddings: int
    attention_factor: float | None
    beta_fast: float
    beta_slow: float
    mscale: float | None
    mscale_all_dim: float | None
    truncate: bool


@dataclass(frozen=True)
class FrequencyFactors:
    """Each frequency is divided by a number of its own (how GGUF files write `Llama3Scaling`)."""

    factors: tuple[float, ...]
    """One for each pair of dimensions."""


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | FrequencyFactors


class Split(enum.Enum):
    """How tensor-parallel ranks share a linear map: what its outputs, or its inputs, are cut along."""

    HEADS = enum.auto()
    """Outputs, by query heads."""
    KV_HEADS = enum.auto()
    """Outputs, by KV heads."""
    FROM_HEADS = enum.auto()
    """Inputs, by query heads."""
    INNER = enum.auto()
    """Outputs, by the inner channels of an MLP."""
    FROM_INNER = enum.auto()
    """Inputs, by the inner channels of an MLP."""
    EXPERT_INNER = enum.auto()
    """Outputs, by the inner channels of an expert, unless ranks hold whole experts."""
    FROM_EXPERT_INNER = enum.auto()
    """Inputs, by the same."""
    VOCABULARY = enum.auto()
    """Outputs, by tokens."""
    WHOLE = enum.auto()
    """Not at all: every rank holds it."""


@dataclass(frozen=True)
class LinearMap:
    name: str
    """Such as `model.layers.0.mlp.up_proj`; its weight is the tensor of that name with `.weight` behind."""
    outputs: int
    inputs: int
    split: Split


@dataclass(frozen=True)
class AttentionMaps:
    """The linear maps of one layer's attention."""

    q: LinearMap
    k: LinearMap
    v: LinearMap
    out: LinearMap

    def __iter__(self) -> Iterator[LinearMap]:
        return iter((self.q, self.k, self.v, self.out))


@dataclass(frozen=True)
class MlpMaps:
    """The linear maps of one layer's MLP."""

    gate: LinearMap
    up: LinearMap
    down: LinearMap

    def __iter__(self) -> Iterator[LinearMap]:
        return iter((self.gate, self.up, self.down))


@dataclass(frozen=True)
class ExpertMaps:
    """The linear maps of one layer's experts."""

    router: LinearMap
    experts: tuple[MlpMaps, ...]


@dataclass(frozen=True)
class ExpertNames:
    """What a family calls the maps of its experts, behind the name of the layer."""

    router: str
    experts: str
    """Expert 3 is below this name and `.3`."""
    gate: str
    up: str
    down: str


QWEN_EXPERTS = ExpertNames("mlp.gate", "mlp.experts", "gate_proj", "up_proj", "down_proj")
MIXTRAL_EXPERTS = ExpertNames(
    "block_sparse_moe.gate", "block_sparse_moe.experts", gate="w1", up="w3", down="w2"
)


@dataclass(frozen=True)
class ExpertsConfig:
    """Layers whose MLP is several, of which every token goes through a few (Shazeer et al. 2017)."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    """Of each expert."""
    renormalize: bool
    """Whether the probabilities of a token's experts are made to add up to one."""
    layers: frozenset[int]
    """The other layers are dense."""
    names: ExpertNames


@dataclass(frozen=True)
class ModelConfig:
    """All that the decoder needs to know; the families differ in nothing else."""

    architecture: str
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
    """The longest sequence that the model was made for, rotary scaling included."""
    tie_word_embeddings: bool
    qk_norm: bool
    """Queries and keys are normalised per head before the rotary embedding."""
    qkv_bias: bool
    output_bias: bool
    """Of the projection behind attention."""
    mlp_bias: bool
    sliding_windows: tuple[int | None, ...]
    """Per layer: a token sees itself and this many less one before it; None sees all."""
    dtype: str
    """Of the checkpoint; of a quantized one, that of activations."""
    quantization: Quantization | None
    """How the checkpoint holds its linear maps; None where all are dense."""
    experts: ExpertsConfig | None
    """None where all layers are dense."""

    @property
    def embedding(self) -> LinearMap:
        return LinearMap("model.embed_tokens", self.vocab_size, self.hidden_size, Split.VOCABULARY)

    @property
    def head(self) -> LinearMap:
        """Of logits; it may be the embedding table."""
        if self.tie_word_embeddings:
            return self.embedding
        return LinearMap("lm_head", self.vocab_size, self.hidden_size, Split.VOCABULARY)

    def attention_maps(self, layer: int) -> AttentionMaps:
        prefix, hidden = f"model.layers.{layer}.self_attn", self.hidden_size
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return AttentionMaps(
            q=LinearMap(f"{prefix}.q_proj", q_size, hidden, Split.HEADS),
            k=LinearMap(f"{prefix}.k_proj", kv_size, hidden, Split.KV_HEADS),
            v=LinearMap(f"{prefix}.v_proj", kv_size, hidden, Split.KV_HEADS),
            out=LinearMap(f"{prefix}.o_proj", hidden, q_size, Split.FROM_HEADS),
        )

    def mlp_maps(self, layer: int) -> MlpMaps:
        prefix, hidden, inner = (
            f"model.layers.{layer}.mlp",
            self.hidden_size,
            self.intermediate_size,
        )
        return MlpMaps(
            gate=LinearMap(f"{prefix}.gate_proj", inner, hidden, Split.INNER),
            up=LinearMap(f"{prefix}.up_proj", inner, hidden, Split.INNER),
            down=LinearMap(f"{prefix}.down_proj", hidden, inner, Split.FROM_INNER),
        )

    def expert_maps(self, layer: int) -> ExpertMaps | None:
        """None where the layer is dense, and has `mlp_maps` instead."""
        experts = self.experts
        if experts is None or layer not in experts.layers:
            return None
        names, hidden, inner = experts.names, self.hidden_size, experts.intermediate_size
        prefix = f"model.layers.{layer}"

        def maps(name: str) -> MlpMaps:
            return MlpMaps(
                gate=LinearMap(f"{name}.{names.gate}", inner, hidden, Split.EXPERT_INNER),
                up=LinearMap(f"{name}.{names.up}", inner, hidden, Split.EXPERT_INNER),
                down=LinearMap(f"{name}.{names.down}", hidden, inner, Split.FROM_EXPERT_INNER),
            )

        return ExpertMaps(
            LinearMap(f"{prefix}.{names.router}", experts.num_experts, hidden, Split.WHOLE),
            tuple(maps(f"{prefix}.{names.experts}.{i}") for i in range(experts.num_experts)),
        )

    def weights_per_token(self, layer: int) -> int:
        """How many weights of a layer a token is multiplied with."""
        maps, experts = list(self.attention_maps(layer)), self.expert_maps(layer)
        if self.experts is None or experts is None:
            maps += self.mlp_maps(layer)
        else:
            maps.append(experts.router)
            for mlp in experts.experts[: self.experts.experts_per_token]:
                maps += mlp
        return sum(m.outputs * m.inputs for m in maps)


def read_model_config(directory: Path) -> ModelConfig:
    """The config.json in a model directory.

    Raises:
        ConfigError: the file is missing, corrupt or describes a model that Pagoda does not run.
    """
    path = directory / "config.json"
    try:
        text = path.read_bytes()
    except FileNotFoundError as error:
        raise ConfigError(f"{path} is missing; give a Hugging Face model directory.") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON.") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold a JSON object.")
    return parse_model_config(values, source=str(path))


def parse_model_config(values: Mapping[str, object], *, source: str) -> ModelConfig:
    """Checks the content of a config.json; `source` names it in errors.

    Raises:
        ConfigError: a field is missing or wrong, or the model is not one that Pagoda runs.
    """
    fields = Fields(values, source)
    architecture = _architecture(fields)
    _refuse_unsupported(fields)
    hidden_size = fields.positive("hidden_size")
    num_layers = fields.positive("num_hidden_layers")
    num_heads = fields.positive("num_attention_heads")
    num_kv_heads = fields.positive("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        fields.refuse("num_key_value_heads", f"must divide num_attention_heads ({num_heads})")
    # A Qwen3 head is 128 wide unless the file says otherwise, whatever the hidden size.
    usual_head_dim = 128 if architecture in QWEN3 else hidden_size // num_heads
    head_dim = fields.positive("head_dim", max(1, usual_head_dim))
    if head_dim % 2:
        fields.refuse("head_dim", "must be even")
    scaling, rope_theta = _rope(fields)
    attention_bias = architecture == "Qwen2ForCausalLM" or fields.flag("attention_bias", False)
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.positive("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.positive("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=rope_theta,
        rope_scaling=scaling,
        max_position_embeddings=_longest_sequence(fields, scaling),
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        qk_norm=architecture in QWEN3,
        qkv_bias=attention_bias,
        output_bias=attention_bias and architecture != "Qwen2ForCausalLM",
        mlp_bias=architecture == "LlamaForCausalLM" and fields.flag("mlp_bias", False),
        sliding_windows=_sliding_windows(fields, architecture, num_layers),
        dtype=_dtype(fields),
        quantization=parse_quantization(fields),
        experts=_experts(fields, architecture, num_layers),
    )


ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)
QWEN3 = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")


def _architecture(fields: Fields) -> str:
    named = fields.values.get("architectures")
    known = ", ".join(ARCHITECTURES)
    if not isinstance(named, list) or not named:
        raise ConfigError(f"{fields.source} names no architectures; Pagoda runs models of {known}.")
    for name in named:
        if name in ARCHITECTURES:
            return str(name)
    raise ConfigError(
        f"{fields.source}: architecture {named[0]!r} is not supported; Pagoda runs models of {known}."
    )


def _refuse_unsupported(fields: Fields) -> None:
    if fields.text("hidden_act", "silu") not in ("silu", "swish"):
        fields.refuse("hidden_act", "must be 'silu'")


def _experts(fields: Fields, architecture: str, num_layers: int) -> ExpertsConfig | None:
    if architecture == "MixtralForCausalLM":
        return ExpertsConfig(
            *_expert_counts(fields, "num_local_experts", 8, 2),
            intermediate_size=fields.positive("intermediate_size"),
            renormalize=True,
            layers=frozenset(range(num_layers)),
            names=MIXTRAL_EXPERTS,
        )
    # New files say it as Mixtral does.
    name = "num_local_experts" if "num_local_experts" in fields.values else "num_experts"
    # Zero experts are how Qwen3-MoE says that all layers are dense.
    if architecture != "Qwen3MoeForCausalLM" or fields.values.get(name) == 0:
        return None
    return ExpertsConfig(
        *_expert_counts(fields, name, 128, 8),
        intermediate_size=fields.positive("moe_intermediate_size", 768),
        renormalize=fields.flag("norm_topk_prob", False),
        layers=_sparse_layers(fields, num_layers),
        names=QWEN_EXPERTS,
    )


def _expert_counts(fields: Fields, name: str, usual: int, usual_per_token: int) -> tuple[int, int]:
    num_experts = fields.positive(name, usual)
    if num_experts > MAX_EXPERTS:
        fields.refuse(name, f"must be at most {MAX_EXPERTS}")
    per_token = fields.positive("num_experts_per_tok", usual_per_token)
    if per_token > num_experts:
        fields.refuse("num_experts_per_tok", f"must be at most {name} ({num_experts})")
    return num_experts, per_token


def _sparse_layers(fields: Fields, num_layers: int) -> frozenset[int]:
    """Every `decoder_sparse_step`-th layer but those that `mlp_only_layers` names."""
    step = fields.positive("decoder_sparse_step", 1)
    dense = fields.values.get("mlp_only_layers")
    dense = [] if dense is None else dense
    if not isinstance(dense, list) or any(
        not isinstance(layer, int) or isinstance(layer, bool) or not 0 <= layer < num_layers
        for layer in dense
    ):
        fields.refuse("mlp_only_layers", f"must be a list of layers from 0 to {num_layers - 1}")
    return frozenset(range(step - 1, num_layers, step)) - frozenset(dense)


def _dtype(fields: Fields) -> str:
    name = "dtype" if fields.values.get("dtype") is not None else "torch_dtype"
    dtype = fields.text(name, "float32").removeprefix("torch.")
    if dtype not in DTYPES:
        fields.refuse(name, f"must be one of {', '.join(DTYPES)}")
    return dtype


def _rope(fields: Fields) -> tuple[RopeScaling | None, float]:
    """Rotary scaling and base, spelled the old way (`rope_scaling`, `rope_theta`) or as `rope_parameters`."""
    rope = fields.table("rope_parameters") or fields.table("rope_scaling")
    theta = fields.number("rope_theta", 10_000.0)
    if rope is None:
        return None, theta
    theta = rope.number("rope_theta", theta)
    if rope.number("partial_rotary_factor", 1.0) != 1.0:
        rope.refuse("partial_rotary_factor", "must be 1.0")
    name = "rope_type" if rope.values.get("rope_type") is not None else "type"
    kind = rope.text(name, "default")
    if kind == "default":
        return None, theta
    if kind == "linear":
        return LinearScaling(rope.number("factor")), theta
    if kind == "llama3":
        return _llama3_scaling(rope), theta
    if kind != "yarn":
        rope.refuse(name, "must be one of default, linear, llama3, yarn")
    return _yarn_scaling(rope, fields), theta


def _llama3_scaling(rope: Fields) -> Llama3Scaling:
    return Llama3Scaling(
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_position_embeddings=rope.positive("original_max_position_embeddings"),
    )


def _yarn_scaling(rope: Fields, fields: Fields) -> YarnScaling:
    return YarnScaling(
        factor=rope.number("factor"),
        original_max_position_embeddings=rope.positive(
            "original_max_position_embeddings", fields.positive("max_position_embeddings")
        ),
        attention_factor=rope.optional_number("attention_factor"),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        mscale=rope.optional_number("mscale"),
        mscale_all_dim=rope.optional_number("mscale_all_dim"),
        truncate=rope.flag("truncate", True),
    )


def _longest_sequence(fields: Fields, scaling: RopeScaling | None) -> int:
    """As vLLM derives it: linear scaling and YaRN lengthen the context that is written in the file."""
    length = fields.positive("max_position_embeddings")
    if isinstance(scaling, LinearScaling):
        return int(length * scaling.factor)
    if isinstance(scaling, YarnScaling):
        return int(scaling.original_max_position_embeddings * scaling.factor)
    return length


def _sliding_windows(fields: Fields, architecture: str, num_layers: int) -> tuple[int | None, ...]:
    if architecture == "LlamaForCausalLM":
        return (None,) * num_layers
    if architecture == "MixtralForCausalLM":
        windowed = fields.values.get("sliding_window") is not None
        return (fields.positive("sliding_window") if windowed else None,) * num_layers
    if architecture == "MistralForCausalLM":
        # An absent field means 4096 (the first Mistral), an explicit null means none.
        windowed = (
            "sliding_window" not in fields.values or fields.values["sliding_window"] is not None
        )
        return (fields.positive("sliding_window", 4096) if windowed else None,) * num_layers
    if not fields.flag("use_sliding_window", False):
        return (None,) * num_layers
    window = fields.positive("sliding_window", 4096)
    if architecture == "Qwen3MoeForCausalLM":
        return (window,) * num_layers
    return tuple(
        window if kind == "sliding_attention" else None for kind in _layer_types(fields, num_layers)
    )


def _layer_types(fields: Fields, num_layers: int) -> list[str]:
    kinds = fields.values.get("layer_types")
    if kinds is None:
        num_full = fields.positive("max_window_layers", 28)
        return [
            "full_attention" if i < num_full else "sliding_attention" for i in range(num_layers)
        ]
    known = ("full_attention", "sliding_attention")
    if (
        not isinstance(kinds, list)
        or len(kinds) != num_layers
        or any(k not in known for k in kinds)
    ):
        fields.refuse("layer_types", f"must be a list of {num_layers} of {', '.join(known)}")
    return kinds
