from __future__ import annotations

import msgspec
import pytest
from scripted_endpoint import ScriptedEndpoint

from pagoda.frontend.totals import Counted, sum_of_loads
from pagoda.messages.load import LoadReport, ProcessMemory, ReplicaLoad, StepTotals, TierLoad


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


async def counters(number: int, *, num_steps: int) -> LoadReport:
    zeros = await ScriptedEndpoint().load()
    return msgspec.structs.replace(
        zeros,
        num_steps=num_steps,
        num_generated_tokens=number,
        num_engine_restarts=number,
        num_running=number,
        steps=StepTotals(num_tokens=number, by_tokens=[number]),
        expert_tokens=[number],
        tiers=(TierLoad(name="host", num_blocks=5, num_total_blocks=9, num_stored=number),),
        processes=(ProcessMemory("engine dp0", 7, 10),),
    )


async def test_counters_do_not_fall_when_a_replica_does_not_answer_or_begins_anew() -> None:
    answers = [
        await counters(4, num_steps=10),
        None,
        await counters(5, num_steps=11),
        None,
        await counters(1, num_steps=2),  # another engine
        await counters(3, num_steps=3),
        None,
        await counters(0, num_steps=0),
    ]
    counted = Counted()
    seen = []
    for answer in answers:
        if answer is not None:
            counted.take(answer)
        load = replica("0", answer)
        total = sum_of_loads((load,), num_held=0, counted=counted.beside(answer))
        ours = (
            total.num_generated_tokens,
            total.steps.num_tokens,
            total.steps.by_tokens[0],
            total.expert_tokens[0],
            total.tiers[0].num_stored,
            counted.num_losses,
        )
        assert len(set(ours)) == 1
        seen.append(ours[0])
        assert total.num_running == (answer.num_running if answer else 0)
        assert total.tiers[0].num_blocks == (5 if answer else 0)
        assert len(total.processes) == bool(answer)
    assert seen == [4, 4, 5, 5, 6, 8, 8, 8]
