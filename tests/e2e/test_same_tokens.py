# SPDX-License-Identifier: Apache-2.0
"""One request and one seed give one answer, whatever else runs, is cached, is cut up or dies.

The embedded model runs in a real worker process: in float32 on both backends, in other formats on the CPU kernels.
Plain PyTorch is slow and gets fewer requests; tests/worker compares it with the kernels.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil
import pytest
import pytest_asyncio

import pagoda
from pagoda.fleet.dispatcher import Dispatcher
from pagoda.fleet.endpoint import ReplicaState
from pagoda.fleet.engine_client import EngineClient
from pagoda.fleet.fleet import Fleet
from pagoda.messages.engine_config import EngineConfig
from pagoda.messages.frontend import FinishReason, GenerateRequest, Work
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.worker_config import WorkerConfig
from pagoda.text.model_text import load_model_text

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODEL = Path(pagoda.__file__).parent / "checkpoints" / "pagoda_tiny"
FORMATS: dict[str, dict[str, str]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
    "int8 KV": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
}


class Load(NamedTuple):
    """Size of what is asked on a backend, and the blocks of a device on which that is preempted."""

    num_requests: int
    max_tokens: int
    few_blocks: int


LOADS = {"cpu": Load(32, 32, 128), "reference": Load(12, 8, 96)}


@pytest.fixture(scope="module")
def requests(backend: str) -> list[GenerateRequest]:
    """Half greedy, half sampled hot, with penalties and without, on questions of 14 to 1,274 tokens."""
    text = load_model_text(MODEL)
    assert text.chat_template is not None
    load = LOADS[backend]
    questions = [json.loads(line) for line in (MODEL / "heldout.jsonl").read_text().splitlines()]
    step = len(questions) // load.num_requests
    made = []
    for index, question in enumerate(questions[::step][: load.num_requests]):
        prompt = text.chat_template.render(question["messages"], tools=question.get("tools"))
        sampling = SamplingParams(
            temperature=[0.0, 1.3][index % 2],
            top_p=[1.0, 0.95][index // 2 % 2],
            top_k=[0, 40][index // 4 % 2],
            min_p=[0.0, 0.02][index // 3 % 2],
            typical_p=[1.0, 0.95][index // 5 % 2],
            frequency_penalty=[0.0, 0.2][index // 6 % 2],
            logit_bias=[None, {11: 1.0}][index // 7 % 2],
            repetition_penalty=[1.0, 1.1][index // 8 % 2],
            seed=1000 + index,
            max_tokens=load.max_tokens,
            ignore_eos=True,
        )
        made.append(
            GenerateRequest(
                request_id=f"r{index}",
                prompt_token_ids=text.tokenizer.encode(prompt, add_special_tokens=False),
                work=Work(sampling),
            )
        )
    return made


@pytest.fixture(scope="module", params=FORMATS)
def worker(request: pytest.FixtureRequest, backend: str) -> WorkerConfig:
    if backend == "reference" and request.param != "float32":
        pytest.skip("plain PyTorch is slow in these formats")
    return WorkerConfig(
        model=str(MODEL),
        backend=backend,
        max_model_len=1536,
        num_blocks=4096,
        **FORMATS[request.param],
    )


@asynccontextmanager
async def engine(worker: WorkerConfig, **fields: object) -> AsyncIterator[Dispatcher]:
    num_blocks = fields.pop("num_blocks", worker.num_blocks)
    worker = msgspec.structs.replace(worker, num_blocks=num_blocks)
    config = EngineConfig(worker=worker, **fields)  # type: ignore[arg-type]
    dispatcher = Fleet.of_engines(config).dispatcher
    await dispatcher.start()
    try:
        yield dispatcher
    finally:
        await dispatcher.close()


async def answer(dispatcher: Dispatcher, request: GenerateRequest, salt: str) -> list[int]:
    salted = msgspec.structs.replace(
        request, request_id=f"{request.request_id} {salt}", cache_salt=salt
    )
    tokens: list[int] = []
    async for chunk in dispatcher.generate(salted):
        assert chunk.finish_reason in (None, FinishReason.LENGTH), chunk.error
        tokens += chunk.token_ids
    return tokens


async def answers(
    dispatcher: Dispatcher, requests: Sequence[GenerateRequest], salt: str
) -> list[list[int]]:
    """The tokens of requests that are sent at once. They find cached what requests of the same salt left."""
    return list(await asyncio.gather(*(answer(dispatcher, each, salt) for each in requests)))


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def large(worker: WorkerConfig) -> AsyncIterator[Dispatcher]:
    """An engine with room for all requests."""
    async with engine(worker) as dispatcher:
        yield dispatcher


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def alone(large: Dispatcher, requests: list[GenerateRequest]) -> list[list[int]]:
    """The tokens of each request by itself, nothing cached: what all other ways are compared with."""
    return [await answer(large, each, f"alone {each.request_id}") for each in requests]


async def test_in_a_batch_and_from_the_prefix_cache(
    large: Dispatcher, requests: list[GenerateRequest], alone: list[list[int]]
) -> None:
    assert await answers(large, requests, "batch") == alone
    before = await large.load()
    again = [msgspec.structs.replace(r, request_id=f"{r.request_id} again") for r in requests]
    assert await answers(large, again, "batch") == alone
    after = await large.load()
    num_hit = after.num_prefix_hit_tokens - before.num_prefix_hit_tokens
    assert num_hit > (after.num_prompt_tokens - before.num_prompt_tokens) * 2 // 3


async def test_in_chunks_of_7_tokens(
    worker: WorkerConfig, requests: list[GenerateRequest], alone: list[list[int]]
) -> None:
    async with engine(worker, max_num_batched_tokens=7) as dispatcher:
        assert await answers(dispatcher, requests[:8], "chunks") == alone[:8]


async def test_preempted(
    worker: WorkerConfig, requests: list[GenerateRequest], alone: list[list[int]], backend: str
) -> None:
    # Without a prefix cache no prompt waits for the blocks of another one.
    few = LOADS[backend].few_blocks
    async with engine(worker, num_blocks=few, enable_prefix_caching=False) as dispatcher:
        assert await answers(dispatcher, requests, "few blocks") == alone
        assert (await dispatcher.load()).num_preemptions > 0


async def test_worker_and_engine_killed(
    large: Dispatcher, requests: list[GenerateRequest], alone: list[list[int]]
) -> None:
    [replica] = large.replicas
    assert isinstance(replica.transport, EngineClient)
    engine_pid = replica.transport.engine_pid
    assert engine_pid is not None
    states: list[ReplicaState] = []
    settled = asyncio.Event()

    def on_state() -> None:
        states.append(replica.state)
        if states == [ReplicaState.DEGRADED, ReplicaState.READY]:
            os.kill(engine_pid, signal.SIGKILL)
        elif len(states) == 4:
            settled.set()

    replica.watch(on_state)
    streams = asyncio.gather(*(answer(large, request, "killed") for request in requests))
    (child,) = psutil.Process(engine_pid).children()
    os.kill(child.pid, signal.SIGKILL)
    assert await streams == alone
    await settled.wait()
    assert states[2:] == [ReplicaState.STARTING, ReplicaState.READY]


async def test_an_engine_that_stands_still_is_replaced(
    worker: WorkerConfig, requests: list[GenerateRequest], alone: list[list[int]], backend: str
) -> None:
    if (backend, worker.dtype) != ("cpu", "float32"):
        pytest.skip("the watchdog knows nothing of formats")
    async with engine(worker, engine_timeout_s=2.0) as dispatcher:
        [replica] = dispatcher.replicas
        assert isinstance(replica.transport, EngineClient)
        stopped = replica.transport.engine_pid
        assert stopped is not None
        [worker_process] = psutil.Process(stopped).children()
        streams = asyncio.gather(*(answer(dispatcher, request, "stopped") for request in requests))
        while (await dispatcher.load()).num_prompt_tokens == 0:
            await asyncio.sleep(0)
        os.kill(stopped, signal.SIGSTOP)
        later = await answer(dispatcher, requests[0], "later")  # which the stopped engine owes
        assert [*await streams, later] == [*alone, alone[0]]
        assert replica.transport.engine_pid not in (None, stopped)
        while worker_process.is_running():
            await asyncio.sleep(0.01)
