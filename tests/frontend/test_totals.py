from __future__ import annotations

import msgspec
import pytest
from scripted_endpoint import ScriptedEndpoint

from pagoda.engine.messages import ProcessMemory, ReplicaLoad, StepTotals
from pagoda.frontend.totals import sum_of_loads


def replica(name: str, report: object) -> ReplicaLoad:
    return ReplicaLoad(name=name, state="ready", num_requests=0, weighed_tokens=0, report=report)  # type: ignore[arg-type]


async def test_what_steps_did_adds_up_over_replicas() -> None:
    zeros = await ScriptedEndpoint().load()
    steps = StepTotals(num_tokens=5, num_sequences=2, by_tokens=[1, 1], by_sequences=[2])
    others = StepTotals(num_tokens=1, by_tokens=[0, 0, 4], schedule_s=0.5, update_s=0.25)
    engine, worker = ProcessMemory("engine dp0", 7, 10), ProcessMemory("worker dp1 tp0 pp0", 8, 20)
    first = msgspec.structs.replace(zeros, num_generated_tokens=3, steps=steps, processes=(engine,))
    second = msgspec.structs.replace(
        zeros, num_generated_tokens=4, steps=others, processes=(worker,)
    )
    total = sum_of_loads(
        (replica("0", first), replica("1", second), replica("2", None)), num_held=0
    )
    assert total.num_generated_tokens == 7
    assert total.steps == StepTotals(
        num_tokens=6,
        num_sequences=2,
        by_tokens=[1, 1, 4],
        by_sequences=[2],
        schedule_s=0.5,
        update_s=0.25,
    )
    assert total.processes == (engine, worker)


@pytest.mark.parametrize("name", list(StepTotals.__struct_fields__))
async def test_no_part_of_the_steps_is_left_out(name: str) -> None:
    zeros = await ScriptedEndpoint().load()
    value = [2] if name.startswith("by_") else 2
    report = msgspec.structs.replace(zeros, steps=StepTotals(**{name: value}))
    assert getattr(sum_of_loads((replica("0", report),), num_held=0).steps, name) == value
