# SPDX-License-Identifier: Apache-2.0
"""Sources of weights: safetensors files, or a random pattern for benchmarks without files."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn.functional import normalize, pad

from pagoda.backend.weights import DenseWeight, LinearWeight, dequantize
from pagoda.checkpoints.checkpoint import INDEX_FILE, read_index, weight_files
from pagoda.checkpoints.contents import full_names, no_place, unread_tensors
from pagoda.checkpoints.linears import LinearRole, LinearSpec
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.sentence_modules import dense_modules, lexical_maps, read_modules
from pagoda.checkpoints.tensor_names import StoredRows
from pagoda.errors import ConfigError

READABLE = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Number formats of safetensors files, with the names that torch has for them."""
_TORCH = (".pt", ".bin")
_INTEGERS = {"I32": "int32", "I64": "int64"}
_PATTERN_SIZE = 2**20 - 3


class WeightSource(Protocol):
    """Gives weights by the names of a Hugging Face checkpoint."""

    def read_into(self, name: str, out: Tensor) -> None:
        """Fills `out` with the tensor `name`, such as `model.norm.weight`, converting to its dtype.
        Raises ConfigError: there is no such tensor of this shape."""

    def linear(self, linear: LinearSpec, dtype: torch.dtype) -> LinearWeight:
        """The weight of a linear layer, without its bias; head and embedding table are linear layers as well.

        A dense weight comes in `dtype`, and may lie in a mapped file: a backend copies what it keeps.
        Raises ConfigError: there is no such layer of this shape."""


@dataclass(frozen=True)
class DequantizedWeights:
    """The numbers that the weights of a source stand for; no product with them rounds its inputs to integers."""

    source: WeightSource

    def read_into(self, name: str, out: Tensor) -> None:
        self.source.read_into(name, out)

    def linear(self, linear: LinearSpec, dtype: torch.dtype) -> LinearWeight:
        weight = self.source.linear(linear, dtype)
        if isinstance(weight, DenseWeight):
            return weight
        return DenseWeight(dequantize(weight).to(dtype))


def in_head_order(rows: Tensor, order: tuple[int, ...] | None) -> Tensor:
    """Rows [heads d, ...] whose `d` rows of each head are brought into an order; None leaves them."""
    if order is None:
        return rows
    return rows.view(-1, len(order), *rows.shape[1:])[:, list(order)].reshape(rows.shape)


def in_value_order(rows: Tensor, order: tuple[int, ...] | None) -> Tensor:
    """Rows [heads d, ...] of which the heads are brought into an order; None leaves them."""
    if order is None:
        return rows
    return rows.view(len(order), -1, *rows.shape[1:])[list(order)].reshape(rows.shape)


def of_unit_length(rows: Tensor, linear: LinearSpec) -> Tensor:
    """A layer's rows [outputs, inputs], of which rows or columns are brought to length one where it says so."""
    if linear.unit is None:
        return rows
    return normalize(rows.float(), dim=1 if linear.unit == "rows" else 0)


def own_rows(rows: Tensor, linear: LinearSpec) -> Tensor:
    """A layer's rows [outputs, ...] of all rows of a tensor, in the order in which they are computed."""
    if linear.fill is not None:
        return filled(rows, linear)
    own = in_head_order(stored_rows(rows, linear), linear.head_order)
    return own if linear.role is LinearRole.STATE_OUT else in_value_order(own, linear.value_order)


