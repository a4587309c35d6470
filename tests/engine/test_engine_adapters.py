# SPDX-License-Identifier: Apache-2.0
"""Adapters of an engine over simulated workers: requests need one that is loaded, and keep it until they end."""

from __future__ import annotations

from pagoda.engine.core import EngineCore
from pagoda.ipc.clock import VirtualClock
from pagoda.messages.adapters import Adapter, AdapterLoaded
from pagoda.messages.engine_config import EngineConfig, SimConfig
from pagoda.messages.frontend import GenerateRequest, RequestRefused, Work
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.worker_config import WorkerConfig
from pagoda.plugins.sim.executor import SimExecutor

FIRST, LATE = (Adapter(name, f"/{name}", f"digest of {name}") for name in ("first", "late"))


class _Executor(SimExecutor):
    """Notes what is unloaded."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(SimConfig(num_blocks=64, max_model_len=256), clock=clock)
        self.unloaded: list[str] = []

    def unload_adapter(self, digest: str) -> None:
        self.unloaded.append(digest)


def _engine() -> tuple[EngineCore, _Executor]:
    clock = VirtualClock()
    executor = _Executor(clock)
    config = EngineConfig(worker=WorkerConfig(model="sim", adapters=(FIRST,)), executor="sim")
    core = EngineCore(config, executor, clock)
    core.step()
    return core, executor


def _request(name: str, adapter: str, count: int = 3) -> GenerateRequest:
    sampling = SamplingParams(seed=1, max_tokens=count)
    prompt = list(range(40))
    return GenerateRequest(
        request_id=name, prompt_token_ids=prompt, work=Work(sampling, adapter=adapter)
    )


def test_requests_need_an_adapter_that_is_loaded() -> None:
    core, _ = _engine()
    assert core.add(_request("a", FIRST.digest)) == []
    refused = core.add(_request("b", LATE.digest))
    assert isinstance(refused, RequestRefused)
    assert refused.error == "the adapter is not loaded here."
    core.adapters.load(LATE)
    core.step()
    assert core.adapters.drain_news() == [AdapterLoaded(LATE.digest)]
    assert core.add(_request("c", LATE.digest)) == []
    core.adapters.load(LATE)
    assert core.adapters.drain_news() == [AdapterLoaded(LATE.digest)]


def test_an_adapter_goes_with_its_last_request() -> None:
    core, executor = _engine()
    core.add(_request("a", FIRST.digest, 4))
    core.add(_request("b", FIRST.digest, 40))
    core.add(_request("c", "", 100))
    core.unload_adapter(FIRST.digest)
    assert isinstance(core.add(_request("d", FIRST.digest)), RequestRefused)
    ended: set[str] = set()
    while "b" not in ended:
        assert executor.unloaded == []
        ended |= {chunk.request_id for chunk in core.step() if chunk.finish_reason is not None}
    core.step()
    assert executor.unloaded == [FIRST.digest]
    core.step()
    assert executor.unloaded == [FIRST.digest]


def test_an_adapter_may_come_back_before_it_is_gone() -> None:
    core, executor = _engine()
    core.add(_request("a", FIRST.digest, 20))
    core.unload_adapter(FIRST.digest)
    core.adapters.load(FIRST)
    assert core.adapters.drain_news() == [AdapterLoaded(FIRST.digest)]
    assert core.add(_request("b", FIRST.digest)) == []
    for _ in range(40):
        core.step()
    assert executor.unloaded == []


def test_prefixes_are_of_one_adapter() -> None:
    core, _ = _engine()
    core.adapters.load(LATE)
    core.step()
    hits = []
    for name, adapter in enumerate(("", FIRST.digest, LATE.digest, FIRST.digest, "")):
        core.add(_request(str(name), adapter))
        while not any(chunk.finish_reason is not None for chunk in core.step()):
            pass
        hits.append(core.load().num_prefix_hit_tokens)
    assert hits == [0, 0, 0, 32, 64]
