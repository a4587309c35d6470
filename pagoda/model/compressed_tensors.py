# SPDX-License-Identifier: Apache-2.0
"""Linear layers as compressed-tensors files hold them: the inverse of `pagoda.model.quantized_checkpoint`.

Names of schemes are those of llm-compressor: bits of weights, bits of inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pagoda.backend.base import Backend
from pagoda.backend.weights import Int8Weight
from pagoda.checkpoints.linears import NEVER_ROUNDED, LinearRole, LinearSpec
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.tensor_names import StoredRows
from pagoda.errors import ConfigError
from pagoda.messages.jobs import QuantizeFormat
from pagoda.model.gptq import StoredGrids
from pagoda.model.rounding import ZeroPointGroups, round_asymmetric, round_symmetric

_DENSE = NEVER_ROUNDED | {LinearRole.EMBEDDING, LinearRole.HEAD}
_PACKED_BITS = 32


@dataclass(frozen=True)
class Scheme:
    """Numbers of a quantized checkpoint."""

    bits: int
    group_size: int | None
    """Inputs that share a scale; None where an output has one, and inputs are rounded to int8 as well."""
    symmetric: bool
    scale_dtype: torch.dtype
    """Dtype of scales of groups; those of outputs are float32."""

    @classmethod
    def of(cls, name: QuantizeFormat, group_size: int, config: ModelSpec) -> Scheme:
        """The scheme `name` for the layers of a model.

        Raises ConfigError: the inputs of a layer are no multiple of the group size.
        """
        dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float16
        if name == "w8a8":
            return cls(8, None, symmetric=True, scale_dtype=dtype)
        for linear in quantized_linears(config):
            if linear.inputs % group_size:
                raise ConfigError(
                    f"{linear.name}.weight has {linear.inputs} inputs, which groups of {group_size} do not "
                    "divide; take another --group-size, or --format w8a8."
                )
        return cls(8 if name == "w8a16" else 4, group_size, name == "w8a16", dtype)

    @property
    def layout(self) -> str:
        return "int-quantized" if self.group_size is None else "pack-quantized"

    def round(
        self,
        linear: LinearSpec,
        values: Tensor,
        backend: Backend[Any, Any],
        importance: Tensor | None = None,
    ) -> StoredGrids:
        """The weight [out, in] of a linear layer, rounded.

        `importance` [in] weighs rounding errors, see `round_asymmetric`.

        Raises ConfigError: the weight holds numbers that are not finite or too large.
        """
        rounded: StoredGrids
        if self.group_size is None:
            rounded = backend.quantize_int8(values, symmetric=True)
        elif self.symmetric:
            rounded = round_symmetric(values, self.bits, self.group_size, self.scale_dtype)
        else:
            rounded = round_asymmetric(
                values, self.bits, self.group_size, self.scale_dtype, importance
            )
        if not (bool(values.isfinite().all()) and bool(rounded.scales.isfinite().all())):
            raise ConfigError(
                f"{linear.name}.weight holds numbers that are infinite, NaN or too large to quantize."
            )
        return rounded

    def tensors(self, linear: LinearSpec, rounded: StoredGrids) -> dict[str, Tensor]:
        """Tensors of a linear layer by their names."""
        if isinstance(rounded, Int8Weight):
            stored = {"weight": rounded.values, "weight_scale": rounded.scales[:, None]}
        else:
            stored = _packed_groups(rounded)
        return {f"{linear.name}.{end}": tensor for end, tensor in stored.items()}

    def quantization_config(self, config: ModelSpec) -> dict[str, object]:
        """Value of `quantization_config` in config.json."""
        weights: dict[str, object] = {
            "num_bits": self.bits,
            "type": "int",
            "symmetric": self.symmetric,
            "strategy": "channel" if self.group_size is None else "group",
            "group_size": self.group_size,
            "dynamic": False,
        }
        inputs: dict[str, object] | None = None
        if self.group_size is None:
            inputs = {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            }
        dense = [config.names.head]
        dense += [linear.name for linear in _linears(config) if linear.role is LinearRole.ROUTER]
        return {
            "quant_method": "compressed-tensors",
            "format": self.layout,
            "quantization_status": "compressed",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": weights,
                    "input_activations": inputs,
                    "output_activations": None,
                }
            },
            "ignore": dense,
            "kv_cache_scheme": None,
        }


def quantized_linears(config: ModelSpec) -> list[LinearSpec]:
    """Linear layers that are quantized: all of the layers but routers; embedding and head stay dense.

    Layers of an encoder come first. Heads are as they are stored; keys that are values, too, count once.
    """
    chosen = (linear for linear in _linears(config) if linear.role not in _DENSE)
    return list({linear.name: linear for linear in map(_unfilled, chosen)}.values())


def _unfilled(linear: LinearSpec) -> LinearSpec:
    """A layer whose heads are not filled up; it is its tensor where it is all of that."""
    stored = linear.stored
    if linear.fill is None and linear.rows != StoredRows(stored.tensor, stored.shape, 0):
        return linear
    if linear.fill is None and stored.shape != (linear.outputs, linear.inputs):
        return linear
    outputs, inputs = stored.shape
    return LinearSpec(stored.tensor, outputs, inputs, linear.role)


def _linears(config: ModelSpec) -> Sequence[LinearSpec]:
    experts = range(config.experts.routing.num_experts if config.experts else 0)
    beside = [] if config.cross_encoder is None else [*config.cross_encoder.linears()]
    return beside + [
        linear
        for layer in range(config.num_layers)
        for linear in config.layer_linears(layer, experts)
    ]


def _packed_groups(groups: ZeroPointGroups) -> dict[str, Tensor]:
    shape = torch.tensor(groups.codes.shape, dtype=torch.int64)
    stored = {
        "weight_packed": pack_words(groups.codes, groups.bits),
        "weight_scale": groups.scales,
        "weight_shape": shape,
    }
    if groups.zeros is not None:
        # Zero points are packed along the outputs.
        stored["weight_zero_point"] = pack_words(groups.zeros.t(), groups.bits).t().contiguous()
    return stored


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """Codes [n, m] uint8 in int32 words [n, ceil(m * bits / 32)], the first in the lowest bits."""
    per_word = _PACKED_BITS // bits
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % per_word))
    octets = padded if bits == 8 else padded[:, 0::2] | padded[:, 1::2] << 4
    return octets.contiguous().view(torch.int32)