def filled(rows: Tensor, linear: LinearSpec) -> Tensor:
    """Heads of all rows of a tensor filled with zeros, and repeated, as they are computed."""
    if linear.fill is None:
        return rows
    own, dim, heads, width, groups = linear.fill
    lacking = (heads - own) // groups if groups else 0
    if linear.role is LinearRole.ATTENTION_OUT:
        apart = rows.view(len(rows), groups or 1, -1, dim)
        return pad(apart, (0, width - dim, 0, lacking)).flatten(1)
    apart = rows.view(groups or 1, -1, dim, rows[0].numel())
    if not groups:
        apart = apart.repeat_interleave(heads // own, dim=1)
    return pad(apart, (0, 0, 0, width - dim, 0, lacking)).reshape(-1, *rows.shape[1:])


def stored_rows(rows: Tensor, linear: LinearSpec) -> Tensor:
    """A layer's rows [outputs, ...] of all rows of a tensor."""
    stored = linear.stored
    if stored.group == 0:
        found, lacking = rows[stored.rows(linear.outputs)], linear.outputs - stored.shape[0]
        if linear.role is LinearRole.EMBEDDING and lacking > 0:  # the first row is that of others
            found = torch.cat((found, rows[:1].expand(lacking, -1)))
        return found
    groups = rows.view(-1, stored.group, *rows.shape[1:])
    count = linear.outputs // len(groups)
    return groups[:, stored.first : stored.first + count].reshape(-1, *rows.shape[1:])


class DummyWeights:
    """Random weights, the same for the same seed, made at about the speed of memory.

    Norms are one and biases zero. Matrices have a standard deviation of `1 / sqrt(inputs)`, so activations keep
    their size from layer to layer. All are cut from one random pattern, each from its own place on.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        generator = torch.Generator().manual_seed(seed % 2**63)
        self._pattern = torch.randn(_PATTERN_SIZE, generator=generator)

    def read_into(self, name: str, out: Tensor) -> None:
        if out.dim() <= 1:
            out.fill_(0 if name.endswith(".bias") or not out.is_floating_point() else 1)
            return
        pattern = (self._pattern * out.shape[1] ** -0.5).to(out.dtype)
        digest = hashlib.sha256(f"{self._seed} {name}".encode()).digest()
        start = int.from_bytes(digest[:8], "little") % _PATTERN_SIZE
        flat = out.view(-1)
        filled = 0
        while filled < flat.shape[0]:
            piece = pattern[start : start + flat.shape[0] - filled]
            flat[filled : filled + piece.shape[0]] = piece
            filled += piece.shape[0]
            start = 0

    def linear(self, linear: LinearSpec, dtype: torch.dtype) -> LinearWeight:
        values = torch.empty((linear.outputs, linear.inputs), dtype=dtype)
        self.read_into(f"{linear.name}.weight", values)
        return DenseWeight(values)


class CheckpointWeights:
    """Weights in safetensors files, mapped into memory and copied out one at a time.

    Names are those of a decoder with its head; see `full_names`.
    """

    def __init__(
        self,
        files: Mapping[str, Path],
        opened: contextlib.ExitStack,
        maps: Mapping[str, tuple[str, Path]] | None = None,
    ) -> None:
        """`files` says which file holds each tensor, `maps` that of each map in a file of its own, with the
        beginning of names there; `opened` closes them."""
        self._stored_names = full_names(files.keys())
        self._files = {name: files[stored] for name, stored in self._stored_names.items()}
        for name, (beginning, path) in (maps or {}).items():
            for end in ("weight", "bias"):
                self._stored_names[f"{name}.{end}"] = f"{beginning}{end}"
                self._files[f"{name}.{end}"] = path
        self._opened = opened
        self._handles: dict[Path, Any] = {}

    def read_into(self, name: str, out: Tensor) -> None:
        stored_as = READABLE if out.is_floating_point() else _INTEGERS
        out.copy_(self.tensor(name, tuple(out.shape), stored_as))

    def linear(self, linear: LinearSpec, dtype: torch.dtype) -> LinearWeight:
        stored = linear.stored
        if stored.transposed and not self._is_straight(stored):
            rows = self._transposed(stored, linear.outputs)
            return DenseWeight(in_head_order(rows, linear.head_order).to(dtype))
        straight = stored.shape if stored.transposed else stored.stored_shape
        values = self.tensor(stored.weight, straight, READABLE)
        rows = own_rows(values.view(-1, stored.shape[-1]), linear)
        return DenseWeight(of_unit_length(rows, linear).to(dtype))

    def _is_straight(self, stored: StoredRows) -> bool:
        """True if rows come before inputs after all, as transformers 5 saves experts that others turn."""
        *_, rows, inputs = stored.shape
        return rows != inputs and self.shape(stored.weight) == stored.shape

    def _transposed(self, stored: StoredRows, count: int) -> Tensor:
        """Rows of a tensor [inputs, rows], or of one expert in a tensor [experts, inputs, rows]."""
        *num_experts, num_rows, inputs = stored.shape
        values = self.tensor(stored.weight, stored.stored_shape, READABLE)
        values = values.view(*num_experts, inputs, num_rows)
        expert, first = divmod(stored.first, num_rows)
        whole = values[expert] if num_experts else values
        return whole.t()[replace(stored, first=first).rows(count)].contiguous()

    def tensor(self, name: str, shape: tuple[int, ...], stored_as: Mapping[str, str]) -> Tensor:
        """The tensor `name` in the mapped file, if it has this shape and is stored as one of the given types."""
        path = self.path_of(name)
        with _readable(path):
            view = self._view(name)
            stored_shape, stored_dtype = tuple(view.get_shape()), view.get_dtype()
            if stored_dtype not in stored_as:
                raise ConfigError(
                    f"{path}: tensor {name} is stored as {stored_dtype}; "
                    f"Pagoda reads {', '.join(stored_as.values())}."
                )
            if stored_shape != shape:
                raise ConfigError(
                    f"{path}: tensor {name} has shape {list(stored_shape)}, "
                    f"config.json calls for {list(shape)}."
                )
        return self.stored(name)

    def stored_dtype(self, name: str) -> str:
        """Number format of the tensor `name` in its file, such as `BF16`. Raises ConfigError if there is none."""
        with _readable(self.path_of(name)):
            stored: str = self._view(name).get_dtype()
            return stored

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the tensor `name` in its file. Raises ConfigError if there is no such tensor."""
        with _readable(self.path_of(name)):
            return tuple(self._view(name).get_shape())

    def names(self) -> list[str]:
        """Names of all tensors, in the order of the files."""
        return list(self._files)

    def stored(self, name: str) -> Tensor:
        """The tensor `name` as it is stored. Raises ConfigError if there is no such tensor."""
        path = self.path_of(name)
        with _readable(path):
            stored: Tensor = self._handle(path).get_tensor(self._stored_names[name])
            return stored

    def refuse_unread(self, spec: ModelSpec) -> None:
        """Raises ConfigError: a layer has a tensor that the model is not computed with, but for a bias of
        zeros, as some programs write them."""
        for name in unread_tensors(spec, self.names()):
            if name.endswith("bias") and not self.stored(name).any():
                continue
            raise no_place(name, self.path_of(name), spec)

    def has(self, name: str) -> bool:
        return name in self._files

    def path_of(self, name: str) -> Path:
        """The file that holds the tensor `name`. Raises ConfigError if none does."""
        path = self._files.get(name)
        if path is None:
            some = next(iter(self._files.values()), None)
            where = some.parent if some else "the checkpoint"
            raise ConfigError(
                f"{where}: no file holds the tensor {name}, which config.json calls for."
            )
        return path

    def _view(self, name: str) -> Any:
        path = self.path_of(name)
        handle = self._handle(path)
        stored = self._stored_names[name]
        if stored not in handle.keys():  # noqa: SIM118 - not a mapping
            raise ConfigError(f"{path} lacks the tensor {name}, which config.json calls for.")
        return handle.get_slice(stored)

    def _handle(self, path: Path) -> Any:
        if path not in self._handles:
            if path.suffix in _TORCH:
                self._handles[path] = _TorchFile(path)
                return self._handles[path]
            handle = safe_open(path, framework="pt")
            self._handles[path] = self._opened.enter_context(handle)
        return self._handles[path]


def check_finite(tensors: CheckpointWeights, name: str, scales: Tensor, dtype: str) -> None:
    """Raises ConfigError: scales of the tensor `name` are infinite or NaN."""
    if not bool(scales.isfinite().all()):
        raise ConfigError(
            f"{tensors.path_of(name)}: tensor {name} holds scales that are not finite in {dtype}."
        )


class _TorchFile:
    """The few tensors of a file of torch's, with the methods of an open safetensors file."""

    def __init__(self, path: Path) -> None:
        try:
            self._tensors = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged file makes torch raise errors of many kinds
            raise ValueError(str(error)) from error
        if not isinstance(self._tensors, dict):
            raise ValueError("it holds no tensors by name")

    def keys(self) -> list[str]:
        return list(self._tensors)

    def get_tensor(self, name: str) -> Tensor:
        tensor: Tensor = self._tensors[name]
        return tensor

    def get_slice(self, name: str) -> _TorchSlice:
        return _TorchSlice(self._tensors[name])


@dataclass(frozen=True)
class _TorchSlice:
    tensor: Tensor

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def get_dtype(self) -> str:
        return next(
            (name for name, it in READABLE.items() if getattr(torch, it) == self.tensor.dtype),
            str(self.tensor.dtype),
        )


@contextlib.contextmanager
def open_checkpoint(directory: Path) -> Iterator[CheckpointWeights]:
    """The weights of a Hugging Face model directory, in one file or several with an index.
    Raises ConfigError: there are none, or a file is corrupt."""
    with contextlib.ExitStack() as opened:
        dense = dense_modules(directory, read_modules(directory))
        modules = {it.map.name: ("linear.", it.file) for it in dense}
        beside = {name: ("", directory / f"{name}.pt") for name in lexical_maps(directory)}
        yield CheckpointWeights(_find_tensors(directory), opened, {**modules, **beside})


def _find_tensors(directory: Path) -> dict[str, Path]:
    index = directory / INDEX_FILE
    if index.exists():
        return read_index(index)
    (path,) = weight_files(directory)
    with _readable(path), safe_open(path, framework="pt") as handle:
        names: list[str] = handle.keys()
        return dict.fromkeys(names, path)


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Says of a file that safetensors cannot read which one it is."""
    try:
        yield
    except (SafetensorError, OSError, ValueError) as error:
        raise ConfigError(
            f"{path} is not a complete safetensors file ({error}); fetch it again."
        ) from error
