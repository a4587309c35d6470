# SPDX-License-Identifier: Apache-2.0
"""The model of the device takes what the backend passes to it, and finds what is wrong with anything else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pypto_rig import GREEDY, PROMPTS, Rig

from pagoda.backend.base import DeviceLostError
from pagoda.messages.frontend import Work
from pagoda.messages.worker import SlotStart, StepPlan
from pagoda.telemetry.tracer import TraceLevel, Tracer, TraceSession


def test_results_are_poison_until_they_are_awaited(rig: Callable[..., Rig]) -> None:
    found = rig()
    found.prefill()
    found.decode()
    program, args = found.calls["topk_select"]
    run = found.worker.submit(program, *args)
    assert bool(args[2].isnan().all())
    assert bool((args[3] == -1).all())
    run.result()
    assert bool(args[2][:3, 0].isfinite().all())
    assert run.device_ns > 0


def _first(change: Callable[[torch.Tensor], None]) -> Callable[[Any], Any]:
    """An argument in the same memory, changed."""

    def changed(tensor: Any) -> Any:
        change(tensor)
        return tensor

    return changed


def _put(at: Any, value: int) -> Callable[[Any], Any]:
    return _first(lambda tensor: tensor.__setitem__(at, value))


def _shifted(handle: Any) -> Any:
    return type(handle)(handle.data_ptr + (1 << 48), handle.shape, handle.dtype)


def _fewer(handle: Any) -> Any:
    return type(handle)(handle.data_ptr, (handle.shape[0] // 2, *handle.shape[1:]), handle.dtype)


def _as_bf16(handle: Any) -> Any:
    return type(handle)(handle.data_ptr, handle.shape, torch.bfloat16)


WRONG: list[tuple[str, str, Callable[[Any], Any], str]] = [
    ("decode", "sampled_ids_in", _put((1, 0), 960), "not in the vocabulary"),
    ("decode", "sampled_ids_in", _put((1, 3), 1), "more than one column"),
    ("decode", "sampled_ids_in", torch.clone, "is not shared"),
    ("decode", "seq_lens", lambda it: it.clone().share_memory_(), "not shared when the worker"),
    ("decode", "seq_lens", torch.Tensor.long, "is not shared"),
    ("decode", "seq_lens", _put(1, 0), "not filled with 0 behind sequences"),
    ("prefill", "seq_lens", _put(1, 130), "are shorter than chunks"),
    ("decode", "seq_lens", _put(2, 3000), "too long"),
    ("decode", "slot_mapping", _put(1, 5), "not where block tables put tokens"),
    ("decode", "block_table", _put(1, 8), "names a page that is not among 8"),
    ("decode", "block_table", _put(9, 3), "not filled with 0 behind sequences"),
    ("decode", "out", _shifted, "has no memory"),
    ("decode", "out", _as_bf16, "decode.out is torch.bfloat16, not fp32"),
    ("decode", "wq", _fewer, "decode.wq is [512, 256], not [1024, 256]"),
    ("decode", "k_cache", lambda it: torch.zeros(it.shape), "is Tensor, not memory of a chip"),
    ("prefill", "chunk_lens", _put(0, 129), "are not those of 393 tokens"),
    ("prefill", "chunk_lens", _put(3, 1), "are not those of 393 tokens"),
    ("prefill", "chunk_offsets", _put(1, 131), "not where chunks begin"),
    ("prefill", "chunk_offsets", _put(5, 0), "not behind all chunks"),
    ("prefill", "seq_lens", _put(7, 1), "rows without tokens have seq_lens"),
    ("prefill", "block_table", _put(20, 0), "not filled with -1 behind sequences"),
    ("prefill", "slot_mapping", _put(3, 4), "not where block tables put tokens"),
    ("prefill", "input_ids", _put(0, -1), "not in the vocabulary"),
    ("topk_select", "sampling_control", _put(1, 33), "a selection of 33 of 3 rows"),
    ("topk_select", "sampling_control", _put(0, 17), "a selection of 1 of 17 rows"),
    ("topk_select", "logits", _fewer, "topk_select.logits is [8, 1024], not [16, 1024]"),
]
"""Program, argument, what is done to it, and what the device says."""


@pytest.mark.parametrize("program", ["prefill", "decode", "topk_select"])
def test_wrong_arguments_are_found(rig: Callable[..., Rig], tmp_path: Path, program: str) -> None:
    from pagoda_pypto_device.memory import ContractError

    found = rig(log=str(tmp_path))
    found.prefill()
    found.decode()
    compiled, args = found.calls[program]
    names = [arg.name for arg in compiled.contract.programs[program].args]
    kept = [arg.clone() if isinstance(arg, torch.Tensor) else None for arg in args]
    cases = [case[1:] for case in WRONG if case[0] == program]
    for argument, change, message in cases:
        at = names.index(argument)
        changed = list(args)
        changed[at] = change(args[at])
        with pytest.raises(ContractError) as caught:
            found.worker.submit(compiled, *changed).result()
        assert message in str(caught.value)
        for arg, copy in zip(args, kept, strict=True):
            if copy is not None:
                arg.copy_(copy)
    found.worker.submit(compiled, *args).result()
    assert len((tmp_path / "violations").read_text(encoding="utf-8").splitlines()) == len(cases)


def test_kv_that_nobody_wrote_is_found(rig: Callable[..., Rig]) -> None:
    from pagoda_pypto_device.memory import ContractError

    found = rig()
    found.prefill()
    found.decode()
    compiled, args = found.calls["decode"]
    names = [arg.name for arg in compiled.contract.programs["decode"].args]
    given = dict(zip(names, args, strict=True))
    given["block_table"].view(16, -1)[1, 0] = 7
    with pytest.raises(ContractError, match="lacks K that it reads"):
        found.worker.submit(compiled, *args).result()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"failure_rate": 1.0}, "AICore exception, error code 507015"),
        ({"timeout_rate": 1.0}, "TENSOR_WAIT_TIMEOUT"),
    ],
)
@pytest.mark.parametrize("late_rate", [0.0, 1.0])
def test_a_device_that_fails_is_lost_and_blames_no_request(
    rig: Callable[..., Rig], settings: dict[str, float], message: str, late_rate: float
) -> None:
    from pagoda_pypto_device.settings import Settings

    found = rig()
    found.worker.settings = Settings(late_rate=late_rate, **settings)  # type: ignore[arg-type]
    with pytest.raises(DeviceLostError, match=message):
        found.prefill()


def test_a_step_behind_one_that_failed_unawaited_says_why_that_failed(
    rig: Callable[..., Rig],
) -> None:
    found = rig(late_rate=0.0)
    start = SlotStart(0, PROMPTS[0], len(PROMPTS[0]), 0, [[0, 1]], Work(GREEDY))
    from pagoda_pypto_device.settings import Settings

    found.worker.settings = Settings(late_rate=0.0, failure_rate=1.0)
    found.runner.submit(StepPlan(0, [0], [60], [start])).result()
    with pytest.raises(DeviceLostError, match="AICore exception"):
        found.runner.submit(StepPlan(1, [0], [60])).result()


def test_steps_that_want_no_row_are_not_awaited(rig: Callable[..., Rig]) -> None:
    found = rig()
    start = SlotStart(0, PROMPTS[0], len(PROMPTS[0]), 0, [[0, 1]], Work(GREEDY))
    found.runner.submit(StepPlan(0, [0], [60], [start])).result()
    found.runner.submit(StepPlan(1, [0], [60])).result()
    assert [run.program.name for run in found.worker.pending] == ["prefill", "prefill"]
    result = found.runner.submit(StepPlan(2, [0], [10])).result()
    assert not found.worker.pending
    assert result.slots == [0]


def test_traces_have_the_time_of_the_chips(rig: Callable[..., Rig], tmp_path: Path) -> None:
    tracer = Tracer("worker dp0 tp0 pp0")
    tracer.start(TraceSession(level=TraceLevel.KERNEL, directory=str(tmp_path), run="run"))
    found = rig(tracer)
    assert [each.name for each in found.runner.model.operations] == ["plan", "decoder"]
    found.prefill()
    found.decode()
    tracer.stop()
    (fragment,) = tmp_path.iterdir()
    events = [json.loads(line) for line in fragment.read_bytes().splitlines()]
    times = [each["args"]["ops_ns"] for each in events if each.get("name") == "forward"]
    assert [len(each) for each in times] == [2, 2]
    assert all(of_chips > 0 for _, of_chips in times)
