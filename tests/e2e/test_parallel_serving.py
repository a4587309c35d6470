# SPDX-License-Identifier: Apache-2.0
"""A server over several ranks and replicas answers as one device does, also when some of them are killed."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import Callable
from typing import NamedTuple

import pytest
from streams import bodies, children, stream_all, until_more

from pagoda.cli.local_server import Connection
from pagoda.cli.openai_client import OpenAIClient
from pagoda.cli.questions import Question, load_questions
from pagoda.cli.server_process import server_process
from pagoda.plugins.bench.accuracy import grade_all

FLAGS = ["--dtype", "float32", "--log-level", "warning", "--max-model-len", "1536"]
NUM_STREAMS = 48
MAX_TOKENS = 40


class Victim(NamedTuple):
    """One of the server's processes of a kind, in the order in which they were started."""

    module: str
    index: int


ENGINE, WORKER = "pagoda.engine.main", "pagoda.worker.main"
TOPOLOGIES: dict[str, list[Victim]] = {
    "--tp 2": [Victim(WORKER, 1), Victim(WORKER, 0)],
    "--tp 4": [],
    "--pp 2": [Victim(WORKER, 0), Victim(WORKER, 1)],
    "--pp 3": [],
    "--dp 2 --tp 2": [Victim(ENGINE, 1), Victim(WORKER, 3)],
}


def some_questions() -> list[Question]:
    """Three questions of each skill, in turn."""
    by_skill = itertools.groupby(load_questions(None, ()), key=lambda question: question.skill)
    some = [list(itertools.islice(group, 3)) for _, group in by_skill]
    return [question for group in zip(*some, strict=True) for question in group]


def answers(base_url: str) -> list[tuple[str, bool]]:
    """Returns each answer and whether it is right."""

    async def ask() -> list[tuple[str, bool]]:
        async with OpenAIClient(base_url) as client:
            grades = await grade_all(Connection(client, "pagoda-tiny"), some_questions(), 16)
        return [(grade.answer, grade.correct) for grade in grades]

    return asyncio.run(ask())


@pytest.fixture(scope="session")
def expected(plain_url: str) -> list[tuple[str, bool]]:
    single = answers(plain_url)
    assert sum(correct for _, correct in single) >= 0.95 * len(single)
    return single


@pytest.mark.parametrize("flags", TOPOLOGIES)
def test_answers_at_every_topology_and_through_kills(
    flags: str, expected: list[tuple[str, bool]]
) -> None:
    with server_process([*FLAGS, *flags.split()]) as server:
        assert answers(server.base_url) == expected
        if TOPOLOGIES[flags]:
            asyncio.run(stream_and_kill(server.base_url, server.pid, TOPOLOGIES[flags]))


async def stream_and_kill(base_url: str, server_pid: int, victims: list[Victim]) -> None:
    requests = bodies(NUM_STREAMS, MAX_TOKENS)
    undisturbed = await stream_all(base_url, requests)
    assert {answer.reason for answer in undisturbed} == {"length"}
    for victim in victims:
        while len(children(server_pid, victim.module)) <= victim.index:  # the last one's successor
            await asyncio.sleep(0.05)

        async def kill(received: Callable[[], int], victim: Victim = victim) -> None:
            await until_more(received, NUM_STREAMS * MAX_TOKENS // 5)
            os.kill(children(server_pid, victim.module)[victim.index], signal.SIGKILL)
            await until_more(received, 1)

        assert await stream_all(base_url, requests, kill) == undisturbed
