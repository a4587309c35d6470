"""A forward pass that calls one operation of a backend after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from torch import Tensor

from pagoda.backend.base import (
    Experts,
    ForwardPass,
    HeadNorms,
    KVCache,
    LinearT,
    MetadataT,
    Operations,
    StepInput,
)
from pagoda.backend.operation import Kind, Operation, OperationNamer, WeightNames
from pagoda.telemetry.tracer import Tracer

ResultT = TypeVar("ResultT")


class DirectForward(Generic[LinearT, MetadataT]):
    """A forward pass that is not recorded: a trace shows each operation as a span."""

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
        return self._forward(traced, step), ()


class _TracedOperations(Generic[LinearT, MetadataT]):
    """The same operations, each in a span of its own."""

    def __init__(
        self, ops: Operations[Tensor, LinearT, MetadataT], tracer: Tracer, namer: OperationNamer
    ) -> None:
        self._ops = ops
        self._tracer = tracer
        self._namer = namer

    def _spanned(
        self, compute: Callable[[], ResultT], kind: Kind, weight: object = None
    ) -> ResultT:
        began = self._tracer.kernel()
        result = compute()
        self._tracer.span(self._namer.name(kind, weight), began, {"kind": kind})
        return result

    def linear(self, x: Tensor, weight: LinearT) -> Tensor:
        return self._spanned(lambda: self._ops.linear(x, weight), "linear", weight)

    def embedding(
        self,
        token_ids: Tensor,
        weight: LinearT,
        first_id: int = 0,
        vocab_size: int | None = None,
    ) -> Tensor:
        return self._spanned(
            lambda: self._ops.embedding(token_ids, weight, first_id, vocab_size),
            "embedding",
            weight,
        )

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._spanned(lambda: self._ops.all_reduce(x), "all_reduce")

    def add(self, x: Tensor, delta: Tensor) -> Tensor:
        return self._spanned(lambda: self._ops.add(x, delta), "add")

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._spanned(lambda: self._ops.rms_norm(x, weight, eps), "norm", weight)

    def add_rms_norm(
        self, x: Tensor, delta: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return self._spanned(lambda: self._ops.add_rms_norm(x, delta, weight, eps), "norm", weight)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        return self._spanned(lambda: self._ops.silu_and_mul(gate_up), "activation")

    def experts(self, x: Tensor, logits: Tensor, experts: Experts[LinearT]) -> Tensor:
        return self._spanned(lambda: self._ops.experts(x, logits, experts), "experts")

    def rotate_and_cache(
        self,
        qkv: Tensor,
        cache: KVCache,
        plan: MetadataT,
        table: tuple[Tensor, Tensor],
        norms: HeadNorms | None,
    ) -> Tensor:
        return self._spanned(
            lambda: self._ops.rotate_and_cache(qkv, cache, plan, table, norms), "rotary"
        )

    def attention(
        self,
        queries: Tensor,
        cache: KVCache,
        plan: MetadataT,
        *,
        scale: float,
        window: int | None,
    ) -> Tensor:
        return self._spanned(
            lambda: self._ops.attention(queries, cache, plan, scale=scale, window=window),
            "attention",
        )
