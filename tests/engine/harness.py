# SPDX-License-Identifier: Apache-2.0
"""Shared by the tests of scheduler and engine: requests, and an engine that runs in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec
import small_grammars
from kv_subscriber import CacheView, assert_knows
from small_grammars import VOCAB_SIZE

from benchmarks.simulation.books import check_nothing_left
from benchmarks.simulation.disk import SimDisk
from pagoda.engine.batching import SchedulerLimits
from pagoda.engine.core import EngineCore
from pagoda.engine.kv_transfers import KVTransferHooks
from pagoda.engine.request import OrderKey, order_key
from pagoda.engine.scheduler import Scheduler
from pagoda.engine.structured_output.grammars import Grammars
from pagoda.executor.base import Executor
from pagoda.ipc.clock import VirtualClock
from pagoda.kv.manager import KVManager
from pagoda.kv.tiered_connector import TieredKVConnector
from pagoda.kv.tiers import build_tiers
from pagoda.messages.engine_config import (
    EngineConfig,
    HandoffConfig,
    KVTiersConfig,
    SimConfig,
)
from pagoda.messages.frontend import FinishReason, GenerateRequest, TokenChunk, Work
from pagoda.messages.kv_groups import KVGroup
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.speculation import OFF, SpeculativeConfig
from pagoda.messages.tracing import StartTrace
from pagoda.messages.transfers import TierPlace, Transfer
from pagoda.messages.worker_config import WorkerConfig
from pagoda.parallel.config import ParallelConfig
from pagoda.plugins.disaggregation.hooks import HandoffLinks
from pagoda.plugins.kv_events.publisher import KVEventBatch
from pagoda.plugins.sim.executor import SimExecutor, SimNeighbours, TransferFate
from pagoda.plugins.sim.model import sim_token
from pagoda.telemetry.tracer import Tracer


def make_request(
    request_id: str, prompt: list[int], *, max_tokens: int = 8, **fields: object
) -> GenerateRequest:
    """`fields` are those of `GenerateRequest` and of `Work`."""
    sampling = SamplingParams(seed=len(request_id) + sum(prompt), max_tokens=max_tokens)
    work = {name: fields.pop(name) for name in Work.__struct_fields__ if name in fields}
    return GenerateRequest(
        request_id=request_id, prompt_token_ids=prompt, work=Work(sampling, **work), **fields
    )  # type: ignore[arg-type]


def reworked(request: GenerateRequest, **fields: object) -> GenerateRequest:
    """The request with other fields of its `Work`."""
    return msgspec.structs.replace(request, work=msgspec.structs.replace(request.work, **fields))


def expected_tokens(request: GenerateRequest, max_model_len: int = 2**31) -> list[int]:
    """Tokens that the simulated model answers, computed without any engine."""
    if request.grammar is not None:
        return small_grammars.constrained_tokens(request, max_model_len)
    sampling = request.work.sampling
    tokens = list(request.prompt_token_ids)
    output: list[int] = []
    stops = {*request.work.eos_token_ids, *sampling.stop_token_ids}
    most = max_model_len if sampling.max_tokens is None else sampling.max_tokens
    while len(output) < most and len(tokens) < max_model_len:
        token = sim_token(sampling.seed or 0, len(output), tokens[-1], VOCAB_SIZE)
        while len(output) < sampling.min_tokens and token in stops:
            token = (token + 1) % VOCAB_SIZE
        tokens.append(token)
        output.append(token)
        if token in stops and len(output) >= sampling.min_tokens:
            break
    return output


def make_scheduler(
    num_blocks: int = 64,
    prefix_caching: bool = True,
    order: Callable[[GenerateRequest, float, int], OrderKey] = order_key,
    **limits: object,
) -> Scheduler:
    merged = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64, **limits}
    return Scheduler(
        SchedulerLimits(**merged),  # type: ignore[arg-type]
        KVManager(num_blocks, 4, prefix_caching=prefix_caching),
        VirtualClock(),
        order=order,
    )


class Harness:
    """An engine core in virtual time that records what every request got."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_model_len: int = 64,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 32,
        max_num_waiting: int = 4096,
        max_num_waiting_tokens: int | None = None,
        prefix_caching: bool = True,
        num_stages: int = 1,
        per_token_s: float = 0.001,
        per_transferred_block_s: float = 0.002,
        max_proposals: int = 0,
        speculation: SpeculativeConfig = OFF,
        wrap: Callable[[SimExecutor, VirtualClock], Executor] | None = None,
        clock: VirtualClock | None = None,
        handoff: HandoffConfig | None = None,
        links: HandoffLinks | None = None,
        neighbours: SimNeighbours | None = None,
        kv_groups: tuple[KVGroup, ...] = (),
        kv_host_slots: int = 0,
        segment_tokens: int = 0,
        per_cold_block_s: float = 0.0,
        kv_tiers: KVTiersConfig | None = None,
        fails: bool = False,
        disk: SimDisk | None = None,
        transfer_fate: Callable[[Transfer], TransferFate] = lambda _: TransferFate(),
        trace: StartTrace | None = None,
        open_grammars: Callable[[], Grammars] = small_grammars.open_grammars,
    ) -> None:
        self.clock = clock or VirtualClock()
        self.late_s: Callable[[], float] = lambda: 0.0
        """Seconds by which the loop is late at a tick, so that several events meet in one turn."""
        self.disk = disk
        directories = () if disk is None else (TierPlace("disk", "/nowhere", 1),)
        sim = SimConfig(
            base_s=0.01,
            per_token_s=per_token_s,
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=max_model_len,
            vocab_size=VOCAB_SIZE,
            per_transferred_block_s=per_transferred_block_s,
            kv_groups=kv_groups,
            kv_host_slots=kv_host_slots,
            segment_tokens=segment_tokens,
            per_cold_block_s=per_cold_block_s,
            max_proposals=max_proposals,
            kv_places=directories,
        )
        executor: Executor = SimExecutor(
            sim,
            clock=self.clock,
            check_kv=True,
            num_stages=num_stages,
            transfer_fate=transfer_fate,
            disk=None if disk is None else disk.objects,
            disk_hangs=(lambda: False) if disk is None else disk.hangs,
            neighbours=neighbours,
        )
        if wrap is not None:
            executor = wrap(executor, self.clock)  # type: ignore[arg-type]
        config = EngineConfig(
            worker=WorkerConfig(
                model="sim", parallel=ParallelConfig(pipeline_parallel_size=num_stages)
            ),
            executor="sim",
            sim=sim,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_waiting=max_num_waiting,
            max_num_waiting_tokens=max_num_waiting_tokens,
            enable_prefix_caching=prefix_caching,
            kv_events="tcp://127.0.0.1:5557",
            kv_tiers=kv_tiers,
            handoff=handoff,
            fail_on_load_failure=fails,
            trace=trace,
            speculation=speculation,
        )
        self.tracer = Tracer("engine dp0", clock_ns=self._clock_ns)
        disk = self.disk or SimDisk()
        build = partial(build_tiers, openers={"disk": disk.open_tier}, epoch_s=1e9)
        self.core = EngineCore(
            config,
            executor,
            self.clock,
            build,
            links,
            self.tracer,
            open_grammars=lambda _config, _vocab_size: open_grammars(),
        )
        self.cached = CacheView()
        self.tokens: dict[str, list[int]] = {}
        self.finished: dict[str, TokenChunk] = {}
        self.step()

    def _clock_ns(self) -> int:
        """Virtual time, in which nothing that is computed takes any; 0 would mean that nothing is traced."""
        return 1 + round(self.clock.now() * 1e9)

    @property
    def tiers(self) -> TieredKVConnector:
        return self.hooks.tiers

    @property
    def hooks(self) -> KVTransferHooks:
        assert isinstance(self.scheduler.hooks, KVTransferHooks)
        return self.scheduler.hooks

    @property
    def scheduler(self) -> Scheduler:
        assert self.core.scheduler is not None
        return self.core.scheduler

    def add(self, request: GenerateRequest, *, steps: bool = True) -> list[TokenChunk]:
        self.tokens[request.request_id] = list(request.output_token_ids)
        answer = self.core.add(request)
        assert isinstance(answer, list)
        self.record(answer)
        if steps or request.grammar is not None:  # which is compiled at once, and then taken
            chunks = self.step()
            if request.grammar is not None:
                answer += [it for it in chunks if it.request_id == request.request_id]
        return answer

    def step(self) -> list[TokenChunk]:
        chunks = self.core.step()
        self.record(chunks)
        self._apply_kv_events()
        return chunks

    def _apply_kv_events(self) -> None:
        """A subscriber that applies the events knows exactly what is cached, after every step."""
        batch = KVEventBatch(self.clock.now(), self.core.drain_kv_events(), 0)
        self.cached.apply(msgspec.msgpack.encode(batch))
        if self.core.ready is not None:
            pool, report = self.scheduler.kv.pool, self.core.load()
            assert_knows(self.cached.keys, pool)
            assert report.num_blocks_stored - report.num_blocks_removed == pool.num_cached
            for tier in report.tiers:
                if tier.name == "host":
                    (host,) = self.hooks.near_pools
                    assert_knows(self.cached.host_keys, host)
                    assert tier.num_blocks == host.num_cached
                    assert tier.num_stored - tier.num_removed == tier.num_blocks

    def record(self, chunks: list[TokenChunk]) -> None:
        for chunk in chunks:
            assert chunk.request_id not in self.finished
            self.tokens[chunk.request_id] += chunk.token_ids
            if chunk.finish_reason is not None:
                self.finished[chunk.request_id] = chunk

    def tick(self) -> bool:
        """Moves time to the next event and handles it; False when nothing will happen any more."""
        instants = [self.core.next_wakeup()]
        if self.disk is not None:
            instants.append(self.disk.next_event_at())
        wakeup = min((instant for instant in instants if instant is not None), default=None)
        if wakeup is None:
            return False
        self.clock.advance_to(wakeup + self.late_s())
        self.step()
        return True

    def run(self, max_ticks: int = 20_000) -> None:
        self.step()
        for _ in range(max_ticks):
            if not self.tick():
                break
        assert not self.scheduler.requests, "requests are stuck"
        self.check_nothing_left()

    def serve(self, *requests: GenerateRequest, max_model_len: int = 64) -> None:
        """Runs requests to their ends, and checks the answers."""
        for request in requests:
            self.add(request)
        self.run()
        assert_complete(self, list(requests), max_model_len)

    def ticks(self, count: int) -> None:
        for _ in range(count):
            self.tick()

    def tick_until_started(self, request_id: str) -> None:
        while self.scheduler.requests[request_id].slot is None:
            assert self.tick()

    @property
    def counts(self) -> tuple[int, int, int]:
        """Numbers of requests that await KV, wait and run."""
        load = self.core.load()
        return load.num_awaiting_kv, load.num_waiting, load.num_running

    def check_nothing_left(self) -> None:
        check_nothing_left(self.scheduler)


def assert_complete(
    harness: Harness, requests: list[GenerateRequest], max_model_len: int = 64
) -> None:
    for request in requests:
        assert harness.tokens[request.request_id] == expected_tokens(request, max_model_len)
        assert harness.finished[request.request_id].finish_reason in (
            FinishReason.STOP,
            FinishReason.LENGTH,
        )
