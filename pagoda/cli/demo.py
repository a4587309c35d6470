"""`pagoda demo`: the whole stack once through, with the embedded model and questions it was never shown.

A server is started on a free port, asked over HTTP with streams, and stopped.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

from rich.style import Style

from pagoda.cli import output
from pagoda.cli.answer import AnswerPrinter, Outcome, ask
from pagoda.cli.bench.questions import Question, load_questions
from pagoda.cli.openai_client import PATHS, OpenAIClient
from pagoda.cli.options import GeneralOptions
from pagoda.cli.server_process import server_process
from pagoda.frontend import event_loop

_SKILLS = ("addition", "reversing", "sorting", "json", "thinking", "tool_call", "recall_short")
"""Skills that the demo asks about, if the model has them."""
_MAX_SHOWN_LINES = 4


def demo(*, general: GeneralOptions = GeneralOptions()) -> int:
    """Start a server with the embedded model, ask it a few questions, show answers and figures."""
    general.apply()
    console = output.stdout()
    questions = choose_questions(load_questions(None, ()))
    start = time.perf_counter()
    console.print("starting: pagoda serve --port 0")
    with server_process([]) as server:
        console.print(f"ready at {server.base_url} after {time.perf_counter() - start:.1f} s\n")
        answers = event_loop.run(_ask(server.base_url, questions))
    console.print(output.facts(_summary(answers)))
    console.print("\nThe server has stopped. `pagoda serve` starts one that stays.")
    return 0


def choose_questions(questions: Sequence[Question]) -> list[Question]:
    """The first question of each of the demo's skills that the file has."""
    first = {question.skill: question for question in reversed(questions)}
    return [first[skill] for skill in _SKILLS if skill in first]


async def _ask(base_url: str, questions: Sequence[Question]) -> list[tuple[bool, Outcome]]:
    """Asks all questions. Returns of each answer if it was right, and its figures."""
    async with OpenAIClient(base_url) as client:
        model = await client.first_model()
        return [await _ask_one(client, model, question) for question in questions]


async def _ask_one(client: OpenAIClient, model: str, question: Question) -> tuple[bool, Outcome]:
    console = output.stdout()
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


def _summary(answers: Sequence[tuple[bool, Outcome]]) -> list[tuple[str, str]]:
    ttfts = [it.ttft_s for _, it in answers if it.ttft_s is not None]
    tpots = [it.tpot_s for _, it in answers if it.tpot_s]
    return [
        ("right answers", f"{sum(is_right for is_right, _ in answers)} of {len(answers)}"),
        ("time to first token", f"{1000 * median(ttfts):.0f} ms (median)" if ttfts else "-"),
        ("tokens/s, one stream", f"{1 / median(tpots):,.0f} (median)" if tpots else "-"),
    ]
