# SPDX-License-Identifier: Apache-2.0
"""`pagoda demo`: the whole stack once through.

The embedded model gets questions that it was never shown, any other model a few about the world.

A server is started on a free port, asked over HTTP with streams, and stopped.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from rich.style import Style

from pagoda.checkpoints.resolve import EMBEDDED_MODEL, resolve_model
from pagoda.cli import output
from pagoda.cli.answer import AnswerPrinter, RequestTimes, ask
from pagoda.cli.openai_client import PATHS, OpenAIClient
from pagoda.cli.options import GeneralOptions
from pagoda.cli.questions import Question, load_questions
from pagoda.cli.server_process import server_process
from pagoda.concurrency import event_loop

_SKILLS = ("addition", "reversing", "sorting", "json", "thinking", "tool_call", "recall_short")
"""Skills of the embedded model that the demo asks about, if the file has them."""
_OTHER_QUESTIONS = Path(__file__).parent / "demo_questions.jsonl"
_MAX_SHOWN_LINES = 4


class Answers(NamedTuple):
    """Answers to all questions, asked one after the other and then all at once."""

    each: list[tuple[bool, RequestTimes]]
    """Verdict and figures of each question alone."""
    together: list[RequestTimes]
    """Figures of the same questions at once."""


def demo(model: str | None = None, *, general: GeneralOptions = GeneralOptions()) -> int:
    """Start a server, ask it a few questions, show answers and figures.

    Args:
        model: A model directory, a GGUF file, a hub id or smollm2; by default the embedded pagoda-tiny.
    """
    general.apply()
    console = output.stdout()
    resolve_model(model)  # whose mistakes would be told by the server, and its end by this command
    questions = demo_questions(model)
    arguments = [] if model is None else [model]
    start = time.perf_counter()
    console.print(f"starting: {' '.join(['pagoda serve', *arguments, '--port 0'])}")
    with server_process(arguments) as server:
        console.print(f"ready at {server.base_url} after {time.perf_counter() - start:.1f} s\n")
        answers = event_loop.run(_ask(server.base_url, questions))
    console.print(output.facts(_summary(answers)))
    command = " ".join(["pagoda serve", *arguments])
    console.print(f"\nThe server has stopped. `{command}` starts one that stays.")
    return 0


def demo_questions(model: str | None) -> list[Question]:
    """The questions for a model: one of each skill of the embedded one, general ones for any other."""
    if model is None or model == EMBEDDED_MODEL:
        return choose_questions(load_questions(None, ()))
    return load_questions(_OTHER_QUESTIONS, ())


def choose_questions(questions: Sequence[Question]) -> list[Question]:
    """The first question of each of the demo's skills that the file has."""
    first = {question.skill: question for question in reversed(questions)}
    return [first[skill] for skill in _SKILLS if skill in first]


async def _ask(base_url: str, questions: Sequence[Question]) -> Answers:
    """Asks all questions in turn, then all at once."""
    async with OpenAIClient(base_url) as client:
        model = await client.first_model()
        each = [await _ask_one(client, model, question) for question in questions]
        bodies = [question.body(model) for question in questions]
        together = await asyncio.gather(*(ask(client, PATHS["chat"], body) for body in bodies))
    return Answers(each, together)


async def _ask_one(
    client: OpenAIClient, model: str, question: Question
) -> tuple[bool, RequestTimes]:
    console = output.stdout()
    for turn in question.messages[:-1]:
        if turn["role"] != "system":
            console.print(f"{turn['role']}: {turn['content']}", style=Style(dim=True))
    console.print(f"{question.skill}: {shorten(question)}", style=Style(bold=True))
    printer = AnswerPrinter()
    outcome = await ask(client, PATHS["chat"], question.body(model), printer)
    message = printer.message()
    for call in message.tool_calls or ():
        output.write_answer(f"→ {call.function.name}({call.function.arguments})")
    is_right = question.expect.is_met_by(message)
    verdict = "right" if is_right else "wrong"
    console.print(f"\n[{verdict}; {outcome.figures()}]\n", style=Style(dim=True))
    return is_right, outcome


def shorten(question: Question) -> str:
    """The last message of a question, long texts by their first and last lines."""
    content = question.messages[-1].get("content")
    lines = content.splitlines() if isinstance(content, str) else [str(content)]
    if len(lines) <= _MAX_SHOWN_LINES:
        return "\n".join(lines)
    return "\n".join([lines[0], lines[1], f"... ({len(lines) - 3} more lines)", lines[-1]])


def _summary(answers: Answers) -> list[tuple[str, str]]:
    ttfts = [it.ttft_s for _, it in answers.each if it.ttft_s is not None]
    tpots = [it.tpot_s for _, it in answers.each if it.tpot_s]
    num_right = sum(is_right for is_right, _ in answers.each)
    took = max(it.ended_s for it in answers.together) - min(it.sent_s for it in answers.together)
    rate = sum(it.output_tokens for it in answers.together) / took
    return [
        ("right answers", f"{num_right} of {len(answers.each)}"),
        ("time to first token", f"{1000 * median(ttfts):.0f} ms (median)" if ttfts else "-"),
        ("tokens/s, one stream", f"{1 / median(tpots):,.0f} (median)" if tpots else "-"),
        (
            "tokens/s, all at once",
            f"{rate:,.0f} ({len(answers.together)} streams, prompts included)",
        ),
    ]
