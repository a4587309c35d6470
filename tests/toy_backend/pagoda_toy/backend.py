# SPDX-License-Identifier: Apache-2.0
"""The toy backend: float32 in numpy, one rank, no quantized weights, experts or adapters.

Libraries choose their order of summation by shapes. So a product is made row by row, and attention token by token:
shapes depend on a token's position alone, and its bits on nothing else.
"""

# ruff: noqa: ARG002

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from pagoda.backend.base import (
    UNNAMED,
    Compiled,
    KVCache,
    NewTensor,
    TokenBatch,
    UnsupportedError,
    new_tensor,
)
from pagoda.backend.graph import Graph, Node
from pagoda.backend.host import HostMemory, check_token_ids
from pagoda.backend.interpreter import InterpretedGraph
from pagoda.backend.operation import WeightNames
from pagoda.backend.operations import OPERATIONS
from pagoda.backend.reference.sampling import sample_rows, score_rows
from pagoda.backend.sampling import SampledRows, ScoredRows
from pagoda.backend.sampling_table import SamplingTable
from pagoda.backend.weights import DenseWeight, LinearWeight
from pagoda.devices import DeviceSet
from pagoda.messages.worker import Capabilities
from pagoda.parallel.collectives import Alone, HostGroup

Array = np.ndarray[Any, Any]


def open_backend(devices: DeviceSet) -> ToyBackend:
    return ToyBackend(str(devices))


@dataclass(frozen=True)
class Linear:
    values: Array
    """[out, in]."""
    bias: Array | None

    @property
    def inputs(self) -> int:
        return self.values.shape[1]

    @property
    def outputs(self) -> int:
        return self.values.shape[0]


@dataclass(frozen=True)
class Metadata:
    """Places of a step's tokens."""

    tables: Array
    """[n, b], the block table of each token's sequence."""
    positions: Array
    """[n]."""
    ends: Array
    """[n], cached tokens of each token's sequence."""


class ToyBackend:
    def __init__(self, devices: str) -> None:
        self.group, self.memory = Alone(), HostMemory()
        self.device = torch.device("cpu")
        self.arithmetic = f"toy ({devices})"
        self.capabilities = Capabilities(
            block_sizes=(16, 8),
            max_batch_tokens=4096,
            max_batch_seqs=64,
            max_model_len=2**16,
            lacks_operations=tuple(name for name in OPERATIONS if name not in FUNCTIONS),
        )

    def join(self, group: HostGroup) -> NoReturn:
        raise UnsupportedError("the toy backend has one rank; leave out --tensor-parallel-size.")

    def allocate_kv_cache(
        self,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None = None,
        new: NewTensor = new_tensor,
    ) -> KVCache:
        shape = (num_blocks, num_kv_heads, block_size, head_dim)
        return KVCache(*(new(shape, kv_dtype or dtype) for _ in range(2)))

    def allocate_latent_cache(self, *shape: Any) -> NoReturn:
        raise UnsupportedError("the toy has no latent attention.")

    def _quantize(self, *args: object, **kwargs: object) -> NoReturn:
        raise UnsupportedError("the toy has weights of float32 only.")

    quantize_int8 = quantize_int4 = quantize_blocks = _quantize

    def prepare_linear(
        self, parts: Sequence[LinearWeight], bias: Tensor | None, dtype: torch.dtype
    ) -> Linear:
        dense = [part.values for part in parts if isinstance(part, DenseWeight)]
        if len(dense) < len(parts) or any(part.dtype != torch.float32 for part in dense):
            raise UnsupportedError("the toy has weights of float32 only.")
        return Linear(torch.cat(dense).numpy(), None if bias is None else bias.numpy())

    def set_low_rank(self, maps: Any, adapter: int, parts: Sequence[Any]) -> None:
        raise UnsupportedError("the toy has no adapters.")

    def remove_low_rank(self, maps: Any, adapter: int) -> None:
        raise UnsupportedError("the toy has no adapters.")

    def sample(self, logits: Tensor, table: SamplingTable, slots: Sequence[int]) -> SampledRows:
        return sample_rows(logits, table, slots)

    def score(self, logits: Tensor, token_ids: Tensor, num_top: int) -> ScoredRows:
        return score_rows(logits, token_ids, num_top)

    def attention_metadata(
        self, batch: TokenBatch, num_heads: int, cache: KVCache, group: int = 0
    ) -> Metadata:
        of_tokens = batch.sequence_ids.numpy()
        tables = batch.block_tables[group].numpy()[of_tokens]
        return Metadata(tables, batch.positions.numpy(), batch.context_lens.numpy()[of_tokens])

    def compile(self, graph: Graph, names: WeightNames = UNNAMED) -> Compiled[Metadata]:
        def compute(node: Node, inputs: Sequence[Any]) -> Any:
            return compute_node(node, (*inputs, *(graph.weights[name] for name in node.weights)))

        return InterpretedGraph(graph, compute, names)


