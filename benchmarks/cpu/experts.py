# SPDX-License-Identifier: Apache-2.0
"""Experts of one layer: the fused operation beside a loop over experts in PyTorch, and the machine's limits.

`python -m benchmarks.cpu.experts [--threads N] [--isa NAME]`. The shape is that of a layer of Qwen3-30B-A3B.
Tokens go to experts at random, as evenly as they come. The loop is what transformers does by default.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial

# Read when torch is loaded: threads wait as they do in a worker.
from pagoda.worker.pinning import SPIN_COUNT

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)

import torch
import torch.nn.functional as F
from cyclopts import App
from torch import Tensor

from benchmarks.cpu.held_weights import held_weight
from benchmarks.cpu.limits import Limits, median_seconds, start
from pagoda.backend.base import Experts
from pagoda.backend.cpu.backend import CpuBackend
from pagoda.backend.cpu.weights import PackedLinear
from pagoda.backend.graph import Value
from pagoda.backend.operations import GraphBuilder
from pagoda.backend.single import bind
from pagoda.checkpoints.expert_routing import ExpertRouting
from pagoda.cli import output

_HIDDEN, _INNER = 2048, 768
_ROUTING = ExpertRouting(num_experts=128, experts_per_token=8, renormalize=True)
_TOKENS = (1, 4, 16, 256)

_app = App()


@_app.default
def main(*, threads: int | None = None, isa: str | None = None) -> None:
    """Measures.

    Args:
        threads: By default all usable cores.
        isa: Instruction set; by default the highest.
    """
    console = output.stdout()
    with torch.inference_mode():
        ops, limits = start(threads, isa)
        columns = (
            "tokens",
            "weights",
            "experts",
            "ms",
            "GB/s",
            "GFLOP/s",
            "of the limit",
            "of PyTorch",
        )
        console.print(output.table("128 experts, 8 for each token", columns, _rows(ops, limits)))


def _rows(ops: CpuBackend, limits: Limits) -> Iterable[tuple[str, ...]]:
    gate_up = torch.randn(_ROUTING.num_experts, 2 * _INNER, _HIDDEN).bfloat16() * _HIDDEN**-0.5
    down = torch.randn(_ROUTING.num_experts, _HIDDEN, _INNER).bfloat16() * _INNER**-0.5
    stored_format = {
        "bfloat16": _prepared(ops, gate_up, down, "none"),
        "int8": _prepared(ops, gate_up, down, "int8"),
        "int4": _prepared(ops, gate_up, down, "int4"),
    }
    for tokens in _TOKENS:
        x, logits = torch.randn(tokens, _HIDDEN), torch.randn(tokens, _ROUTING.num_experts)
        loop, *fused = median_seconds(
            partial(_loop, x.bfloat16(), logits, gate_up, down),
            *(_bound(ops, x, logits, experts) for experts in stored_format.values()),
        )
        used = len(set(logits.topk(_ROUTING.experts_per_token).indices.flatten().tolist()))
        for (name, experts), seconds in zip(stored_format.items(), fused, strict=True):
            moved = used * _expert_bytes(experts) / seconds
            weights = 3 * _INNER * _HIDDEN
            flops = 2 * tokens * _ROUTING.experts_per_token * weights / seconds
            share = max(moved / limits.bytes_per_s, flops / limits.flops)
            yield (
                str(tokens),
                name,
                str(used),
                f"{seconds * 1e3:.2f}",
                f"{moved / 1e9:.1f}",
                f"{flops / 1e9:.0f}",
                f"{share:.0%}",
                f"{loop / seconds:.2f} x",
            )


def _bound(
    ops: CpuBackend, x: Tensor, logits: Tensor, experts: Experts[PackedLinear]
) -> Callable[[], Tensor]:
    def record(ops: GraphBuilder, x: Value, logits: Value) -> Value:
        return ops.experts(x, logits, experts)

    return bind(ops, record, {"x": x, "logits": logits})


def _prepared(
    ops: CpuBackend, gate_up: Tensor, down: Tensor, quantization: str
) -> Experts[PackedLinear]:
    def prepared(maps: Tensor) -> tuple[PackedLinear, ...]:
        return tuple(
            ops.prepare_linear([held_weight(ops, m, quantization)], None, torch.bfloat16)
            for m in maps
        )

    counts = torch.zeros(_ROUTING.num_experts, dtype=torch.int64)
    gates, ups = (prepared(part) for part in gate_up.chunk(2, dim=1))
    return Experts(_ROUTING, 0, gates, ups, prepared(down), counts)


def _expert_bytes(experts: Experts[PackedLinear]) -> int:
    maps = (experts.gate[0], experts.up[0], experts.down[0])
    return sum(segment.panels.nbytes for m in maps for segment in m.segments)


def _loop(x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    probabilities = logits.softmax(dim=1)
    weights, chosen = probabilities.topk(_ROUTING.experts_per_token)
    weights = (weights / weights.sum(1, keepdim=True)).to(x.dtype)
    out = torch.zeros_like(x)
    for expert in sorted(set(chosen.flatten().tolist())):
        tokens, places = (chosen == expert).nonzero(as_tuple=True)
        gate, up = F.linear(x[tokens], gate_up[expert]).chunk(2, dim=-1)
        own = F.linear(F.silu(gate) * up, down[expert])
        out.index_add_(0, tokens, own * weights[tokens, places, None])
    return out


if __name__ == "__main__":
    _app()
