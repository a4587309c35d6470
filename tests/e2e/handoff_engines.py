# SPDX-License-Identifier: Apache-2.0
"""Engines for prefill and decode as processes, with the pod in the process of the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import msgspec
import psutil

from pagoda.fleet.endpoint import Endpoint
from pagoda.fleet.engine_client import EngineClient
from pagoda.fleet.policies import POLICIES
from pagoda.fleet.replica import Replica
from pagoda.llm.engine_options import (
    EngineOptions,
    ExecutorOptions,
    ParallelOptions,
)
from pagoda.messages.engine_config import EngineConfig
from pagoda.messages.frontend import FinishReason, GenerateRequest, TokenLogprobs, Work
from pagoda.messages.load import TierLoad
from pagoda.messages.sampling_params import SamplingParams
from pagoda.plugins.disaggregation.options import HandoffOptions
from pagoda.plugins.router.prefill_decode import PrefillDecodeRouter

BLOCK_SIZE = 16
LEASE_S = 5.0
MIN_TOKENS = 2 * BLOCK_SIZE


def engine_config(
    key: Path,
    role: Literal["prefill", "decode"],
    transports: str = "shm,tcp",
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    *,
    own_requests: bool = False,
    model: Path | None = None,
    devices: str | None = None,
    **options: Any,
) -> EngineConfig:
    """A replica of this role, of the embedded model if none is named; `options` are fields of `EngineOptions`.

    Tensor ranks attend to requests of their own if that is asked for."""
    parallel = ParallelOptions(
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        context_parallel_size=cp,
        enable_dp_attention=own_requests,
        devices=devices,
    )
    given = {"dtype": "float32", "threads": 1, "block_size": BLOCK_SIZE, "num_kv_blocks": 4096}
    engine = EngineOptions(**(given | options))
    executor = ExecutorOptions()
    flags = HandoffOptions(role=role, kv_transports=transports, kv_lease=LEASE_S)
    handoff = flags.config(cluster_key_file=key, advertise="127.0.0.1", num_replicas=1)
    files = executor.resolve(engine, None if model is None else str(model), parallel)
    return executor.engine_config(engine, files.model, parallel, handoff)


@asynccontextmanager
async def pod_of(engines: Sequence[Replica]) -> AsyncIterator[PrefillDecodeRouter]:
    """A pod over engines that have started, and go on."""
    pod = PrefillDecodeRouter(POLICIES["round-robin"], MIN_TOKENS)
    for engine in engines:
        pod.add(engine)
    try:
        yield pod
    finally:
        for engine in engines:
            pod.remove(engine)
        await pod.close()


class Answer(NamedTuple):
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    logprobs: list[TokenLogprobs]


async def ask(endpoint: Endpoint, request: GenerateRequest) -> Answer:
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    async with aclosing(endpoint.generate(request)) as chunks:  # type: ignore[type-var]
        async for chunk in chunks:
            assert chunk.error is None, chunk.error
            token_ids += chunk.token_ids
            logprobs += chunk.logprobs or ()
            if chunk.finish_reason is not None:
                return Answer(token_ids, chunk.finish_reason, chunk.stop_reason, logprobs)
    raise AssertionError("The stream has no end.")


async def ask_all(
    endpoint: Endpoint, asked: Sequence[GenerateRequest], salt: str | None = None
) -> list[Answer]:
    """All at once. Requests find cached what requests of the same salt have left."""
    salted = [
        msgspec.structs.replace(r, request_id=f"{r.request_id}-{salt}", cache_salt=salt)
        for r in asked
    ]
    return list(await asyncio.gather(*(ask(endpoint, request) for request in salted)))


def short_requests(prompts: Sequence[list[int]]) -> list[GenerateRequest]:
    """Requests for eight tokens each, the likeliest and drawn ones in turn."""
    return [
        GenerateRequest(
            request_id=f"r{seed}",
            prompt_token_ids=prompt,
            work=Work(
                SamplingParams(
                    temperature=[0.0, 1.0][seed % 2], seed=seed, max_tokens=8, ignore_eos=True
                )
            ),
        )
        for seed, prompt in enumerate(prompts)
    ]


async def handed_over(
    prefill: EngineConfig, decode: EngineConfig, asked: Sequence[GenerateRequest]
) -> list[list[int]]:
    """Tokens that an engine gives for prompts whose whole blocks come from another; nothing is left behind."""
    engines = [EngineClient(config).replica for config in (prefill, decode)]
    try:
        for engine in engines:
            await engine.start()
        async with pod_of(engines) as pod:
            answers = await ask_all(pod.dispatcher, asked, "handed over")
        load = await fetched(engines[1])
        sizes = [len(request.prompt_token_ids) for request in asked]
        assert load.num_loaded == sum((size - 1) // decode.worker.block_size for size in sizes)
        assert load.num_failed == 0
        await until_free(engines)
    finally:
        await asyncio.gather(*(engine.close() for engine in engines))
    return [answer.token_ids for answer in answers]


# ---- what is left


async def fetched(engine: Replica) -> TierLoad:
    """What came from other engines, so far."""
    return (await engine.load()).tiers[-1]


async def until_free(engines: Sequence[Replica]) -> None:
    """Returns when none of them runs or holds anything, with every block free."""
    for engine in engines:
        while True:
            load = await engine.load()
            busy = load.num_running + load.num_waiting + load.num_awaiting_kv + load.num_leases
            if not busy and load.num_free_blocks == load.num_blocks:
                assert load.num_leased_blocks == 0
                break
            await asyncio.sleep(0.01)


def engine_pid(engine: Replica) -> int:
    pid = cast(EngineClient, engine.transport).engine_pid
    assert pid is not None
    return pid


def worker_pid(engine: Replica) -> int:
    [worker] = psutil.Process(engine_pid(engine)).children()
    return worker.pid
