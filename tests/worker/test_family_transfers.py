# SPDX-License-Identifier: Apache-2.0
"""KV of any family and format that a tier gives back, or another engine hands over, is as good as computed KV."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from driver import Driver
from family_models import FAMILIES, make_model
from own_code_models import as_makers_publish, make_like
from scan_models import SCANS

from pagoda.kv.layout import KVLayout
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.transfers import KVPeer, KVRank
from pagoda.messages.worker import StepResult
from pagoda.messages.worker_config import WorkerConfig
from pagoda.plugins.disaggregation.worker.plan import find_runs, make_spans, own_parts, plan_slices
from pagoda.telemetry.tracer import Tracer
from pagoda.worker.loading import LoadedWorker, load_runner, plan_worker
from pagoda.worker.memory_plan import WorkerMemoryPlan
from pagoda.worker.runner import Runner

NUM_BLOCKS = 128
PROMPT = [random.Random(5).randrange(320) for _ in range(150)]
SAMPLING = SamplingParams(temperature=0, seed=0, max_tokens=100, logprobs=5)
FORMATS = {
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8", "kv_cache_dtype": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4", "kv_cache_dtype": "int8"},
}


SIZES = (
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
)
"""Inner channels of the MLPs of some families, which groups of int4 weights must divide."""


_ODD = (SCANS.keys() - {"jamba"}) | {"longcat-flash", "gemma4", "gemma3n", "dbrx"}
"""Families with other sizes that groups of int4 weights do not divide."""

_OWN_CODE = ("deci", "solar", "step", "arctic", "mistral-large3")
"""Families with code of their own whose layers are not those of others: some keep nothing, or heads differ."""


class Worker(NamedTuple):
    plan: WorkerMemoryPlan
    loaded: LoadedWorker

    def driver(self) -> Driver:
        assert isinstance(self.loaded.runner, Runner)
        return Driver(self.loaded.runner, num_blocks=NUM_BLOCKS, block_size=self.plan.block_size)


def load(directory: Path, **options: str) -> Worker:
    config = WorkerConfig(
        model=str(directory),
        num_blocks=NUM_BLOCKS,
        max_model_len=256,
        max_num_seqs=2,
        num_threads=1,
        **options,  # type: ignore[arg-type]
    )
    plan = plan_worker(config)
    return Worker(plan, load_runner(plan, Tracer("worker")))


Blocks = list[tuple[int, int, int]]
"""A KV group, its block there and the one here."""


def over_a_tier(there: Worker, here: Worker, blocks: Blocks) -> None:
    for _, source, target in blocks:
        kept = bytearray(there.loaded.kv.block_bytes)
        there.loaded.kv.read([source], [memoryview(kept)])
        here.loaded.kv.write([target], [memoryview(kept)])


def from_another_engine(there: Worker, here: Worker, blocks: Blocks) -> None:
    theirs, ours = (
        own_parts(worker.loaded.kv, worker.plan.shard, worker.plan.layer_places)
        for worker in (there, here)
    )
    rank = KVRank(parts=tuple(own.part for own in theirs), num_blocks=NUM_BLOCKS, descriptors={})
    (slices,) = plan_slices(ours, 0, KVPeer(peer_id="p", ranks=(rank,))).values()
    regions = there.loaded.kv.regions()
    addresses = [region.address for region in here.loaded.kv.regions()]
    for group, source, target in blocks:
        own = [piece for piece in slices if piece.group == group]
        for span in make_spans(own, find_runs([source], [target]), addresses):
            address = regions[span.region].address + span.offset
            ctypes.memmove(span.target, address, span.num_bytes)


WAYS: dict[str, Callable[[Worker, Worker, Blocks], None]] = {
    "tier": over_a_tier,
    "handoff": from_another_engine,
}


def answer(driver: Driver) -> list[object]:
    def known(result: StepResult) -> object:
        return result.token_ids, result.logprobs

    driver.run([0], 6)
    return [known(result) for result in driver.results]


@pytest.mark.parametrize(
    ("name", "number_format"),
    [
        *((name, it) for name in FAMILIES for it in FORMATS if it != "int4" or name not in _ODD),
        *((name, it) for name in _OWN_CODE for it in FORMATS if it != "int4"),
    ],
)
def test_answers_behind_a_transfer_are_the_same(
    name: str, number_format: str, tmp_path: Path
) -> None:
    if name in _OWN_CODE:
        make_like(name).save_pretrained(tmp_path)
        as_makers_publish(name, tmp_path)
    else:
        sizes = {size: 64 for size in SIZES if size in FAMILIES[name][1]}
        make_model(name, **sizes).save_pretrained(tmp_path)
    there = load(tmp_path, **FORMATS[number_format])
    computed = there.driver()
    computed.start(0, PROMPT, SAMPLING)
    expected = answer(computed)
    layout = KVLayout(there.plan.block_size, there.plan.kv_groups)
    end = layout.usable((len(PROMPT) - 1) // layout.block_size)
    assert end
    for way in WAYS.values():
        here = load(tmp_path, **FORMATS[number_format])
        driver = here.driver()
        driver.take(3)  # blocks are others than there
        driver.start(0, PROMPT, SAMPLING, num_computed=end * layout.block_size)
        blocks = [
            (group, computed.blocks[0][group][index], driver.blocks[0][group][index])
            for group in range(len(layout.groups))
            for index in layout.needed(group, end)
        ]
        way(there, here, blocks)
        assert answer(driver) == expected
