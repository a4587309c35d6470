# SPDX-License-Identifier: Apache-2.0
"""How threads share out a step, counted: csrc/panels.h, the order of experts and the plan of attention."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from cpu_cases import needs_kernels
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.cpu.threads import (
    TILE_ROWS,
    ExpertProduct,
    Product,
    attention_tasks,
    claim,
    ends,
    products,
    tasks_of,
    waiting,
)
from pagoda.backend.cpu.native import load_native
from pagoda.checkpoints.config_json import parse_model_config
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.presets import PRESETS

pytestmark = needs_kernels
_PART_BYTES = 512 * 1024
_CUT_ROWS = 24
_AMX_ROWS = 32
_MODELS = ("qwen3-0.6b", "llama-3.1-8b", "qwen3-30b-a3b")


def _spec(model: str) -> ModelSpec:
    return parse_model_config(PRESETS[model], source=model)


@given(
    panels=st.integers(1, 300), rows=st.integers(1, 600), row_bytes=st.integers(64, 20_000),
    tile_rows=st.sampled_from([TILE_ROWS, _AMX_ROWS]), threads=st.integers(1, 64),
)  # fmt: skip
@settings(derandomize=True, deadline=None)
def test_tasks_are_all_of_a_product_once(
    panels: int, rows: int, row_bytes: int, tile_rows: int, threads: int
) -> None:
    tasks = load_native().panel_tasks(panels, rows, row_bytes, tile_rows, threads)
    by_panel: dict[int, list[tuple[int, int]]] = {}
    for panel, first, end in tasks:
        by_panel.setdefault(panel, []).append((first, end))
    assert sorted(by_panel) == list(range(panels))
    for spans in by_panel.values():
        assert spans[0][0] == 0
        assert spans[-1][1] == rows
        assert all(end == first for (_, end), (first, _) in pairwise(spans))
        assert all(first < end and first % tile_rows == 0 for first, end in spans)
    reads = max(Counter(panel for panel, *_ in tasks).values())
    parts = max(1, -(-rows * row_bytes // _PART_BYTES))
    if panels >= 10 * threads or (panels >= threads and rows <= _CUT_ROWS):
        assert reads <= parts


@given(st.integers(0, 400), st.lists(st.floats(0.5, 1.0), min_size=1, max_size=64))
@settings(derandomize=True, deadline=None)
def test_each_task_is_claimed_once_and_nobody_waits_for_more_than_one(
    num_tasks: int, speeds: list[float]
) -> None:
    """Whatever the cores, as long as none is less than half as fast as another."""
    costs = [1.0] * num_tasks
    taken = claim(costs, speeds)
    assert sorted(task for own in taken for task in own) == list(range(num_tasks))
    last = ends(costs, speeds)
    assert max(last) - min(last) <= 1 / min(speeds) + 1e-9


@pytest.mark.parametrize("threads", [1, 2, 3, 6, 8, 12, 14, 16, 24, 31, 32, 48, 60, 64])
@pytest.mark.parametrize("model", _MODELS)
def test_equal_threads_have_equal_work(model: str, threads: int) -> None:
    spec, equal = _spec(model), [1.0] * threads
    for product in set(products(spec, 1)):
        tasks = tasks_of(product, 1, threads)
        counts = [len(own) for own in claim(tasks.costs, equal)]
        assert max(counts) - min(counts) <= 1  # panels, which are not cut for a few rows
    prompt = Counter(tasks_of(product, 512, threads).costs for product in products(spec, 512))
    assert waiting(prompt, equal) <= 1.1


@pytest.mark.parametrize("threads", [2, 4, 8, 16, 32])
@pytest.mark.parametrize("model", _MODELS)
def test_a_slow_core_holds_nobody_up(model: str, threads: int) -> None:
    """One that is half as fast: shares of equal size would take twice as long."""
    spec, speeds = _spec(model), [0.5, *[1.0] * (threads - 1)]
    prompt = Counter(tasks_of(product, 512, threads).costs for product in products(spec, 512))
    assert waiting(prompt, speeds) <= 1.1
    for costs in [*prompt, *attention_tasks(spec, 16, 1, 1024, threads)]:
        last = ends(costs, speeds)
        assert max(last) - min(last) <= 2 * max(costs)


@pytest.mark.parametrize("threads", [4, 16, 64])
def test_popular_experts_come_first(threads: int) -> None:
    rows = [0, *[3] * 60, 2000, 0, *[9] * 60, 700]
    order = load_native().expert_order(rows)
    assert order == sorted((e for e in range(len(rows)) if rows[e]), key=lambda e: -rows[e])
    tasks = ExpertProduct(Product(24, 2048, 2), tuple(rows)).tasks()
    assert sum(tasks.costs) == sum(rows) * 24 * tasks.weights[0]
    last = ends(tasks.costs, [1.0] * threads)
    assert max(last) <= max(sum(tasks.costs) / threads * 1.1, 2 * max(tasks.costs))


@pytest.mark.parametrize("threads", [2, 8, 16, 32])
@pytest.mark.parametrize("case", [(1, 1, 8192), (16, 1, 1024), (1, 2048, 2048), (3, 7, 5000)])
def test_heads_that_share_keys_are_shared_out(case: tuple[int, int, int], threads: int) -> None:
    phases = attention_tasks(_spec("llama-3.1-8b"), *case, threads)
    assert waiting(phases, [1.0] * threads) <= 1.1
