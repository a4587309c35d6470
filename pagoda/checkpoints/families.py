"""Families of models that Pagoda runs: what each does its own way, and its line in `FAMILIES`."""

from __future__ import annotations

from dataclasses import replace

from pagoda.checkpoints.fields import Fields
from pagoda.checkpoints.model_config import (
    ExpertsConfig,
    Family,
    GgufFormat,
    ModelConfig,
    TensorNames,
)

MAX_EXPERTS = 1024
"""Experts of a layer that kernels have room for."""
_KINDS = ("full_attention", "sliding_attention")


def _llama(config: ModelConfig, fields: Fields) -> ModelConfig:
    """Llama 2 and 3, and models of the same shape: Yi, SmolLM2, TinyLlama, DeepSeek-R1 distillations."""
    return replace(config, mlp_bias=fields.flag("mlp_bias", False))


def _mistral(config: ModelConfig, fields: Fields) -> ModelConfig:
    """Mistral 7B and Nemo: Llama with a sliding window."""
    # An absent field means 4096 (the first Mistral), an explicit null means none.
    if fields.values.get("sliding_window", 4096) is None:
        return config
    window = fields.positive("sliding_window", 4096)
    return replace(config, sliding_windows=(window,) * config.num_layers)


def _mixtral(config: ModelConfig, fields: Fields) -> ModelConfig:
    """Mixtral: Mistral with experts in every layer (Jiang et al. 2024)."""
    has_window = fields.values.get("sliding_window") is not None
    window = fields.positive("sliding_window") if has_window else None
    num_experts, per_token = _expert_counts(fields, "num_local_experts", (8, 2))
    return replace(
        config,
        sliding_windows=(window,) * config.num_layers,
        experts=ExpertsConfig(
            num_experts,
            per_token,
            intermediate_size=config.intermediate_size,
            renormalize=True,
            layers=frozenset(range(config.num_layers)),
        ),
    )


def _qwen2(config: ModelConfig, fields: Fields) -> ModelConfig:
    """Qwen2 and Qwen2.5: Llama with biases of queries, keys and values."""
    return replace(
        config,
        qkv_bias=True,
        output_bias=False,
        sliding_windows=_layer_windows(fields, config.num_layers),
    )


def _qwen3(config: ModelConfig, fields: Fields) -> ModelConfig:
    """Qwen3: Llama with norms of queries and keys."""
    windows = _layer_windows(fields, config.num_layers)
    return replace(config, qk_norm=True, sliding_windows=windows)


def _qwen3_moe(config: ModelConfig, fields: Fields) -> ModelConfig:
    """Qwen3-MoE: Qwen3 with experts in some or all layers."""
    windowed = fields.flag("use_sliding_window", False)
    window = fields.positive("sliding_window", 4096) if windowed else None
    return replace(
        config,
        qk_norm=True,
        sliding_windows=(window,) * config.num_layers,
        experts=_experts(fields, config.num_layers),
    )


def _experts(fields: Fields, num_layers: int) -> ExpertsConfig | None:
    # New files spell the field as Mixtral does.
    name = "num_local_experts" if "num_local_experts" in fields.values else "num_experts"
    if fields.values.get(name) == 0:
        return None  # all layers are dense
    num_experts, per_token = _expert_counts(fields, name, (128, 8))
    return ExpertsConfig(
        num_experts,
        per_token,
        intermediate_size=fields.positive("moe_intermediate_size", 768),
        renormalize=fields.flag("norm_topk_prob", False),
        layers=_sparse_layers(fields, num_layers),
    )


def _sparse_layers(fields: Fields, num_layers: int) -> frozenset[int]:
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


def _expert_counts(fields: Fields, name: str, defaults: tuple[int, int]) -> tuple[int, int]:
    """Experts of a layer (the field `name`), and experts that each token goes through."""
    num_experts = fields.positive(name, defaults[0])
    if num_experts > MAX_EXPERTS:
        fields.refuse(name, f"must be at most {MAX_EXPERTS}")
    per_token = fields.positive("num_experts_per_tok", defaults[1])
    if per_token > num_experts:
        fields.refuse("num_experts_per_tok", f"must be at most {name} ({num_experts})")
    return num_experts, per_token


def _layer_windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    """Window of each layer: by `layer_types`, or of the layers from `max_window_layers` on."""
    if not fields.flag("use_sliding_window", False):
        return (None,) * num_layers
    window = fields.positive("sliding_window", 4096)
    kinds = fields.values.get("layer_types")
    if kinds is None:
        num_full = fields.positive("max_window_layers", 28)
        return tuple(None if layer < num_full else window for layer in range(num_layers))
    if (
        not isinstance(kinds, list)
        or len(kinds) != num_layers
        or any(k not in _KINDS for k in kinds)
    ):
        fields.refuse("layer_types", f"must be a list of {num_layers} of {', '.join(_KINDS)}")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


_MIXTRAL_NAMES = TensorNames(
    router="block_sparse_moe.gate",
    experts="block_sparse_moe.experts",
    expert_gate="w1",
    expert_up="w3",
    expert_down="w2",
)
FAMILIES: dict[str, Family] = {
    family.architecture: family
    for family in (
        Family(
            "LlamaForCausalLM",
            _llama,
            gguf=GgufFormat("llama", rotates_neighbours=True),
            own_keys=frozenset({"mlp_bias"}),
        ),
        Family(
            "MistralForCausalLM",
            _mistral,
            gguf=GgufFormat("llama", windowed=True, rotates_neighbours=True),
        ),
        Family("MixtralForCausalLM", _mixtral, names=_MIXTRAL_NAMES),
        Family("Qwen2ForCausalLM", _qwen2, gguf=GgufFormat("qwen2")),
        Family("Qwen3ForCausalLM", _qwen3, gguf=GgufFormat("qwen3"), default_head_dim=128),
        Family("Qwen3MoeForCausalLM", _qwen3_moe, default_head_dim=128),
    )
}
"""Families by their names in `architectures` of config.json."""
GGUF_FAMILIES: dict[tuple[str, bool], Family] = {
    (family.gguf.architecture, family.gguf.windowed): family
    for family in FAMILIES.values()
    if family.gguf is not None
}
"""Families by `general.architecture` of GGUF files, and by whether a file has a sliding window."""
