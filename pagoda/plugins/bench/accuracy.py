# SPDX-License-Identifier: Apache-2.0
"""`pagoda bench accuracy`: held-out questions asked over HTTP, and right answers counted by skill."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from pagoda.cli import output
from pagoda.cli.files import write_json
from pagoda.cli.local_server import Connection, connect
from pagoda.cli.openai_client import PATHS
from pagoda.cli.options import Count, GeneralOptions, TrustOptions
from pagoda.cli.progress import progress
from pagoda.cli.questions import Question, load_questions
from pagoda.errors import PagodaError
from pagoda.llm.engine_options import EngineOptions, ParallelOptions


@dataclass(frozen=True, slots=True)
class Grade:
    question: Question
    answer: str
    correct: bool
    error: str | None = None


@dataclass(frozen=True, slots=True)
class AccuracyScore:
    correct: int
    asked: int

    @property
    def accuracy(self) -> float:
        return self.correct / self.asked


def accuracy(
    model: str | None = None,
    *,
    base_url: str | None = None,
    api_key: str | None = None,
    questions: Path | None = None,
    skill: Annotated[tuple[str, ...], Parameter(negative=(), show_default=False)] = (),
    concurrency: Count = 16,
    fail_under: Annotated[float | None, Parameter(validator=Number(gte=0, lte=1))] = None,
    output_file: Annotated[Path | None, Parameter(name="--output")] = None,
    engine: EngineOptions = EngineOptions(),
    parallel: ParallelOptions = ParallelOptions(),
    trust: TrustOptions = TrustOptions(),
    general: GeneralOptions = GeneralOptions(),
) -> int:
    """Ask held-out questions and report the share of right answers for each skill.

    Args:
        model: The model to load, by default the embedded one; with --base-url its name there.
        base_url: Ask a running server instead of loading a model.
        api_key: The bearer token for that server.
        questions: A JSONL file of questions; by default the embedded model's held-out ones.
        skill: Ask only about this skill; may be given several times.
        concurrency: Questions under way at once.
        fail_under: Exit with code 1 when the overall accuracy is below this.
        output_file: Write the figures and all answers as JSON to this file too.
    """
    general.apply()
    asked = load_questions(questions, skill)
    parallel.check_prompts_at_once(min(concurrency, len(asked)))
    with connect(model, base_url, api_key, engine, parallel, trust) as (thread, connection):
        grades = thread.run(grade_all(connection, asked, concurrency))
    scores = score_by_skill(grades)
    overall = AccuracyScore(sum(grade.correct for grade in grades), len(grades))
    rows = (
        (name, str(score.correct), str(score.asked), f"{score.accuracy:.1%}")
        for name, score in [*scores.items(), ("all", overall)]
    )
    columns = ("skill", "right", "asked", "accuracy")
    output.stdout().print(output.table("Accuracy", columns, rows))
    failed = [grade for grade in grades if grade.error is not None]
    if failed:
        output.stderr().print(f"{len(failed)} questions failed, the first: {failed[0].error}")
    if output_file is not None:
        write_json(output_file, _record(scores, overall, grades))
    return 1 if failed or (fail_under is not None and overall.accuracy < fail_under) else 0


async def grade_all(
    connection: Connection, questions: Sequence[Question], concurrency: int
) -> list[Grade]:
    """Asks every question, `concurrency` at a time, and grades the answers in order."""
    room = asyncio.Semaphore(concurrency)

    async def grade(question: Question) -> Grade:
        async with room:
            result = await _grade(connection, question)
        advance()
        return result

    with progress("questions", len(questions)) as advance:
        return await asyncio.gather(*map(grade, questions))


async def _grade(connection: Connection, question: Question) -> Grade:
    try:
        answer = await connection.client.post(PATHS["chat"], question.body(connection.model))
    except PagodaError as error:
        return Grade(question, "", correct=False, error=str(error))
    message = answer.choices[0].message if answer.choices else None
    if message is None:
        return Grade(question, "", correct=False, error="The server's answer holds no message.")
    return Grade(question, message.content or "", question.expect.is_met_by(message))


def score_by_skill(grades: Sequence[Grade]) -> dict[str, AccuracyScore]:
    """Scores in the order in which skills were first asked about."""
    correct: dict[str, list[bool]] = {}
    for grade in grades:
        correct.setdefault(grade.question.skill, []).append(grade.correct)
    return {name: AccuracyScore(sum(of), len(of)) for name, of in correct.items()}


def _record(
    scores: Mapping[str, AccuracyScore], overall: AccuracyScore, grades: Sequence[Grade]
) -> dict[str, object]:
    answers = [
        {
            "id": it.question.id,
            "correct": it.correct,
            "answer": it.answer,
            "expect": it.question.expect,
            "error": it.error,
        }
        for it in grades
    ]
    skills = {name: score.accuracy for name, score in scores.items()}
    return {"accuracy": overall.accuracy, "skills": skills, "answers": answers}
