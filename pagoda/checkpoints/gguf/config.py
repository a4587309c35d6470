"""The metadata of a GGUF file in the words of a Hugging Face config.json."""

from __future__ import annotations

from dataclasses import dataclass

from pagoda.checkpoints.gguf.reader import GgufFile, Metadata
from pagoda.errors import ConfigError

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
DTYPE = "bfloat16"
"""Of activations, unless the operator says otherwise: a GGUF file does not say what its model was trained in."""


@dataclass(frozen=True)
class GroupedCodes:
    """Codes of so many bits, with a float16 scale for each group of inputs, and perhaps a float16 offset."""

    bits: int
    offsets: bool

    @property
    def bits_per_weight(self) -> float:
        return self.bits + (32 if self.offsets else 16) / GROUP_SIZE


GROUP_SIZE = 32
HELD_AS = {
    "Q4_0": GroupedCodes(4, offsets=False),
    "Q4_1": GroupedCodes(4, offsets=True),
    "Q4_K": GroupedCodes(4, offsets=True),
    "Q5_0": GroupedCodes(8, offsets=False),
    "Q5_1": GroupedCodes(8, offsets=True),
    "Q5_K": GroupedCodes(8, offsets=True),
    "Q8_0": GroupedCodes(8, offsets=False),
    "Q2_K": GroupedCodes(8, offsets=False),
    "Q3_K": GroupedCodes(8, offsets=False),
    "Q6_K": GroupedCodes(8, offsets=False),
}
"""What the types of quantized matrices become in memory; the others become the dtype of activations."""

EMBEDDING, HEAD = "token_embd.weight", "output.weight"
FREQUENCY_FACTORS = "rope_freqs.weight"

_OTHER_MODELS = ("expert_count", "attention.clamp_kqv", "logit_scale", "attention.scale")
"""Keys that change the arithmetic, in files of the same architectures by name."""


def config_values(file: GgufFile) -> dict[str, object]:
    """What the model's config.json would say.

    Raises:
        ConfigError: a key is missing or wrong, or the model is not one that Pagoda runs.
    """
    metadata = file.metadata
    architecture = _architecture(metadata)
    _refuse_other_models(metadata, architecture)
    hidden_size = metadata.positive(f"{architecture}.embedding_length")
    num_heads = metadata.positive(f"{architecture}.attention.head_count")
    values = {
        "architectures": [ARCHITECTURES[architecture]],
        "vocab_size": _vocab_size(file, hidden_size),
        "hidden_size": hidden_size,
        "intermediate_size": metadata.positive(f"{architecture}.feed_forward_length"),
        "num_hidden_layers": _num_layers(file, architecture),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.positive(
            f"{architecture}.attention.head_count_kv", num_heads
        ),
        "head_dim": _head_dim(metadata, architecture, hidden_size // num_heads),
        "rms_norm_eps": metadata.number(f"{architecture}.attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.number(f"{architecture}.rope.freq_base", 10_000.0),
        "rope_scaling": _rope_scaling(metadata, architecture),
        "max_position_embeddings": metadata.positive(f"{architecture}.context_length"),
        "tie_word_embeddings": HEAD not in file.tensors,
        "torch_dtype": DTYPE,
    }
    return values | _sliding_window(metadata, architecture)


def _architecture(metadata: Metadata) -> str:
    architecture = metadata.text("general.architecture")
    if architecture not in ARCHITECTURES:
        metadata.refuse("general.architecture", f"must be one of {', '.join(ARCHITECTURES)}")
    return architecture


def _refuse_other_models(metadata: Metadata, architecture: str) -> None:
    for name in _OTHER_MODELS:
        key = f"{architecture}.{name}"
        if not metadata.is_zero(key):
            metadata.refuse(key, "is for models that Pagoda does not run")


def _vocab_size(file: GgufFile, hidden_size: int) -> int:
    """The rows of the embedding table; tokens without a row could not be computed."""
    table = file.tensor(EMBEDDING)
    if len(table.shape) != 2 or table.shape[1] != hidden_size:
        raise ConfigError(
            f"{file.path}: tensor {EMBEDDING} has shape {list(table.shape)}, "
            f"but its rows must be of the embedding length {hidden_size}."
        )
    rows, key = table.shape[0], "tokenizer.ggml.tokens"
    num_tokens = len(file.metadata.texts(key)) if key in file.metadata else 0
    if num_tokens > rows:
        raise ConfigError(
            f"{file.path}: {key} has {num_tokens} tokens, but {EMBEDDING} {rows} rows."
        )
    return rows


def _num_layers(file: GgufFile, architecture: str) -> int:
    key = f"{architecture}.block_count"
    num_layers = file.metadata.positive(key)
    if num_layers > len(file.tensors):
        file.metadata.refuse(key, f"must not be more than the {len(file.tensors)} tensors")
    return num_layers


def _head_dim(metadata: Metadata, architecture: str, usual: int) -> int:
    key = f"{architecture}.attention.key_length"
    head_dim = metadata.positive(key, max(1, usual))
    for name in ("attention.value_length", "rope.dimension_count"):
        if metadata.positive(f"{architecture}.{name}", head_dim) != head_dim:
            metadata.refuse(f"{architecture}.{name}", f"must be the key length {head_dim}")
    if head_dim % 2:
        metadata.refuse(key, "must be even")
    return head_dim


def _rope_scaling(metadata: Metadata, architecture: str) -> dict[str, object] | None:
    prefix = f"{architecture}.rope.scaling"
    kind = metadata.text(f"{prefix}.type", "none")
    if kind == "none":
        # Files of 2023 have one factor instead.
        factor = metadata.number(f"{architecture}.rope.scale_linear", 1.0)
        return None if factor == 1 else {"rope_type": "linear", "factor": factor}
    if kind == "linear":
        return {"rope_type": kind, "factor": metadata.number(f"{prefix}.factor")}
    if kind != "yarn":
        metadata.refuse(f"{prefix}.type", "must be one of none, linear, yarn")
    for name in ("attn_factor", "yarn_ext_factor", "yarn_attn_factor"):
        if metadata.number(f"{prefix}.{name}", 1.0) != 1:
            metadata.refuse(f"{prefix}.{name}", "must be 1")
    if not metadata.is_zero(f"{prefix}.yarn_log_multiplier"):
        metadata.refuse(f"{prefix}.yarn_log_multiplier", "must be absent or 0")
    return {
        "rope_type": kind,
        "factor": metadata.number(f"{prefix}.factor"),
        "original_max_position_embeddings": metadata.positive(f"{prefix}.original_context_length"),
        "beta_fast": metadata.number(f"{prefix}.yarn_beta_fast", 32.0),
        "beta_slow": metadata.number(f"{prefix}.yarn_beta_slow", 1.0),
    }


def _sliding_window(metadata: Metadata, architecture: str) -> dict[str, object]:
    key = f"{architecture}.attention.sliding_window"
    window = metadata.count(key, 0)
    if window == 0:
        return {}
    if architecture != "llama":
        metadata.refuse(key, f"is not supported in models of {architecture}")
    return {"architectures": ["MistralForCausalLM"], "sliding_window": window}
