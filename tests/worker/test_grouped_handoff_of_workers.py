# SPDX-License-Identifier: Apache-2.0
"""Models of which some layers have windows or states, with prefill and decode apart, in real processes.

Answers are those of transformers, whichever side dies meanwhile, and what lies behind a window is not sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
from family_models import make_model
from handoff_engines import (
    BLOCK_SIZE,
    ask_all,
    engine_config,
    engine_pid,
    fetched,
    pod_of,
    until_free,
    worker_pid,
)
from tiny_models import continuation
from tiny_models import make_model as make_tiny_model

from pagoda.fleet.endpoint import ReplicaState
from pagoda.fleet.engine_client import EngineClient
from pagoda.fleet.replica import Replica
from pagoda.kv.layout import KVLayout
from pagoda.messages.frontend import GenerateRequest, Work
from pagoda.messages.kv_groups import KVKind, layer_groups
from pagoda.messages.sampling_params import SamplingParams
from pagoda.plugins.router.prefill_decode import PrefillDecodeRouter
from pagoda.worker.backends import choose_backend

pytestmark = pytest.mark.asyncio(loop_scope="module")

COUNT = 12
"""Tokens of an answer."""
PROMPTS = [
    [random.Random(seed).randrange(320) for _ in range(230 - 13 * seed)] for seed in range(12)
]
WINDOW, FULL, STATE = (KVKind.WINDOW, 24), (KVKind.FULL, 0), (KVKind.STATE, 0)
FAMILIES = {
    "gemma3": [*[WINDOW] * 5, FULL],
    "lfm2": [STATE, STATE, FULL, STATE, FULL, STATE],
    "qwen3-next": [STATE, STATE, STATE, FULL],
    "granite4-h": [STATE, FULL, STATE, STATE],
}
"""Families, and what each layer keeps."""
ENGINES = {
    "P": {"role": "prefill", "max_num_batched_tokens": 64},
    "P pp2": {"role": "prefill", "pp": 2},
    "P tp2": {"role": "prefill", "tp": 2},
    "D": {"role": "decode"},
    "D tp2": {"role": "decode", "tp": 2},
    "D drafts": {"role": "decode"},
}
Engines = dict[str, Replica]


class Served:
    """The engines of a model, and the answers of transformers."""

    def __init__(self, family: str, directory: Path) -> None:
        model = make_model(family)
        backend, _ = choose_backend("auto")
        multiple = backend.capabilities.window_multiple
        self.family = family
        groups = layer_groups(FAMILIES[family], BLOCK_SIZE, multiple)
        self.layout = KVLayout(BLOCK_SIZE, groups)
        model.save_pretrained(directory / "model")
        key = directory / "key"
        key.write_bytes(os.urandom(16).hex().encode())
        self.expected = [continuation(model, prompt, COUNT) for prompt in PROMPTS]
        make_tiny_model("llama").save_pretrained(directory / "draft")
        drafting = {"speculative_config": json.dumps({"model": str(directory / "draft")})}
        options = {"max_model_len": 256, "num_kv_blocks": 2000, "model": directory / "model"}
        more = {"D drafts": options | drafting}
        self.engines: Engines = {
            name: EngineClient(engine_config(key, **fields | more.get(name, options))).replica  # type: ignore[arg-type]
            for name, fields in ENGINES.items()
        }

    def num_handed_over(self) -> int:
        """Blocks that the ends of all prompts need."""
        layout = self.layout
        ends = [layout.usable((len(prompt) - 1) // BLOCK_SIZE) for prompt in PROMPTS]
        groups = range(len(layout.groups))
        return sum(len(layout.needed(group, end)) for group in groups for end in ends)

    async def ask(self, pod: PrefillDecodeRouter, salt: str) -> None:
        """Asks all at once; answers must be those of transformers."""
        requests = [
            GenerateRequest(
                request_id=f"r{index}",
                prompt_token_ids=prompt,
                work=Work(SamplingParams(temperature=0, seed=0, max_tokens=COUNT)),
            )
            for index, prompt in enumerate(PROMPTS)
        ]
        answers = await ask_all(pod.dispatcher, requests, salt)
        assert [answer.token_ids for answer in answers] == self.expected


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=FAMILIES)
async def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Served]:
    served = Served(request.param, tmp_path_factory.mktemp(request.param))
    try:
        await asyncio.gather(*(engine.start() for engine in served.engines.values()))
        yield served
    finally:
        await asyncio.gather(*(engine.close() for engine in served.engines.values()))


@pytest.mark.parametrize(
    "names",
    [("P", "D"), ("P pp2", "D tp2"), ("P", "D tp2"), ("P tp2", "D"), ("P", "D drafts")],
    ids=" to ".join,
)
async def test_answers_are_those_of_transformers(served: Served, names: tuple[str, str]) -> None:
    members = [served.engines[name] for name in names]
    before = await fetched(members[1])
    async with pod_of(members) as pod:
        await served.ask(pod, " ".join(names))
    after = await fetched(members[1])
    assert after.num_failed == before.num_failed
    assert after.num_loaded - before.num_loaded == served.num_handed_over()
    await until_free(members)


async def until_replaced(engine: Replica, find: Callable[[Replica], int], process_id: int) -> None:
    while True:
        with contextlib.suppress(AssertionError, ValueError, psutil.Error):  # while there is none
            if engine.state is ReplicaState.READY and find(engine) != process_id:
                return
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("process", ["engine", "worker"])
@pytest.mark.parametrize("name", ["P", "D"])
async def test_a_death_on_either_side_changes_no_token(
    served: Served, name: str, process: str
) -> None:
    members = [served.engines["P"], served.engines["D"]]
    salt, find = f"{process} of {name}", engine_pid if process == "engine" else worker_pid
    pid = find(served.engines[name])
    async with pod_of(members) as pod:
        with stopped(worker_pid(members[1])):  # which reads no KV and computes nothing meanwhile
            asking = asyncio.create_task(served.ask(pod, salt))
            while (await members[1].load()).num_awaiting_kv == 0:
                assert not asking.done()
                await asyncio.sleep(0.001)
            os.kill(pid, signal.SIGKILL)
            assert not asking.done()
        await asking
        await until_replaced(served.engines[name], find, pid)
        await served.ask(pod, f"{salt}, again")
    await until_free(members)


@contextlib.contextmanager
def stopped(process_id: int) -> Iterator[None]:
    """A process stands still."""
    os.kill(process_id, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process_id, signal.SIGCONT)
