# SPDX-License-Identifier: Apache-2.0
"""Shares of a step that 1 to 64 threads have: counted with the kernels' own splits and claims, not measured.

`python -m benchmarks.cpu.threads [--model qwen3-0.6b] [--speed 0.5]`. A task takes as long as it has
multiplications (attention: cached tokens times heads), and threads claim tasks as those of csrc/panels.h do.
Printed are the bytes of weights and the multiplications of the thread that has most of them, the time until all
are done over what it would be if nobody waited, with equal threads and with a first one of another speed, atomic
operations on queues, and barriers.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from cyclopts import App

from pagoda.backend.cpu.native import load_native
from pagoda.checkpoints.config_json import parse_model_config
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.presets import PRESETS
from pagoda.cli import output
from pagoda.messages.segments import SEGMENT

TILE_ROWS = 12
"""Rows that AVX-512 multiplies at once."""
_PANEL, _ITEM_BYTES = 32, 2
_BLOCK_SIZE = 16
_THREADS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
_ROWS = (1, 16, 256, 2048)
_CONTEXTS = ((1, 1, 512), (1, 1, 8192), (16, 1, 1024), (1, 2048, 2048))
"""Sequences, query tokens and context of each."""
_OTHER_BARRIERS, _EXPERT_BARRIERS = 4, 7
"""Barriers of a layer beside those of products: two norms, rotation, attention; and all that experts have."""
_app = App()


@dataclass(frozen=True)
class Tasks:
    """Tasks between two barriers, in the order in which they are claimed."""

    costs: tuple[float, ...]
    """Multiplications."""
    weights: tuple[int, ...]
    """Numbers that are read from memory."""


@dataclass(frozen=True)
class Product:
    """Rows times a weight, whose outputs come as panels, or as pairs of panels of a gated MLP."""

    panels: int
    inputs: int
    panels_of_task: int = 1

    def tasks(self, rows: int, threads: int) -> Tasks:
        row_bytes = self.inputs * _ITEM_BYTES
        split = load_native().panel_tasks(self.panels, rows, row_bytes, TILE_ROWS, threads)
        weights = _PANEL * self.inputs * self.panels_of_task
        costs = tuple(float(weights * (end - first)) for _, first, end in split)
        return Tasks(costs, (weights,) * len(costs))


@dataclass(frozen=True)
class ExpertProduct:
    """Rows of several experts times a weight of each."""

    of_expert: Product
    rows: tuple[int, ...]
    """Rows of each expert."""

    def tasks(self) -> Tasks:
        product = self.of_expert
        weights = _PANEL * product.inputs * product.panels_of_task
        order = load_native().expert_order(list(self.rows))
        rows = [self.rows[expert] for expert in order for _ in range(product.panels)]
        return Tasks(tuple(float(weights * n) for n in rows), (weights,) * len(rows))


def tasks_of(product: Product | ExpertProduct, rows: int, threads: int) -> Tasks:
    return product.tasks() if isinstance(product, ExpertProduct) else product.tasks(rows, threads)


@_app.default
def main(*, model: str = "qwen3-0.6b", speed: float = 0.5) -> None:
    """Counts.

    Args:
        model: A shape preset.
        speed: Of the first thread, where it is on a core unlike the others, which have 1.
    """
    if not speed > 0:
        raise SystemExit("--speed has to be above 0.")
    spec = parse_model_config(PRESETS[model], source=model)
    of_work = ("all / even time", f"one at {speed:g}")
    columns = ("rows", "threads", "MB of weights", "10^6 products", *of_work, "atomics", "barriers")
    cases = [(rows, threads) for rows in _ROWS for threads in _THREADS]
    table = (_products_row(spec, rows, threads, speed) for rows, threads in cases)
    output.stdout().print(output.table("Products of a step, most of one thread", columns, table))
    of_attention = ("sequences", "queries", "context", "threads", "tasks", *of_work)
    attention = [(case, threads) for case in _CONTEXTS for threads in _THREADS]
    table = (_attention_row(spec, case, threads, speed) for case, threads in attention)
    output.stdout().print(output.table("Attention of a layer", of_attention, table))


def claim(costs: Sequence[float], speeds: Sequence[float]) -> list[list[int]]:
    """Numbers of the tasks that each of some threads takes, which claim as the kernels' threads do."""
    claims = load_native().TeamClaims(len(costs), len(speeds))
    taken: list[list[int]] = [[] for _ in speeds]
    free = [(0.0, thread) for thread in range(len(speeds))]
    while free:
        now, thread = heapq.heappop(free)
        if taken[thread]:
            claims.end(thread)
        task = claims.begin(thread)
        if task < 0:
            continue
        taken[thread].append(task)
        heapq.heappush(free, (now + costs[task] / speeds[thread], thread))
    return taken


