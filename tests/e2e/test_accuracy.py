"""The embedded model's answers under pressure are those it gives in peace, and they are right."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

import aiohttp

from pagoda.cli.bench.accuracy import Grade, grade_all
from pagoda.cli.bench.questions import Question, load_questions
from pagoda.cli.openai_client import OpenAIClient
from pagoda.cli.server_process import ServerProcess, server_process

QUESTIONS_PER_SKILL = 4


def some_questions() -> list[Question]:
    """The first few of each skill, in turn, so that long and short prompts meet."""
    by_skill = itertools.groupby(load_questions(None, ()), key=lambda question: question.skill)
    some = [list(itertools.islice(group, QUESTIONS_PER_SKILL)) for _, group in by_skill]
    return [question for group in zip(*some, strict=True) for question in group]


async def ask(
    server: ServerProcess, questions: Sequence[Question], concurrency: int
) -> tuple[list[Grade], dict[str, int]]:
    async with OpenAIClient(server.base_url) as client:
        grades = await grade_all(client, "pagoda-tiny", questions, concurrency, lambda: None)
    async with (
        aiohttp.ClientSession(server.base_url) as session,
        session.get("/v1/load") as reply,
    ):
        return grades, await reply.json()


def test_sixteen_at_a_time_in_a_tiny_cache_equals_one_at_a_time() -> None:
    questions = some_questions()
    pressed_flags = ["--max-model-len", "1600", "--num-kv-blocks", "1600", "--block-size", "1"]
    with server_process(["--dtype", "float32", *pressed_flags]) as server:
        pressed, load = asyncio.run(ask(server, questions, 16))
    with server_process(["--dtype", "float32", "--no-enable-prefix-caching"]) as server:
        at_ease, _ = asyncio.run(ask(server, questions, 1))
    assert load["num_preemptions"] > 0
    assert load["num_prefix_hit_tokens"] > 0
    assert [grade.answer for grade in pressed] == [grade.answer for grade in at_ease]
    assert [grade.correct for grade in pressed] == [grade.correct for grade in at_ease]
    assert sum(grade.correct for grade in pressed) >= 0.95 * len(questions)
