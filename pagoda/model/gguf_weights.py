"""Weights out of a GGUF file."""

from __future__ import annotations

import math
import mmap
from pathlib import Path

import torch
from torch import Tensor

from pagoda.backend.weights import BlockWeight, LinearWeight
from pagoda.checkpoints.gguf.config import checked_tensor
from pagoda.checkpoints.gguf.reader import GgufFile, GgufTensor
from pagoda.checkpoints.model_config import LinearSpec, ModelConfig
from pagoda.errors import ConfigError
from pagoda.model.ggml_blocks import floats, linear_weight


class GgufWeights:
    """The tensors of a GGUF file, mapped into memory and converted one at a time; see `WeightSource`."""

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        self._file = file
        self._config = config
        self._mapped: dict[Path, mmap.mmap] = {}
        """Each is let go when no tensor is left that lies in it."""

    def read_into(self, name: str, out: Tensor) -> None:
        tensor = checked_tensor(self._file, name, tuple(out.shape))
        values = floats(self._rows(tensor), tensor.type).view(out.shape)
        out.copy_(self._half_split(name.rpartition(".")[0], values))

    def linear(self, linear: LinearSpec, dtype: torch.dtype) -> LinearWeight:
        shape = (linear.outputs, linear.inputs)
        tensor = checked_tensor(self._file, f"{linear.name}.weight", shape)
        rows = self._half_split(linear.name, self._rows(tensor))
        weight = linear_weight(rows, tensor.type, dtype)
        if isinstance(weight, BlockWeight):
            for numbers in (weight.group_scales(), weight.group_minima()):
                _check_finite(tensor, numbers)
        return weight

    def _half_split(self, name: str, rows: Tensor) -> Tensor:
        """The rows of a head's queries or keys in the order that pairs `i` and `i + d/2` for rotation.

        Files of some families have such pairs side by side (`GgufFormat.rotates_neighbours`).
        """
        names, gguf = self._config.names, self._config.family.gguf
        rotated = name.endswith((f".{names.query}", f".{names.key}"))
        if not rotated or gguf is None or not gguf.rotates_neighbours:
            return rows
        pairs = rows.view(-1, self._config.head_dim // 2, 2, *rows.shape[1:])
        return pairs.transpose(1, 2).reshape(rows.shape)

    def _rows(self, tensor: GgufTensor) -> Tensor:
        """The tensor's bytes, [rows, bytes of a row] uint8."""
        path = tensor.path
        if path not in self._mapped:
            with path.open("rb") as file:
                # Nothing is written, but torch knows no memory that cannot be.
                self._mapped[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        flat = torch.frombuffer(
            self._mapped[path], dtype=torch.uint8, count=tensor.num_bytes, offset=tensor.start
        )
        return flat.view(math.prod(tensor.shape[:-1]), -1)


def _check_finite(tensor: GgufTensor, numbers: Tensor | None) -> None:
    if numbers is not None and not torch.isfinite(numbers).all():
        raise ConfigError(f"{tensor.path}: tensor {tensor.name} has scales that are not finite.")