def compute_node(node: Node, operands: Sequence[Any]) -> Any:
    arrays = [each.numpy() if isinstance(each, Tensor) else each for each in operands]
    with np.errstate(all="ignore"):
        out = FUNCTIONS[node.op](*arrays, **node.attributes)
    return tuple(map(_tensor, out)) if isinstance(out, tuple) else _tensor(out)


def _tensor(array: Array) -> Tensor:
    wanted = np.int64 if array.dtype.kind == "i" else np.float32
    return torch.from_numpy(np.ascontiguousarray(array, dtype=wanted))


# ---- operations


def linear(x: Array, weight: Linear) -> Array:
    out = np.empty((len(x), weight.outputs), dtype=np.float32)
    for row, own in enumerate(x.reshape(len(x), weight.inputs)):
        out[row] = weight.values @ own
    return out if weight.bias is None else out + weight.bias


def linear_argmax(x: Array, weight: Linear, *, first_id: int) -> Array:
    logits = linear(x, weight)
    best = logits.argmax(axis=1)
    bits = logits[np.arange(len(x)), best].view(np.int32)
    return np.stack((best + first_id, bits, np.isfinite(logits).all(axis=1)), axis=1).astype(
        np.int64
    )


def embedding(token_ids: Array, table: Linear, *, first_id: int, vocab_size: int) -> Array:
    check_token_ids(torch.from_numpy(token_ids), vocab_size)
    own = token_ids - first_id
    held = (own >= 0) & (own < table.outputs)
    return np.where(held[:, None], table.values[np.where(held, own, 0)], np.float32(0))


def rms_norm(x: Array, weight: Array, *, eps: float) -> Array:
    return x / np.sqrt(_mean_square(x) + np.float32(eps)) * weight


def layer_norm(x: Array, weight: Array, bias: Array, *, eps: float) -> Array:
    centred = x - x.mean(axis=-1, keepdims=True, dtype=np.float32)
    return centred / np.sqrt(_mean_square(centred) + np.float32(eps)) * weight + bias


def _mean_square(x: Array) -> Array:
    return np.square(x).mean(axis=-1, keepdims=True, dtype=np.float32)


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def silu_and_mul(gate_up: Array) -> Array:
    gate, up = (np.ascontiguousarray(half) for half in np.split(gate_up, 2, axis=1))
    return gate * sigmoid(gate) * up


def gelu_and_mul(gate_up: Array) -> Array:
    gate, up = (np.ascontiguousarray(half) for half in np.split(gate_up, 2, axis=1))
    inner = np.float32(2 * math.sqrt(2 / math.pi)) * (gate + np.float32(0.044715) * gate**3)
    return gate * sigmoid(inner) * up


def gelu(x: Array) -> Array:
    return x * np.vectorize(math.erfc, otypes=[np.float64])(x * -math.sqrt(0.5)) / 2


