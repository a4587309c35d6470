"""A streamed chat answer: put together from its events, with the figures of its delivery."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pagoda.cli import output
from pagoda.cli.openai_client import Message, OpenAIClient, ToolCall, ToolFunction

_PATH = "/v1/chat/completions"


@dataclass(frozen=True)
class StreamedAnswer:
    message: Message
    output_tokens: int
    ttft_s: float
    """Seconds from sending the request to the first event with output."""
    duration_s: float
    """Seconds from sending the request to the last event."""

    @property
    def tokens_per_s(self) -> float:
        """The rate behind the first token; of all tokens for answers of one."""
        if self.output_tokens > 1 and self.duration_s > self.ttft_s:
            return (self.output_tokens - 1) / (self.duration_s - self.ttft_s)
        return self.output_tokens / self.duration_s

    def figures(self) -> str:
        return (
            f"{self.output_tokens} tokens, first after {1000 * self.ttft_s:.0f} ms, "
            f"{self.tokens_per_s:,.0f} tokens/s"
        )


class _Parts:
    """The pieces of a message that have come so far."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, tuple[list[str], list[str]]] = {}

    def add(self, delta: Message) -> None:
        self._content.append(delta.content or "")
        self._reasoning.append(delta.reasoning_content or "")
        for call in delta.tool_calls or ():
            names, arguments = self._calls.setdefault(call.index, ([], []))
            names.append(call.function.name or "")
            arguments.append(call.function.arguments or "")

    def message(self) -> Message:
        calls = [
            ToolCall(ToolFunction("".join(names), "".join(arguments)), index)
            for index, (names, arguments) in sorted(self._calls.items())
        ]
        return Message("".join(self._content), "".join(self._reasoning) or None, calls or None)


async def stream_answer(
    client: OpenAIClient,
    body: Mapping[str, object],
    on_delta: Callable[[Message], None] | None = None,
) -> StreamedAnswer:
    """Sends a chat request as a stream and puts its answer together; `on_delta` sees every piece.

    Raises:
        ServerError: the server refused the request or broke off.
        ConfigError: the server cannot be reached.
    """
    parts = _Parts()
    sent = time.perf_counter()
    first: float | None = None
    last = sent
    num_events = tokens = 0
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async for now, answers in client.stream(_PATH, streamed):
        last = now
        for answer in answers:
            tokens = answer.usage.completion_tokens if answer.usage else tokens
            delta = answer.choices[0].delta if answer.choices else None
            if delta is None or not delta.has_output():
                continue
            first = first or now
            num_events += 1
            parts.add(delta)
            if on_delta is not None:
                on_delta(delta)
    return StreamedAnswer(
        message=parts.message(),
        output_tokens=tokens or num_events,
        ttft_s=(first or last) - sent,
        duration_s=last - sent,
    )


class AnswerPrinter:
    """Prints an answer as it comes: reasoning dimmed and on lines of its own, then the answer."""

    def __init__(self) -> None:
        self._in_reasoning = False

    def __call__(self, delta: Message) -> None:
        if delta.reasoning_content:
            output.write_answer(delta.reasoning_content, dim=True)
            self._in_reasoning = True
        if delta.content:
            if self._in_reasoning:
                output.write_answer("\n")
                self._in_reasoning = False
            output.write_answer(delta.content)
