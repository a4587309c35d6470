# SPDX-License-Identifier: Apache-2.0
"""A streamed answer: its latencies, and its message as it is printed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pagoda.cli import output
from pagoda.cli.openai_client import (
    ClientChoice,
    ClientMessage,
    ClientToolCall,
    ClientUsage,
    OpenAIClient,
    ToolFunction,
)


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """The times of one request, in seconds on one clock, and its tokens."""

    sent_s: float
    ended_s: float
    event_times_s: Sequence[float] = ()
    """Times at which events with tokens were read."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None

    @property
    def e2e_s(self) -> float:
        return self.ended_s - self.sent_s

    @property
    def ttft_s(self) -> float | None:
        return self.event_times_s[0] - self.sent_s if self.event_times_s else None

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds of each token after the first; None for answers of fewer than two tokens."""
        if not self.event_times_s or self.output_tokens < 2:
            return None
        span = self.event_times_s[-1] - self.event_times_s[0]
        return span / (self.output_tokens - 1)

    @property
    def tokens_per_s(self) -> float:
        """The rate after the first token; of the whole answer if nothing came after it."""
        return 1 / self.tpot_s if self.tpot_s else self.output_tokens / self.e2e_s

    def figures(self) -> str:
        return (
            f"{self.output_tokens} tokens, first after {1000 * (self.ttft_s or self.e2e_s):.0f} ms, "
            f"{self.tokens_per_s:,.0f} tokens/s"
        )


async def ask(
    client: OpenAIClient,
    path: str,
    body: Mapping[str, object],
    on_choice: Callable[[ClientChoice], object] = lambda _: None,
    *,
    stream: bool = True,
) -> RequestTimes:
    """Asks for one answer; `on_choice` is called with each piece that has output. An answer that is no `stream`
    comes in one piece, and nobody knows when its tokens were there.

    Raises ServerError if the server refuses the request, reports an error or hangs up early, ConfigError if it
    cannot be reached.
    """
    times: list[float] = []
    usage: ClientUsage | None = None
    sent = time.perf_counter()
    if not stream:
        whole = await client.post(path, {**body, "stream": False})
        for choice in whole.choices:
            on_choice(choice)
        used = whole.usage or ClientUsage()
        return RequestTimes(
            sent,
            time.perf_counter(),
            prompt_tokens=used.prompt_tokens,
            output_tokens=used.completion_tokens,
        )
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async for now, answers in client.stream(path, streamed):
        for answer in answers:
            if answer.choices and answer.choices[0].has_output():
                times.append(now)
                on_choice(answer.choices[0])
            usage = answer.usage or usage
    return RequestTimes(
        sent_s=sent,
        ended_s=time.perf_counter(),
        event_times_s=times,
        prompt_tokens=usage.prompt_tokens if usage else 0,
        output_tokens=usage.completion_tokens if usage else len(times),
    )


class AnswerPrinter:
    """Prints a chat answer as it comes, reasoning dimmed and on lines of its own, and joins its message."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, tuple[list[str], list[str]]] = {}
        """Pieces of the names and arguments of tool calls, by index."""
        self._in_reasoning = False

    def __call__(self, choice: ClientChoice) -> None:
        delta = choice.delta or ClientMessage()
        if delta.reasoning_content:
            self._reasoning.append(delta.reasoning_content)
            output.write_answer(delta.reasoning_content, dim=True)
            self._in_reasoning = True
        if delta.content:
            self._content.append(delta.content)
            if self._in_reasoning:
                output.write_answer("\n")
                self._in_reasoning = False
            output.write_answer(delta.content)
        for call in delta.tool_calls or ():
            names, arguments = self._calls.setdefault(call.index, ([], []))
            names.append(call.function.name or "")
            arguments.append(call.function.arguments or "")

    def message(self) -> ClientMessage:
        """The message so far."""
        calls = [
            ClientToolCall(ToolFunction("".join(names), "".join(arguments)), index)
            for index, (names, arguments) in sorted(self._calls.items())
        ]
        return ClientMessage(
            "".join(self._content), "".join(self._reasoning) or None, calls or None
        )
