"""`pagoda demo`: the whole stack once through, with the embedded model and questions it was never shown.

A server is started on a free port, asked over HTTP with streams, and stopped.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.style import Style

from pagoda.cli import event_loop, output
from pagoda.cli.answer import AnswerPrinter, StreamedAnswer, stream_answer
from pagoda.cli.bench.questions import Question, load_questions
from pagoda.cli.openai_client import OpenAIClient
from pagoda.cli.options import GeneralOptions
from pagoda.cli.server_process import server_process

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
    console.print(output.facts(_summary(questions, answers)))
    console.print("\nThe server has stopped. `pagoda serve` starts one that stays.")
    return 0


def choose_questions(questions: Sequence[Question]) -> list[Question]:
    """The first question of each of the demo's skills that the file has."""
    first = {question.skill: question for question in reversed(questions)}
    return [first[skill] for skill in _SKILLS if skill in first]


async def _ask(base_url: str, questions: Sequence[Question]) -> list[StreamedAnswer]:
    async with OpenAIClient(base_url) as client:
        model = await client.first_model()
        return [await _ask_one(client, model, question) for question in questions]


async def _ask_one(client: OpenAIClient, model: str, question: Question) -> StreamedAnswer:
    console = output.stdout()
    console.print(f"{question.skill}: {shorten(question)}", style=Style(bold=True))
    answer = await stream_answer(client, question.body(model), AnswerPrinter())
    for call in answer.message.tool_calls or ():
        output.write_answer(f"→ {call.function.name}({call.function.arguments})")
    verdict = "right" if question.expect.is_met_by(answer.message) else "wrong"
    console.print(f"\n[{verdict}; {answer.figures()}]\n", style=Style(dim=True))
    return answer


def shorten(question: Question) -> str:
    """The last message of a question, long texts by their first and last lines."""
    content = question.messages[-1].get("content")
    lines = content.splitlines() if isinstance(content, str) else [str(content)]
    if len(lines) <= _MAX_SHOWN_LINES:
        return "\n".join(lines)
    return "\n".join([lines[0], lines[1], f"... ({len(lines) - 3} more lines)", lines[-1]])


def _summary(
    questions: Sequence[Question], answers: Sequence[StreamedAnswer]
) -> list[tuple[str, str]]:
    right = sum(
        question.expect.is_met_by(answer.message)
        for question, answer in zip(questions, answers, strict=True)
    )
    ttfts = sorted(answer.ttft_s for answer in answers)
    tokens = sum(answer.output_tokens for answer in answers)
    streaming_s = sum(answer.duration_s - answer.ttft_s for answer in answers)
    rate = (tokens - len(answers)) / streaming_s if streaming_s > 0 else 0.0
    return [
        ("right answers", f"{right} of {len(answers)}"),
        ("time to first token", f"{1000 * ttfts[len(ttfts) // 2]:.0f} ms (median)"),
        ("tokens/s, one stream", f"{rate:,.0f}"),
    ]
