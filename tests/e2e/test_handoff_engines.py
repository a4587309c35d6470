# SPDX-License-Identifier: Apache-2.0
"""An engine for prefill and one for decode give the tokens and log-probabilities of a single engine.

The embedded model runs in real engine and worker processes, the pod in the process of the test.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from handoff_engines import (
    BLOCK_SIZE,
    Answer,
    ask_all,
    engine_config,
    engine_pid,
    fetched,
    pod_of,
    until_free,
    worker_pid,
)

import pagoda
from pagoda.fleet.endpoint import ReplicaState
from pagoda.fleet.engine_client import EngineClient
from pagoda.fleet.replica import Replica
from pagoda.messages.frontend import GenerateRequest, Work
from pagoda.messages.sampling_params import SamplingParams
from pagoda.plugins.router.prefill_decode import PrefillDecodeRouter
from pagoda.text.model_text import load_model_text

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODEL = Path(pagoda.__file__).parent / "checkpoints" / "pagoda_tiny"
LONG_SKILLS = ("recall_40", "recall_100", "multi_turn", "tool_call")


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
                work=Work(
                    sampling, eos_token_ids=() if sampling.ignore_eos else text.eos_token_ids
                ),
            )
        )
    return made


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


ENGINES: dict[str, dict[str, Any]] = {
    "P": {"role": "prefill"},
    "P small steps": {"role": "prefill", "max_num_batched_tokens": 56},
    "P tp2": {"role": "prefill", "tp": 2},
    "P pp2": {"role": "prefill", "pp": 2},
    "D": {"role": "decode"},
    "D small steps": {"role": "decode", "max_num_batched_tokens": 40},
    "D tp2": {"role": "decode", "tp": 2},
    "D over tcp": {"role": "decode", "transports": "tcp"},
    "P int8": {"role": "prefill", "kv_cache_dtype": "int8"},
    "D int8": {"role": "decode", "kv_cache_dtype": "int8"},
}
NUM_REQUESTS = 16

Engines = dict[str, Replica]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engines(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Engines]:
    key = tmp_path_factory.mktemp("cluster") / "key"
    key.write_bytes(os.urandom(16).hex().encode())
    started: Engines = {}
    for name, fields in ENGINES.items():
        config = engine_config(key, **fields)
        started[name] = EngineClient(config).replica
    try:
        names = list(started)
        for pair in zip(names[::2], names[1::2], strict=True):
            await asyncio.gather(*(started[name].start() for name in pair))
        yield started
    finally:
        await asyncio.gather(*(engine.close() for engine in started.values()))


@pytest.fixture(scope="module")
def asked() -> list[GenerateRequest]:
    return requests(NUM_REQUESTS)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def expected(engines: Engines, asked: list[GenerateRequest]) -> list[Answer]:
    """Answers of one engine that computes the prompts itself."""
    return await ask_all(engines["D"], asked, "alone")


def num_full_blocks(asked: list[GenerateRequest]) -> int:
    return sum((len(request.prompt_token_ids) - 1) // BLOCK_SIZE for request in asked)


TOPOLOGIES = {
    "1P1D": ["P", "D"],
    "1P2D": ["P", "D", "D small steps"],
    "2P1D": ["P", "P small steps", "D"],
    "chunked prompts": ["P small steps", "D small steps"],
    "P tp2, D tp1": ["P tp2", "D"],
    "P tp1, D tp2": ["P", "D tp2"],
    "P tp2, D tp2": ["P tp2", "D tp2"],
    "P pp2": ["P pp2", "D"],
    "P pp2, D tp2": ["P pp2", "D tp2"],
    "tcp": ["P", "P pp2", "D over tcp"],
}


@pytest.mark.parametrize("topology", TOPOLOGIES)
async def test_answers_are_those_of_one_engine(
    engines: Engines, asked: list[GenerateRequest], expected: list[Answer], topology: str
) -> None:
    members = [engines[name] for name in TOPOLOGIES[topology]]
    decoders = [engines[name] for name in TOPOLOGIES[topology] if name.startswith("D")]
    before = [await fetched(engine) for engine in decoders]
    async with pod_of(members) as pod:
        answers = await ask_all(pod.dispatcher, asked, topology)
    after = [await fetched(engine) for engine in decoders]
    exact = "2" not in "".join(TOPOLOGIES[topology])
    assert (answers == expected) if exact else (rounded(answers) == rounded(expected))
    num_loaded = sum(a.num_loaded - b.num_loaded for a, b in zip(after, before, strict=True))
    assert num_loaded >= 0.9 * num_full_blocks(asked)
    assert all(a.num_failed == b.num_failed for a, b in zip(after, before, strict=True))
    await until_free(members)


@pytest.mark.parametrize(
    ("names", "count"), [(("P int8", "D int8"), NUM_REQUESTS), (("P", "D"), 64)]
)
async def test_other_kinds_of_kv_and_many_at_a_time(
    engines: Engines, names: tuple[str, str], count: int
) -> None:
    members = [engines[name] for name in names]
    asked = requests(count, max_tokens=12)
    expected = await ask_all(members[1], asked, f"{count} alone")
    before = await fetched(members[1])
    async with pod_of(members) as pod:
        assert await ask_all(pod.dispatcher, asked, f"{count}") == expected
    assert (await fetched(members[1])).num_loaded > before.num_loaded
    await until_free(members)


@pytest.mark.parametrize(
    ("name", "process", "share"),
    [
        ("P", "engine", 0.0),
        ("P", "engine", 0.5),
        ("P", "worker", 0.5),
        ("P", "worker", 0.9),
        ("D", "engine", 0.5),
        ("D", "engine", 0.9),
        ("D", "worker", 0.0),
        ("D", "worker", 0.5),
    ],
)
async def test_a_death_on_either_side_changes_no_token(
    engines: Engines,
    asked: list[GenerateRequest],
    expected: list[Answer],
    name: str,
    process: str,
    share: float,
) -> None:
    """A process is killed when this share of the KV has gone from one side to the other.

    Others ask meanwhile, so that KV moves and answers run at the time of the kill, however late that is.
    """
    members = [engines["P"], engines["D"]]
    salt = f"{process} of {name} at {share}"
    before = (await fetched(engines["D"])).num_loaded
    wanted = share * num_full_blocks(asked)

    is_killed = asyncio.Event()

    async def ask_others(pod: PrefillDecodeRouter) -> None:
        for turn in itertools.count():
            others = await ask_all(pod.dispatcher, asked[:2], f"{salt}, others, {turn}")
            assert others == expected[:2]
            if is_killed.is_set():
                return

    async with pod_of(members) as pod, asyncio.TaskGroup() as group:
        asking = group.create_task(ask_all(pod.dispatcher, asked, salt))
        group.create_task(ask_others(pod))
        while (await fetched(engines["D"])).num_loaded < before + wanted:
            await asyncio.sleep(0.001)
        victim = (engine_pid if process == "engine" else worker_pid)(engines[name])
        assert victim is not None
        os.kill(victim, signal.SIGKILL)
        is_killed.set()
        assert await asking == expected
        while engines[name].state is not ReplicaState.READY:
            await asyncio.sleep(0.01)
    # An engine is ready while its worker starts again, and answers when that has ended.
    await ask_all(engines[name], asked[:1], f"{process} of {name} after {share}")
    await until_free(members)
