"""One request, one seed, one answer: whatever else runs, however it is cut up, whatever dies.

The embedded model in a real worker process, in fp32 on both backends; in bf16, with int8 and int4 weights and
with an int8 cache on the one with kernels.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import psutil
import pytest

import pagoda
from pagoda.engine.config import EngineConfig
from pagoda.frontend.dispatcher import Dispatcher
from pagoda.frontend.endpoint import ReplicaState
from pagoda.frontend.engine_client import EngineClient
from pagoda.frontend.fleet import EngineFleet
from pagoda.frontend.model_text import load_model_text
from pagoda.messages.frontend import FinishReason, GenerateRequest
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.worker_config import WorkerConfig

MODEL = Path(pagoda.__file__).parent / "checkpoints" / "pagoda_tiny"
MAX_TOKENS = {"cpu": 32, "reference": 20}
"""Of each answer; plain PyTorch is slow."""
NUM_REQUESTS = 32


@pytest.fixture(scope="module")
def requests(backend: str) -> list[GenerateRequest]:
    """Half greedy, half sampled hot, with penalties and without; on questions of very different lengths."""
    text = load_model_text(MODEL)
    assert text.chat_template is not None
    questions = [json.loads(line) for line in (MODEL / "heldout.jsonl").read_text().splitlines()]
    step = len(questions) // NUM_REQUESTS
    made = []
    for index, question in enumerate(questions[::step][:NUM_REQUESTS]):
        prompt = text.chat_template.render(question["messages"], tools=question.get("tools"))
        sampling = SamplingParams(
            temperature=[0.0, 1.3][index % 2],
            top_p=[1.0, 0.95][index // 2 % 2],
            top_k=[0, 40][index // 4 % 2],
            repetition_penalty=[1.0, 1.1][index // 8 % 2],
            seed=1000 + index,
            max_tokens=MAX_TOKENS[backend],
            ignore_eos=True,
        )
        made.append(
            GenerateRequest(
                request_id=f"r{index}",
                prompt_token_ids=text.tokenizer.encode(prompt, add_special_tokens=False),
                sampling=sampling,
            )
        )
    return made


FORMATS: dict[str, dict[str, str]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
    "int8-kv": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
}


@pytest.fixture(scope="module", params=FORMATS)
def worker(request: pytest.FixtureRequest, backend: str) -> WorkerConfig:
    if backend == "reference" and request.param != "float32":
        pytest.skip("plain PyTorch is slow in these, and tested in tests/worker")
    return WorkerConfig(
        model=str(MODEL),
        backend=backend,
        max_model_len=2048,
        num_blocks=4096,
        **FORMATS[request.param],
    )


def engine_config(worker: WorkerConfig, **fields: object) -> EngineConfig:
    num_blocks = fields.pop("num_blocks", worker.num_blocks)
    worker = msgspec.structs.replace(worker, num_blocks=num_blocks)
    return EngineConfig(worker=worker, **fields)  # type: ignore[arg-type]


@asynccontextmanager
async def engine(worker: WorkerConfig, **fields: object) -> AsyncIterator[Dispatcher]:
    dispatcher = EngineFleet(engine_config(worker, **fields)).dispatcher
    await dispatcher.start()
    try:
        yield dispatcher
    finally:
        await dispatcher.close()


async def answer(dispatcher: Dispatcher, request: GenerateRequest) -> list[int]:
    tokens: list[int] = []
    async for chunk in dispatcher.generate(request):
        assert chunk.finish_reason in (None, FinishReason.LENGTH), chunk.error
        tokens += chunk.token_ids
    return tokens


async def answers(dispatcher: Dispatcher, requests: Sequence[GenerateRequest]) -> list[list[int]]:
    return list(await asyncio.gather(*(answer(dispatcher, request) for request in requests)))


@pytest.fixture(scope="module")
def alone(worker: WorkerConfig, requests: list[GenerateRequest]) -> list[list[int]]:
    """Every request by itself, without the prefix cache: what all other ways are compared with."""

    async def run() -> list[list[int]]:
        async with engine(worker, max_num_seqs=1, enable_prefix_caching=False) as dispatcher:
            return [await answer(dispatcher, request) for request in requests]

    return asyncio.run(run())


async def test_in_a_batch_of_32(
    worker: WorkerConfig, requests: list[GenerateRequest], alone: list[list[int]]
) -> None:
    async with engine(worker) as dispatcher:
        assert await answers(dispatcher, requests) == alone


async def test_from_the_prefix_cache(
    worker: WorkerConfig, requests: list[GenerateRequest], alone: list[list[int]]
) -> None:
    async with engine(worker) as dispatcher:
        await answers(dispatcher, requests)
        again = [msgspec.structs.replace(r, request_id=f"again-{r.request_id}") for r in requests]
        assert await answers(dispatcher, again) == alone
        report = await dispatcher.load()
        assert report.num_prefix_hit_tokens > report.num_prompt_tokens // 3


async def test_in_chunks_of_7_tokens(
    worker: WorkerConfig, requests: list[GenerateRequest], alone: list[list[int]]
) -> None:
    async with engine(worker, max_num_batched_tokens=7) as dispatcher:
        assert await answers(dispatcher, requests[:8]) == alone[:8]


async def test_preempted(
    worker: WorkerConfig, requests: list[GenerateRequest], alone: list[list[int]]
) -> None:
    async with engine(worker, num_blocks=128) as dispatcher:
        assert await answers(dispatcher, requests) == alone
        assert (await dispatcher.load()).num_preemptions > 0


async def test_worker_and_engine_killed(
    worker: WorkerConfig, requests: list[GenerateRequest], alone: list[list[int]]
) -> None:
    async with engine(worker) as dispatcher:
        streams = asyncio.gather(*(answer(dispatcher, request) for request in requests))
        [replica] = dispatcher.replicas
        assert isinstance(replica, EngineClient)
        assert replica.engine_pid is not None
        states: list[ReplicaState] = []
        replica.watch(lambda: states.append(replica.state))
        (child,) = psutil.Process(replica.engine_pid).children()
        os.kill(child.pid, signal.SIGKILL)
        while (await dispatcher.load()).num_worker_restarts == 0:
            await asyncio.sleep(0.01)
        while (await dispatcher.load()).num_running == 0:
            await asyncio.sleep(0.01)
        os.kill(replica.engine_pid, signal.SIGKILL)
        assert await streams == alone
        assert states == [
            ReplicaState.DEGRADED,
            ReplicaState.READY,
            ReplicaState.STARTING,
            ReplicaState.READY,
        ]
