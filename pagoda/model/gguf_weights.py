"""A model out of a GGUF file: its shape, and its weights by the names of a Hugging Face checkpoint."""

from __future__ import annotations

import math
import mmap
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from pagoda.backend.weights import GroupedWeight, LinearWeight
from pagoda.checkpoints.gguf.config import FREQUENCY_FACTORS, config_values
from pagoda.checkpoints.gguf.reader import GgufFile, GgufTensor
from pagoda.checkpoints.model_config import FrequencyFactors, ModelConfig, parse_model_config
from pagoda.checkpoints.weight_formats import WeightFormat
from pagoda.errors import ConfigError
from pagoda.model.ggml_blocks import DENSE, floats, held_as, linear_weight

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_KNOWN = re.compile(
    rf"(blk\.\d+\.)?({'|'.join(_NAMES.values())}|rope_freqs|attn_rot_embd)\.(weight|bias)"
)
"""`attn_rot_embd` is a leftover in old files: the frequencies that follow from the metadata."""
_NEIGHBOURS = ("LlamaForCausalLM", "MistralForCausalLM")
"""Models in whose files the dimensions that are rotated together are neighbours."""
_ROTATED = re.compile(r".*\.self_attn\.[qk]_proj")


def gguf_model_config(file: GgufFile) -> ModelConfig:
    """What the metadata and the names of the tensors say.

    Raises:
        ConfigError: the file is not of a model that Pagoda runs.
    """
    unknown = next((name for name in file.tensors if not _KNOWN.fullmatch(name)), None)
    if unknown is not None:
        raise ConfigError(
            f"{file.path} has a tensor {unknown!r}, which is in no model that Pagoda runs."
        )
    config = parse_model_config(config_values(file), source=str(file.path))
    scaling = config.rope_scaling
    if FREQUENCY_FACTORS in file.tensors:
        if scaling is not None:
            raise ConfigError(
                f"{file.path} scales rotary frequencies twice: by {FREQUENCY_FACTORS} and by its metadata."
            )
        scaling = _frequency_factors(file, config.head_dim // 2)
    return replace(
        config,
        rope_scaling=scaling,
        quantization=None if all(map(_is_dense, _matrices(file))) else GgufQuantization(file),
        qkv_bias=_has_bias(file, "attn_q", "attn_k", "attn_v"),
        output_bias=_has_bias(file, "attn_output"),
        mlp_bias=_has_bias(file, "ffn_gate", "ffn_up", "ffn_down"),
    )


def _has_bias(file: GgufFile, *names: str) -> bool:
    """One bias calls for those of the same place and of all layers, so that none is left out unseen."""
    return any(f"blk.0.{name}.bias" in file.tensors for name in names)


def _frequency_factors(file: GgufFile, count: int) -> FrequencyFactors:
    tensor = _checked(file, FREQUENCY_FACTORS, (count,))
    factors = floats(_Mapped().rows(tensor), tensor.type)[0]
    if not (torch.isfinite(factors) & (factors > 0)).all():
        raise ConfigError(f"{file.path}: tensor {FREQUENCY_FACTORS} must hold positive numbers.")
    return FrequencyFactors(tuple(factors.tolist()))


@dataclass(frozen=True)
class GgufQuantization:
    """How the matrices of a file will lie in memory."""

    file: GgufFile

    @property
    def summary(self) -> str:
        used = {tensor.type.name for tensor in _matrices(self.file) if not _is_dense(tensor)}
        return f"GGUF {', '.join(sorted(used))} weights"

    def format_of(self, name: str, inputs: int) -> WeightFormat:  # noqa: ARG002 - rows are whole blocks
        """
        Raises:
            ConfigError: there is no such linear map.
        """
        return held_as(self.file.tensor(f"{ggml_name(name)}.weight").type)


def _matrices(file: GgufFile) -> Iterator[GgufTensor]:
    return (tensor for tensor in file.tensors.values() if len(tensor.shape) > 1)


def _is_dense(tensor: GgufTensor) -> bool:
    return tensor.type.name in DENSE


class GgufWeights:
    """The tensors of a GGUF file, mapped into memory and converted one at a time."""

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        self._file = file
        self._config = config
        self._mapped = _Mapped()

    def read_into(self, name: str, out: Tensor) -> None:
        """Fills `out` with the tensor that a checkpoint calls `name`, such as `model.norm.weight`.

        Raises:
            ConfigError: there is no such tensor of this shape.
        """
        stem, _, kind = name.rpartition(".")
        tensor = _checked(self._file, f"{ggml_name(stem)}.{kind}", tuple(out.shape))
        values = floats(self._mapped.rows(tensor), tensor.type).view(out.shape)
        out.copy_(self._half_split(stem, values))

    def linear(self, name: str, outputs: int, inputs: int, dtype: torch.dtype) -> LinearWeight:
        """The weight of the linear map `name`, such as `model.layers.0.mlp.up_proj`, without its bias.

        Raises:
            ConfigError: there is no such map of this shape, or its scales are beyond float16.
        """
        tensor = _checked(self._file, f"{ggml_name(name)}.weight", (outputs, inputs))
        rows = self._half_split(name, self._mapped.rows(tensor))
        weight = linear_weight(rows, tensor.type, dtype)
        if isinstance(weight, GroupedWeight):
            _check_finite(tensor, weight.scales)
            if weight.offsets is not None:
                _check_finite(tensor, weight.offsets)
        return weight

    def _half_split(self, name: str, rows: Tensor) -> Tensor:
        """The rows of a head's queries or keys in the order that pairs `i` and `i + d/2` for rotation.

        Files of Llama models have such pairs side by side, because ggml rotates neighbours.
        """
        if self._config.architecture not in _NEIGHBOURS or not _ROTATED.fullmatch(name):
            return rows
        pairs = rows.view(-1, self._config.head_dim // 2, 2, *rows.shape[1:])
        return pairs.transpose(1, 2).reshape(rows.shape)


class _Mapped:
    """Files in memory; each is let go when no tensor is left that lies in it."""

    def __init__(self) -> None:
        self._files: dict[Path, mmap.mmap] = {}

    def rows(self, tensor: GgufTensor) -> Tensor:
        """The tensor's bytes, [rows, bytes of a row] uint8."""
        flat = torch.frombuffer(
            self._file(tensor.path), dtype=torch.uint8, count=tensor.num_bytes, offset=tensor.start
        )
        return flat.view(math.prod(tensor.shape[:-1]), -1)

    def _file(self, path: Path) -> mmap.mmap:
        if path not in self._files:
            with path.open("rb") as file:
                # Nothing is written, but torch knows no memory that cannot be.
                self._files[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return self._files[path]


def ggml_name(name: str) -> str:
    """What GGUF files call a linear map or norm, by its name in a Hugging Face checkpoint."""
    layer = _LAYER.match(name)
    if layer is None:
        return _NAMES[name]
    return f"blk.{layer[1]}.{_NAMES[name[layer.end() :]]}"


def _checked(file: GgufFile, name: str, shape: tuple[int, ...]) -> GgufTensor:
    tensor = file.tensor(name)
    if tensor.shape != shape:
        raise ConfigError(
            f"{tensor.path}: tensor {name} has shape {list(tensor.shape)}, "
            f"the metadata calls for {list(shape)}."
        )
    return tensor


def _check_finite(tensor: GgufTensor, numbers: Tensor) -> None:
    if not torch.isfinite(numbers).all():
        raise ConfigError(
            f"{tensor.path}: tensor {tensor.name} has scales that are no numbers or beyond float16."
        )