def rotary_table(positions: Array, frequencies: Array, *, scale: float) -> tuple[Array, Array]:
    angles = positions.astype(np.float32)[:, None] * frequencies
    return np.cos(angles) * np.float32(scale), np.sin(angles) * np.float32(scale)


def rotate_and_cache(
    qkv: Array, metadata: Metadata, *rest: Any, head_dim: int, eps: float, norms_all_heads: bool
) -> Array:
    at = next(i for i, each in enumerate(rest) if isinstance(each, KVCache))
    table, (cache, *norms) = rest[:at], rest[at:]
    keys, values = cache.keys.numpy(), cache.values.numpy()
    width = keys.shape[1] * head_dim
    q, k, v = np.split(qkv, [qkv.shape[1] - 2 * width, qkv.shape[1] - width], axis=1)
    parts = [q, k]
    for place, norm in enumerate(norms):
        size = parts[place].shape[1] if norms_all_heads else head_dim
        heads = np.ascontiguousarray(parts[place]).reshape(len(qkv), -1, size)
        parts[place] = rms_norm(heads, norm, eps=eps)
    q, k = (_rotated(part.reshape(len(qkv), -1, head_dim), table) for part in parts)
    block_size = keys.shape[2]
    blocks = metadata.tables[np.arange(len(qkv)), metadata.positions // block_size]
    keys[blocks, :, metadata.positions % block_size] = k
    values[blocks, :, metadata.positions % block_size] = v.reshape(len(qkv), -1, head_dim)
    return q.reshape(len(qkv), -1)


def _rotated(x: Array, table: Sequence[Array]) -> Array:
    if not table:
        return x
    cos, sin = (part[:, None, :] for part in table)
    half = cos.shape[-1]
    left, right, rest = np.split(x, [half, 2 * half], axis=-1)
    return np.concatenate((left * cos - right * sin, right * cos + left * sin, rest), axis=-1)


def attention(
    queries: Array,
    metadata: Metadata,
    cache: KVCache,
    sinks: Array | None = None,
    *,
    head_dim: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    chunk: int | None,
    causal: bool,
) -> Array:
    keys, values = cache.keys.numpy(), cache.values.numpy()
    kv_heads, block_size = keys.shape[1:3]
    out = np.empty_like(queries)
    for row, position in enumerate(metadata.positions.tolist()):
        first = 0 if window is None else max(0, position - window + 1)
        first = first if chunk is None else max(first, position // chunk * chunk)
        end = position + 1 if causal else min(metadata.ends[row], position + (window or 2**31))
        seen = np.arange(first, end)
        places = metadata.tables[row, seen // block_size], slice(None), seen % block_size
        k, v = (np.ascontiguousarray(part[places].swapaxes(0, 1)) for part in (keys, values))
        q = queries[row].reshape(kv_heads, -1, head_dim) * np.float32(scale)
        scores = q @ np.ascontiguousarray(k.swapaxes(1, 2))
        if softcap is not None:
            scores = np.float32(softcap) * np.tanh(scores / np.float32(softcap))
        highest = scores.max(axis=-1, keepdims=True)
        weights = np.exp(scores - highest)
        total = weights.sum(axis=-1, keepdims=True)
        if sinks is not None:
            total = total + np.exp(sinks.reshape(kv_heads, -1, 1) - highest)
        out[row] = (weights @ v / total).reshape(-1)
    return out


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **{f.__name__: f for f in (linear, linear_argmax, embedding, rms_norm, layer_norm)},
    **{f.__name__: f for f in (silu_and_mul, gelu_and_mul, gelu, sigmoid)},
    **{f.__name__: f for f in (rotary_table, rotate_and_cache, attention)},
    "select_rows": lambda x, rows: x[rows],
    "add": np.add,
    "mul": np.multiply,
    "scale_rows": np.multiply,
    "scale": lambda x, factor: x * np.float32(factor),
    "softcap": lambda x, cap: np.float32(cap) * np.tanh(x / np.float32(cap)),
}
"""Operations by name."""
