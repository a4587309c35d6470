# SPDX-License-Identifier: Apache-2.0
"""Conversations whose KV is several times as large as the device: how much of their prompts is computed.

Every session asks one thing after the other, and the whole conversation comes along each time. Sessions take
turns, so that the blocks of one have left the device when it comes back. Servers with and without tiers get the
same conversations, one server after the other. Answers are greedy, in float32, so they must be the same.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import aiohttp

from benchmarks.kv_tiers.client import Answer, ask, open_session, tier_figures
from pagoda.cli import output
from pagoda.cli.server_process import server_process

_WORDS = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heron", "inlet", "jetty")
_WORDS_PER_QUESTION = 24
_ANSWER = 24
_BLOCK_SIZE = 16
_BLOCK_BYTES = 2 * 4 * 2 * 64 * _BLOCK_SIZE * 4
"""Keys and values of the embedded model: four layers, two heads of 64 channels, float32."""

Texts = list[list[str]]
"""Texts by session and turn."""


class _Run(NamedTuple):
    answers: list[list[Answer]]
    """Answers by turn, of each session."""
    num_loaded: dict[str, int]
    seconds: float

    @property
    def texts(self) -> Texts:
        return [[answer.text for answer in turn] for turn in self.answers]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(answer.num_prompt_tokens for turn in self.answers for answer in turn)

    @property
    def num_computed_tokens(self) -> int:
        cached = sum(answer.num_cached_tokens for turn in self.answers for answer in turn)
        return self.num_prompt_tokens - cached

    @property
    def num_final_tokens(self) -> int:
        return sum(answer.num_prompt_tokens + _ANSWER for answer in self.answers[-1])


def chat(
    *,
    directory: Path | None = None,
    sessions: int = 40,
    turns: int = 8,
    oversize: float = 4.0,
    concurrency: int = 8,
    seed: int = 0,
) -> None:
    """Count the prompt tokens that conversations with the embedded model make a server compute.

    Args:
        directory: Where blocks are kept; by default a temporary one.
        sessions: Conversations.
        turns: Questions in each.
        oversize: The size of all conversations in the end over that of the device.
        concurrency: Sessions that wait for an answer at the same time.
        seed: Of questions, and of the order of sessions.
    """
    load = _Load(_questions(sessions, turns, seed), concurrency, seed)
    large = load.run([])
    blocks = int(large.num_final_tokens / oversize / _BLOCK_SIZE)
    device = ["--num-kv-blocks", str(blocks)]
    host = ["--kv-host-bytes", str(blocks * _BLOCK_BYTES)]
    runs = {"none; the device holds all": large, "none": load.run(device)}
    for name, tiers, touches in (
        ("host memory as large as the device, disk", host, 2),
        ("disk", [], 2),
        ("disk, --kv-disk-min-touches 1", [], 1),
    ):
        with tempfile.TemporaryDirectory(dir=directory) as kept:
            disk = ["--kv-disk-path", kept, "--kv-disk-bytes", "4GiB"]
            disk += ["--kv-disk-min-touches", str(touches)]
            runs[name] = load.run([*device, *tiers, *disk])
    _report(runs, blocks)


class _Load:
    def __init__(self, questions: Texts, concurrency: int, seed: int) -> None:
        self._questions = questions
        self._concurrency = concurrency
        self._seed = seed

    def run(self, flags: list[str]) -> _Run:
        output.stderr().print(f"serving with {' '.join(flags) or 'no flags'} ...")
        model = ["--dtype", "float32", "--block-size", str(_BLOCK_SIZE), "--log-level", "warning"]
        with server_process([*model, *flags]) as server:
            return asyncio.run(self._converse(server.base_url))

    async def _converse(self, base_url: str) -> _Run:
        order = random.Random(self._seed)
        room = asyncio.Semaphore(self._concurrency)
        histories: list[list[dict[str, str]]] = [[] for _ in self._questions]
        answers: list[list[Answer]] = []
        async with open_session(base_url) as session:
            began = time.perf_counter()
            for turn in range(len(self._questions[0])):
                for history, questions in zip(histories, self._questions, strict=True):
                    history.append({"role": "user", "content": questions[turn]})
                tasks: dict[int, asyncio.Task[Answer]] = {}
                for index in order.sample(range(len(histories)), len(histories)):
                    tasks[index] = asyncio.create_task(_ask(session, histories[index], room))
                answers.append([await tasks[index] for index in range(len(histories))])
                for history, answer in zip(histories, answers[-1], strict=True):
                    history.append({"role": "assistant", "content": answer.text})
            seconds = time.perf_counter() - began
            figures = await tier_figures(session)
        loaded = {tier: figures[tier, "loaded"] for tier in ("host", "disk")}
        return _Run(answers, loaded, seconds)


async def _ask(
    session: aiohttp.ClientSession, messages: list[dict[str, str]], room: asyncio.Semaphore
) -> Answer:
    async with room:
        body = {"messages": messages, "temperature": 0, "max_tokens": _ANSWER, "ignore_eos": True}
        return await ask(session, "/v1/chat/completions", {"model": "pagoda-tiny", **body})


def _questions(sessions: int, turns: int, seed: int) -> Texts:
    chance = random.Random(seed)
    return [
        [
            f"Sort {' '.join(chance.choices(_WORDS, k=_WORDS_PER_QUESTION))} {chance.random()}"
            for _ in range(turns)
        ]
        for _ in range(sessions)
    ]


def _report(runs: dict[str, _Run], blocks: int) -> None:
    without = runs["none"]
    rows = [
        (
            name,
            f"{run.num_prompt_tokens:,}",
            f"{run.num_computed_tokens:,}",
            f"{run.num_computed_tokens / without.num_computed_tokens:.3f} ×",
            f"{run.num_loaded['host']:,}",
            f"{run.num_loaded['disk']:,}",
            f"{run.seconds:.1f} s",
            "yes" if run.texts == without.texts else "NO",
        )
        for name, run in runs.items()
    ]
    columns = ("tiers", "prompt tokens", "computed", "of none", "blocks from host", "from disk")
    console = output.stdout()
    console.print(
        f"{len(without.answers[0])} sessions of {len(without.answers)} turns, in the end "
        f"{without.num_final_tokens:,} tokens; the device holds {blocks * _BLOCK_SIZE:,}"
    )
    console.print(output.table("", (*columns, "took", "same answers"), rows))
