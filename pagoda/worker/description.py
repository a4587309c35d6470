"""The model that the figures in a worker's trace belong to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from pagoda.backend.operation import Operation
from pagoda.telemetry.tracer import Tracer


@dataclass(frozen=True)
class ModelDescription:
    """Least cost of a rank's part of a forward pass, without the head."""

    operations: Sequence[Operation]
    """Operations of the forward pass in the order of their times; empty if they come as spans."""
    weight_bytes: int
    """Bytes of weights that a pass reads, with all experts."""
    flops_per_token: int
    """Floating-point operations of products with weights."""
    kv_bytes_per_token: int
    """Bytes that attention reads for each token of a context."""
    expert_bytes: int = 0
    """Bytes of experts among the weights; a pass reads the experts that its tokens choose."""
    experts_held: int = 0
    experts_per_token: int = 0

    def tell(self, tracer: Tracer) -> None:
        """Writes the description to the current fragment; does nothing while tracing is off."""
        costs = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "operations"}
        tracer.describe("model", costs)
        if not self.operations:
            return
        operations = {
            "names": [operation.name for operation in self.operations],
            "kinds": [operation.kind for operation in self.operations],
            "weight_bytes": [operation.weight_bytes for operation in self.operations],
            "flops_per_token": [operation.flops_per_token for operation in self.operations],
        }
        tracer.describe("forward_ops", operations)
