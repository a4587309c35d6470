# SPDX-License-Identifier: Apache-2.0
"""Right answers of the embedded model under pressure, beside those it gives in peace.

The same held-out questions twice, in float32: sixteen at a time with prefix caching and a KV cache that holds
little more than one long prompt, so that requests are preempted; and one at a time without either.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

import aiohttp

from benchmarks.figure import Figure
from pagoda.cli.local_server import Connection
from pagoda.cli.openai_client import OpenAIClient
from pagoda.cli.questions import Question, load_questions
from pagoda.cli.server_process import ServerProcess, server_process
from pagoda.plugins.bench.accuracy import Grade, grade_all

_QUESTIONS_PER_SKILL = 10
_PRESSED = ["--dtype", "float32", "--max-model-len", "1536"]
_PRESSED += ["--num-kv-blocks", "1536", "--block-size", "1"]
_AT_EASE = ["--dtype", "float32", "--no-enable-prefix-caching"]


def measure_accuracy() -> list[Figure]:
    """Accuracy of both runs, and how many answers are the same text."""
    questions = _some_questions()
    with server_process(_PRESSED) as server:
        pressed = asyncio.run(_ask(server, questions, concurrency=16))
        preemptions = asyncio.run(_preemptions(server))
    with server_process(_AT_EASE) as server:
        at_ease = asyncio.run(_ask(server, questions, concurrency=1))
    same = sum(a.answer == b.answer for a, b in zip(pressed, at_ease, strict=True))
    return [
        Figure(
            what=f"pagoda-tiny accuracy, 16 at a time, {preemptions} preemptions",
            measured=(
                f"{_share(pressed):.1%}, one at a time {_share(at_ease):.1%}; "
                f"{same} of {len(questions)} answers the same"
            ),
            target="equal to one at a time",
            command="python -m benchmarks.main_job accuracy",
        )
    ]


def _some_questions() -> list[Question]:
    """The first questions of each skill, in turn, so that long and short prompts meet."""
    by_skill = itertools.groupby(load_questions(None, ()), key=lambda question: question.skill)
    some = [list(itertools.islice(group, _QUESTIONS_PER_SKILL)) for _, group in by_skill]
    return [question for group in itertools.zip_longest(*some) for question in group if question]


async def _ask(
    server: ServerProcess, questions: Sequence[Question], concurrency: int
) -> list[Grade]:
    async with OpenAIClient(server.base_url) as client:
        model = await client.first_model()
        return await grade_all(Connection(client, model), questions, concurrency)


async def _preemptions(server: ServerProcess) -> int:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{server.base_url}/v1/load") as reply,
    ):
        return int((await reply.json())["num_preemptions"])


def _share(grades: Sequence[Grade]) -> float:
    return sum(grade.correct for grade in grades) / len(grades)