def ends(costs: Sequence[float], speeds: Sequence[float]) -> list[float]:
    """Times at which threads of these speeds have no more to do."""
    return [
        sum(costs[task] for task in tasks) / speed
        for tasks, speed in zip(claim(costs, speeds), speeds, strict=True)
    ]


def waiting(phases: Mapping[tuple[float, ...], int], speeds: Sequence[float]) -> float:
    """The time until all phases, each so many times, are done over what it would be if no thread waited."""
    last = sum(count * max(ends(costs, speeds)) for costs, count in phases.items())
    return last * sum(speeds) / sum(count * sum(costs) for costs, count in phases.items())


def products(spec: ModelSpec, rows: int) -> Iterator[Product | ExpertProduct]:
    """Products of a step in which each row is a token whose logits are wanted; experts have equally many rows."""
    hidden = spec.hidden_size
    for layer in range(spec.num_layers):
        attention = spec.plain_linears(layer)
        yield Product(_panels(sum(it.outputs for it in attention.into)), hidden)
        yield Product(_panels(hidden), attention.out.inputs)
        experts = spec.expert_linears(layer)
        if experts is None or spec.experts is None:
            inner = spec.mlp_linears(layer).down.inputs
            yield Product(_panels(inner), hidden, 2)
            yield Product(_panels(hidden), inner)
            continue
        yield Product(_panels(experts.router.outputs), hidden)
        inner, count = experts.experts[0].down.inputs, len(experts.experts)
        pairs = rows * spec.experts.routing.experts_per_token
        shares = tuple(pairs * (e + 1) // count - pairs * e // count for e in range(count))
        yield ExpertProduct(Product(_panels(inner), hidden, 2), shares)
        yield ExpertProduct(Product(_panels(hidden), inner), shares)
    yield Product(_panels(spec.head.outputs), hidden)


def attention_tasks(
    spec: ModelSpec, sequences: int, queries: int, context: int, threads: int
) -> Counter[tuple[float, ...]]:
    """Tasks of both phases that read the cache, of sequences with nothing in common."""
    blocks = -(-context // _BLOCK_SIZE)
    tables = torch.arange(sequences * blocks).view(sequences, blocks)
    query_lens, context_lens, draft_lens = (
        torch.full((sequences,), n) for n in (queries, context, 0)
    )
    before = torch.get_num_threads()
    torch.set_num_threads(threads)  # the plan is for as many
    try:
        metadata = load_native().AttentionMetadata(
            spec.num_heads, spec.num_kv_heads, spec.head_dim, _BLOCK_SIZE, sequences * blocks, sequences,
            query_lens.data_ptr(), context_lens.data_ptr(), draft_lens.data_ptr(), tables.data_ptr(), blocks,
            SEGMENT,
        )  # fmt: skip
        shared, items, _ = metadata.tasks(2**62)
    finally:
        torch.set_num_threads(before)
    return Counter(tuple(map(float, phase)) for phase in (shared, items) if phase)


def _panels(outputs: int) -> int:
    return -(-outputs // _PANEL)


def _products_row(spec: ModelSpec, rows: int, threads: int, speed: float) -> tuple[str, ...]:
    equal = [1.0] * threads
    phases: Counter[tuple[float, ...]] = Counter()
    read = multiplied = 0.0
    atomics, barriers = 0, spec.num_layers * (_EXPERT_BARRIERS if spec.experts else 0)
    barriers += spec.num_layers * _OTHER_BARRIERS
    for product, count in Counter(products(spec, rows)).items():
        tasks = tasks_of(product, rows, threads)
        taken = claim(tasks.costs, equal)
        read += count * max(sum(tasks.weights[task] for task in own) for own in taken)
        multiplied += count * max(sum(tasks.costs[task] for task in own) for own in taken)
        phases[tasks.costs] += count
        atomics += count * (len(tasks.costs) + threads)
        barriers += 0 if isinstance(product, ExpertProduct) else 2 * count
    return (
        f"{rows}",
        f"{threads}",
        f"{read * _ITEM_BYTES / 1e6:.1f}",
        f"{multiplied / 1e6:.1f}",
        f"{waiting(phases, equal):.2f}",
        f"{waiting(phases, [speed, *equal[1:]]):.2f}",
        f"{atomics:,}",
        f"{barriers}",
    )


def _attention_row(
    spec: ModelSpec, case: tuple[int, int, int], threads: int, speed: float
) -> tuple[str, ...]:
    phases = attention_tasks(spec, *case, threads)
    equal = [1.0] * threads
    return (
        *map(str, case),
        f"{threads}",
        f"{sum(map(len, phases))}",
        f"{waiting(phases, equal):.2f}",
        f"{waiting(phases, [speed, *equal[1:]]):.2f}",
    )


if __name__ == "__main__":
    _app()
