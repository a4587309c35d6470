# SPDX-License-Identifier: Apache-2.0
"""The embedded model's answers under pressure are those it gives in peace, and they are right."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

import aiohttp
import pytest

from pagoda.cli.local_server import Connection
from pagoda.cli.openai_client import OpenAIClient
from pagoda.cli.questions import Question, load_questions
from pagoda.cli.server_process import server_process
from pagoda.plugins.bench.accuracy import Grade, grade_all

LONG = ("recall_40", "recall_100")


def some_questions(*, long: bool) -> list[Question]:
    """A few questions of each skill, in turn, so that different prompts meet."""
    chosen = [q for q in load_questions(None, ()) if (q.skill in LONG) == long]
    by_skill = itertools.groupby(chosen, key=lambda question: question.skill)
    some = [list(itertools.islice(group, 8 if long else 3)) for _, group in by_skill]
    return [question for group in zip(*some, strict=True) for question in group]


async def ask(
    base_url: str, questions: Sequence[Question], concurrency: int
) -> tuple[list[Grade], dict[str, int]]:
    async with OpenAIClient(base_url) as client:
        grades = await grade_all(Connection(client, "pagoda-tiny"), questions, concurrency)
    async with (
        aiohttp.ClientSession(base_url) as session,
        session.get("/v1/load") as reply,
    ):
        return grades, await reply.json()


@pytest.mark.parametrize(("long", "num_cached_tokens"), [(False, 400), (True, 1360)])
def test_sixteen_at_a_time_in_a_tiny_cache_equals_one_at_a_time(
    long: bool, num_cached_tokens: int, plain_url: str
) -> None:
    """The cache holds little more than the longest of these prompts, in blocks of one token.

    Long prompts evict each other's blocks; the short ones' answers outgrow the cache and are preempted.
    """
    questions = some_questions(long=long)
    length = str(num_cached_tokens)
    tiny = ["--max-model-len", length, "--num-kv-blocks", length, "--block-size", "1"]
    with server_process(["--dtype", "float32", "--log-level", "warning", *tiny]) as server:
        pressed, load = asyncio.run(ask(server.base_url, questions, 16))
    at_ease, _ = asyncio.run(ask(plain_url, questions, 1))
    assert load["num_prefix_hit_tokens"] > 0
    assert long or load["num_preemptions"] > 0
    assert [grade.answer for grade in pressed] == [grade.answer for grade in at_ease]
    assert [grade.correct for grade in pressed] == [grade.correct for grade in at_ease]
    assert sum(grade.correct for grade in pressed) >= 0.95 * len(questions)
