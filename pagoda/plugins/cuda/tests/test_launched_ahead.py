# SPDX-License-Identifier: Apache-2.0
"""The GPU backend is given steps of models with states and with experts before those in front are computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import pytest
from counting import CountingDevice

from pagoda.backend.kv_store import DeviceEvent
from pagoda.backend.reference.backend import ReferenceBackend
from pagoda.messages.frontend import Work
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.speculation import DrafterConfig
from pagoda.messages.worker import SlotStart, StepPlan, StepResult
from pagoda.messages.worker_config import WorkerConfig
from pagoda.plugins.backend_check.small_models import WITH_EXPERTS, WITH_STATES, model_directory
from pagoda.plugins.cuda.backend import GpuBackend
from pagoda.telemetry.tracer import Tracer
from pagoda.worker import loading
from pagoda.worker.runner import Runner, Ticket

SHARES = [(3, 1), (1, 1), (1, 1), (1, 1), (1, 1)]
"""Tokens of two slots, step by step."""
PROMPTS = ([5, 6, 7], [8])
SAMPLING = (
    SamplingParams(temperature=0.9, seed=3, max_tokens=20),
    SamplingParams(temperature=0, seed=0, max_tokens=20),
)
"""Steps draw the token of one slot, and take the likeliest of the other."""
WITH_BOTH: Mapping[str, object] = {
    **WITH_STATES,
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 16,
}
WITH_HEAD: Mapping[str, object] = {
    **{key: size for key, size in WITH_EXPERTS.items() if "expert" not in key and "moe" not in key},
    "architectures": ["MiMoForCausalLM"],
    "num_nextn_predict_layers": 1,
}


def _run(
    config: Mapping[str, object],
    backend: Any,
    monkeypatch: pytest.MonkeyPatch,
    drafter: DrafterConfig | None = None,
) -> tuple[list[StepResult], list[bool]]:
    """Results of steps, and which steps were computed when the next one had been launched."""
    monkeypatch.setattr(loading, "choose_backend", lambda *_: (backend, "test"))
    with model_directory(config) as directory:
        sizes: dict[str, Any] = {"num_blocks": 8, "max_num_seqs": 2, "max_model_len": 16}
        plan = loading.plan_worker(
            WorkerConfig(
                model=directory, load_format="dummy", dtype="float32", drafter=drafter, **sizes
            )
        )
        runner = loading.load_runner(plan, Tracer("worker")).runner
    assert isinstance(runner, Runner)
    groups = range(len(runner.batch.block_sizes))
    starts = [
        SlotStart(
            slot, prompt, len(prompt), 0, [[2 * group + slot] for group in groups], Work(sampling)
        )
        for slot, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLING, strict=True))
    ]
    results, were_computed = [], []
    under_way: deque[tuple[Ticket[StepResult], DeviceEvent | None]] = deque()
    for step, shares in enumerate(SHARES):
        wanted = [] if drafter is None else [(0, 3), (1, step)]
        begun = starts if step == 0 else []
        ticket = runner.submit(StepPlan(step, [0, 1], [*shares], begun, proposals=wanted))
        under_way.append((ticket, ticket.launch()))
        if len(under_way) == 2:
            before, done = under_way.popleft()
            were_computed.append(done is None or done.done)
            results.append(before.result())
    results.append(under_way.popleft()[0].result())
    return results, were_computed


@pytest.mark.parametrize("config", [WITH_STATES, WITH_EXPERTS, WITH_BOTH])
def test_two_steps_are_under_way_at_once(
    config: Mapping[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = CountingDevice()
    own, were_computed = _run(config, GpuBackend(device), monkeypatch)
    expected, _ = _run(config, ReferenceBackend(), monkeypatch)
    assert were_computed == [False] * 4
    assert [(it.slots, it.token_ids) for it in own] == [(it.slots, it.token_ids) for it in expected]
    assert [it.expert_tokens for it in own] == [it.expert_tokens for it in expected]
    assert any(own[-1].expert_tokens) == ("num_experts" in config)
    assert device.num_replayed > 0


def test_a_head_drafts_behind_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are launched before it has drafted behind the one in front."""
    drafter = DrafterConfig(method="auto")
    own, _ = _run(WITH_HEAD, GpuBackend(CountingDevice()), monkeypatch, drafter)
    expected, _ = _run(WITH_HEAD, ReferenceBackend(), monkeypatch, drafter)
    assert [it.token_ids for it in own] == [it.token_ids for it in expected]
    assert [it.proposals for it in own] == [it.proposals for it in expected]
    assert [len(it.proposals.get(1, [])) for it in own] == [0, 1, 2, 3, 4]
