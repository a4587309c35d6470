"""A forward pass that calls one operation of a backend after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, cast

from torch import Tensor

from pagoda.backend.base import ForwardPass, LinearT, MetadataT, Operations, StepInput
from pagoda.backend.operation import Kind, Operation, OperationNamer, WeightNames
from pagoda.telemetry.tracer import Tracer


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
        ops = cast("Operations[Tensor, LinearT, MetadataT]", traced)
        return self._forward(ops, step), ()


class _Spanned(NamedTuple):
    """Name and category of an operation in traces."""

    kind: Kind
    weight_at: int | None = None


_OPERATIONS: Mapping[str, _Spanned] = {
    "linear": _Spanned("linear", 1),
    "embedding": _Spanned("embedding", 1),
    "all_reduce": _Spanned("all_reduce"),
    "add": _Spanned("add"),
    "rms_norm": _Spanned("norm", 1),
    "add_rms_norm": _Spanned("norm", 2),
    "silu_and_mul": _Spanned("activation"),
    "experts": _Spanned("experts"),
    "rotate_and_cache": _Spanned("rotary"),
    "attention": _Spanned("attention"),
}


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
