"""Pods of real engines in the process of the test, requests of all kinds for them, and what they leave behind."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

import pagoda
from pagoda.engine.config import EngineConfig
from pagoda.frontend.endpoint import Endpoint
from pagoda.frontend.engine_options import (
    EngineOptions,
    ExecutorOptions,
    HandoffOptions,
    ParallelOptions,
)
from pagoda.frontend.model_text import load_model_text
from pagoda.frontend.policies import POLICIES
from pagoda.frontend.prefill_decode import PrefillDecodeRouter
from pagoda.frontend.replica import Replica
from pagoda.messages.frontend import FinishReason, GenerateRequest, TokenLogprobs
from pagoda.messages.load import TierLoad
from pagoda.messages.sampling_params import SamplingParams

MODEL = Path(pagoda.__file__).parent / "checkpoints" / "pagoda_tiny"
BLOCK_SIZE = 16
NUM_BLOCKS = 4096
LEASE_S = 2.0
MIN_TOKENS = 2 * BLOCK_SIZE
LONG_SKILLS = ("recall_40", "recall_100", "multi_turn", "tool_call")


def engine_config(key: Path, role: str, **options: object) -> EngineConfig:
    """A model replica of this role; `options` are fields of `EngineOptions`, and `tp`, `pp` and `transports`."""
    sizes = {"tp": options.pop("tp", 1), "pp": options.pop("pp", 1)}
    transports = options.pop("transports", "shm,tcp")
    parallel = ParallelOptions(
        tensor_parallel_size=sizes["tp"],  # type: ignore[arg-type]
        pipeline_parallel_size=sizes["pp"],  # type: ignore[arg-type]
    )
    given = {
        "dtype": "float32",
        "threads": 1,
        "block_size": BLOCK_SIZE,
        "num_kv_blocks": NUM_BLOCKS,
    }
    engine = EngineOptions(**(given | options))  # type: ignore[arg-type]
    executor = ExecutorOptions()
    handoff = None
    if role != "none":
        flags = HandoffOptions(role=role, kv_transports=transports, kv_lease=LEASE_S)  # type: ignore[arg-type]
        handoff = flags.config(cluster_key_file=key, advertise="127.0.0.1", num_replicas=1)
    files = executor.resolve(engine, None, parallel)
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


# ---- requests


def requests(count: int, max_tokens: int = 32) -> list[GenerateRequest]:
    """Greedy and sampled, with penalties, log-probabilities and stop tokens, on prompts of 60 to 1,300 tokens."""
    text = load_model_text(MODEL)
    assert text.chat_template is not None
    questions = [json.loads(line) for line in (MODEL / "heldout.jsonl").read_text().splitlines()]
    by_skill = [[q for q in questions if q["skill"] == skill] for skill in LONG_SKILLS]
    chosen = itertools.islice(itertools.chain.from_iterable(zip(*by_skill, strict=False)), count)
    made = []
    for index, question in enumerate(chosen):
        prompt = text.chat_template.render(question["messages"], tools=question.get("tools"))
        token_ids = text.tokenizer.encode(prompt, add_special_tokens=False)
        sampling = SamplingParams(
            temperature=[0.0, 1.2][index % 2],
            top_p=[1.0, 0.95][index // 2 % 2],
            repetition_penalty=[1.0, 1.1][index // 4 % 2],
            presence_penalty=[0.0, 0.5][index // 3 % 2],
            frequency_penalty=[0.0, 0.3][index // 5 % 2],
            logprobs=[None, 3][index // 3 % 2],
            min_tokens=[0, 4][index // 7 % 2],
            max_tokens=max_tokens,
            stop_token_ids=((), (token_ids[-9],))[index // 6 % 2],
            ignore_eos=index % 5 != 0,
            seed=1000 + index,
        )
        made.append(
            GenerateRequest(
                request_id=f"r{index}",
                prompt_token_ids=token_ids,
                sampling=sampling,
                eos_token_ids=() if sampling.ignore_eos else text.eos_token_ids,
            )
        )
    return made


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


def rounded(answers: Sequence[Answer]) -> list[object]:
    """For engines that add up in another order."""
    return [
        (
            answer[:3],
            [
                (round(entry.logprob, 3), entry.rank, entry.top_token_ids)
                for entry in answer.logprobs
            ],
        )
        for answer in answers
    ]


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
