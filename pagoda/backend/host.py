"""Parts that backends of a host's processor share, and forward passes that are not recorded."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, cast

import torch
from torch import Tensor

from pagoda.backend.base import (
    Backend,
    ForwardPass,
    KVCache,
    LinearT,
    MetadataT,
    NewTensor,
    Operations,
    StepInput,
    new_tensor,
)
from pagoda.backend.operation import Kind, Operation, OperationNamer, WeightNames
from pagoda.messages.worker import Capabilities
from pagoda.parallel.collectives import Alone, Collectives
from pagoda.telemetry.tracer import Tracer


class HostBackend(Backend[LinearT, MetadataT]):
    """One rank of a group on the CPU; without a group it computes alone."""

    def __init__(self, arithmetic: str, group: Collectives | None) -> None:
        self.arithmetic = arithmetic
        self.device = torch.device("cpu")
        self.group = group or Alone()
        self.capabilities = Capabilities(
            block_sizes=(16, 1, 2, 4, 8, 32, 64, 128),
            max_batch_tokens=65536,
            max_batch_seqs=4096,
            max_model_len=2**20,
            weight_formats=("float32", "bfloat16", "float16", "int8", "int4"),
            kv_cache_dtypes=("float32", "bfloat16", "float16", "int8"),
        )

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
        # Left unwritten: memory is taken from the machine as blocks come into use.
        kv_dtype, blocks = kv_dtype or dtype, (num_blocks, num_kv_heads)
        shapes = self.block_shapes(block_size, head_dim, dtype, kv_dtype)
        keys, values = (new((*blocks, *shape), kv_dtype) for shape in shapes)
        self.advise(keys, values)
        if kv_dtype != torch.int8:
            return KVCache(keys, values)
        return KVCache(keys, values, *(new((*blocks, block_size), torch.float32) for _ in range(2)))

    @abstractmethod
    def block_shapes(
        self, block_size: int, head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of one head's keys and values in a block."""

    def advise(self, *cached: Tensor) -> None:
        """Tells the machine how the memory of K and V will be used; by default nothing."""

    def all_reduce(self, x: Tensor) -> Tensor:
        return self.group.all_reduce(x) if len(x) else x

    def select_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        return x[rows].flatten(1) if x.dim() > 1 else x[rows]

    def rotary_table(
        self, positions: Tensor, frequencies: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        angles = positions.float()[:, None] * frequencies
        return angles.cos() * scale, angles.sin() * scale


def check_token_ids(token_ids: Tensor, vocab_size: int) -> None:
    """Raises IndexError if an id is not from 0 to `vocab_size - 1`."""
    if len(token_ids) and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < vocab_size:
        raise IndexError(f"A token id is not from 0 to {vocab_size - 1}.")


class DirectForward(Generic[LinearT, MetadataT]):
    """A forward pass that calls one operation after the other: a trace shows each as a span."""

    def __init__(
        self,
        ops: Operations[Tensor, LinearT, MetadataT],
        forward: ForwardPass[LinearT, MetadataT],
        names: WeightNames,
    ) -> None:
        self._ops = ops
        self._forward = forward
        self._names = names
        self.operations: Sequence[Operation] = ()

    def __call__(self, step: StepInput[Tensor, MetadataT]) -> Tensor:
        return self._forward(self._ops, step)

    def traced(
        self, step: StepInput[Tensor, MetadataT], tracer: Tracer
    ) -> tuple[Tensor, Sequence[int]]:
        traced = _TracedOperations(self._ops, tracer, OperationNamer(self._names))
        ops = cast("Operations[Tensor, LinearT, MetadataT]", traced)
        return self._forward(ops, step), ()


_OPERATIONS: Mapping[str, tuple[Kind, int | None]] = {
    "linear": ("linear", 1),
    "embedding": ("embedding", 1),
    "add_low_rank": ("low_rank", None),
    "all_reduce": ("all_reduce", None),
    "select_rows": ("select", None),
    "add": ("add", None),
    "rms_norm": ("norm", 1),
    "add_rms_norm": ("norm", 2),
    "gated_linear": ("linear", 1),
    "experts": ("experts", None),
    "rotate_and_cache": ("rotary", None),
    "attention": ("attention", None),
}
"""Category of each operation in traces, and the argument that is its weight."""


class _TracedOperations:
    def __init__(self, ops: object, tracer: Tracer, namer: OperationNamer) -> None:
        self._ops = ops
        self._tracer = tracer
        self._namer = namer

    def __getattr__(self, name: str) -> Callable[..., Any]:
        operation, (kind, weight_at) = getattr(self._ops, name), _OPERATIONS[name]

        def spanned(*args: Any, **options: Any) -> Any:
            began = self._tracer.kernel()
            result = operation(*args, **options)
            weight = None if weight_at is None else args[weight_at]
            self._tracer.span(self._namer.name(kind, weight), began, {"kind": kind})
            return result

        return spanned
