"""What the figures in a worker's trace are of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagoda.backend.operation import Operation
from pagoda.telemetry.tracer import Tracer


@dataclass(frozen=True)
class ModelDescription:
    """What a rank's part of a forward pass costs at least; the head is no part of it."""

    operations: Sequence[Operation]
    """Of the forward pass, whose times come in this order; empty if they come as spans."""
    weight_bytes: int
    """That a pass reads, with all experts."""
    flops_per_token: int
    """Of products with weights."""
    kv_bytes_per_token: int
    """That attention reads for each token of a context."""
    expert_bytes: int = 0
    """Of the weights, those of experts, of which a pass reads what its tokens choose."""
    experts_held: int = 0
    """In each layer that has any."""
    experts_per_token: int = 0

    def tell(self, tracer: Tracer) -> None:
        """For every fragment once; nothing while tracing is off."""
        costs = {
            "weight_bytes": self.weight_bytes,
            "flops_per_token": self.flops_per_token,
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "expert_bytes": self.expert_bytes,
            "experts_held": self.experts_held,
            "experts_per_token": self.experts_per_token,
        }
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
