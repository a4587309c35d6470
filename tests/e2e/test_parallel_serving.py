"""A server over several ranks and replicas answers as one device does, whatever is killed meanwhile."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import Callable

import pytest
from streams import bodies, children, stream_all, until_more

from pagoda.cli.bench.accuracy import grade_all
from pagoda.cli.bench.questions import Question, load_questions
from pagoda.cli.openai_client import OpenAIClient
from pagoda.cli.server_process import server_process

FLAGS = ["--dtype", "float32", "--log-level", "warning", "--max-model-len", "1536"]
TOPOLOGIES = ["--tp 2", "--tp 4", "--pp 2", "--pp 3", "--tp 2 --pp 2", "--dp 2 --tp 2"]


def some_questions() -> list[Question]:
    """Three of each skill, in turn."""
    by_skill = itertools.groupby(load_questions(None, ()), key=lambda question: question.skill)
    some = [list(itertools.islice(group, 3)) for _, group in by_skill]
    return [question for group in zip(*some, strict=True) for question in group]


def answers(*flags: str) -> list[tuple[str, bool]]:
    async def ask(url: str) -> list[tuple[str, bool]]:
        async with OpenAIClient(url) as client:
            questions = some_questions()
            grades = await grade_all(client, "pagoda-tiny", questions, 16, lambda: None)
        return [(grade.answer, grade.correct) for grade in grades]

    with server_process([*FLAGS, *flags]) as server:
        return asyncio.run(ask(server.base_url))


@pytest.fixture(scope="module")
def expected() -> list[tuple[str, bool]]:
    single = answers()
    assert sum(correct for _, correct in single) >= 0.95 * len(single)
    return single


@pytest.mark.parametrize("flags", TOPOLOGIES)
def test_accuracy_at_every_topology(flags: str, expected: list[tuple[str, bool]]) -> None:
    assert answers(*flags.split()) == expected


@pytest.mark.parametrize(
    ("flags", "module", "victim"),
    [
        ("--tp 2", "pagoda.worker.main", 1),
        ("--tp 2", "pagoda.worker.main", 0),
        ("--pp 2", "pagoda.worker.main", 0),
        ("--pp 2", "pagoda.worker.main", 1),
        ("--dp 2", "pagoda.engine.main", 1),
        ("--dp 2", "pagoda.worker.main", 1),
    ],
    ids=["follower", "leader", "first-stage", "last-stage", "replica", "worker-of-a-replica"],
)
async def test_100_streams_survive_a_kill_token_for_token(
    flags: str, module: str, victim: int
) -> None:
    requests = bodies(100, max_tokens=60)

    async def kill(received: Callable[[], int]) -> None:
        await until_more(received, 1000)
        pid = children(server.pid, module)[victim]
        os.kill(pid, signal.SIGKILL)
        await until_more(received, 1)

    with server_process([*FLAGS, *flags.split()]) as server:
        undisturbed = await stream_all(server.base_url, requests)
        disturbed = await stream_all(server.base_url, requests, kill)
    assert disturbed == undisturbed
    assert len(disturbed) == 100
    assert {reason for _, reason in disturbed} == {"length"}
