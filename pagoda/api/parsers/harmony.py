"""The harmony format of gpt-oss: messages with channels (https://github.com/openai/harmony, docs/format.md).

`analysis` is reasoning, `final` is content, and a message to `functions.name` is a tool call. The prompt ends with
`<|start|>assistant`, so an answer begins within a header.
"""

from __future__ import annotations

import re

from pagoda.api.parsers.deltas import AnswerBuilder
from pagoda.api.parsers.source import Emit, Steps, Tags, TextSource, ignore

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_HEADER = Tags(_START, _CHANNEL, "<|end|>")
_HEADER_END = Tags(_MESSAGE)
_BODY_ENDS = Tags(_START, "<|end|>", "<|call|>", "<|return|>")
_MAX_HEADER_CHARS = 1024
_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=functions\.([\w.\-]+)")


def read_harmony(source: TextSource, answer: AnswerBuilder, *, calls_tools: bool) -> Steps[None]:
    """Reads the messages of an answer. Text outside of messages is content."""
    tag: str | None = _START if (yield from source.accept(" to=")) else None
    if tag is not None:
        source.put_back("to=")
    while True:
        while tag is None or tag == "<|end|>":
            tag = yield from source.until(_HEADER, answer.add_content)
            if tag is None:
                return
        header, end = yield from source.collect(_HEADER_END, limit=_MAX_HEADER_CHARS)
        header = (tag or "") + header
        if end is None:
            # A header that the text ends in says nothing; another is no header.
            answer.add_content("" if source.ended else header)
            tag = None
            continue
        tag = yield from _read_message(source, answer, header, calls_tools=calls_tools)
        if tag != _START:
            tag = None


def _read_message(
    source: TextSource, answer: AnswerBuilder, header: str, *, calls_tools: bool
) -> Steps[str | None]:
    channel = _NAME.search(header)
    recipient = _RECIPIENT.search(header) if calls_tools else None
    emit: Emit = answer.add_content
    answer.end_part()
    if recipient is not None:
        answer.begin_call(recipient.group(1))
        yield from source.spaces()
        if (yield from source.peek()) == "{":
            if (yield from source.json_value(answer.add_arguments)):
                answer.in_arguments = False
            emit = ignore
        else:
            emit = answer.add_arguments
    elif channel is not None and channel.group(1) == "analysis":
        answer.in_reasoning = True
        emit = answer.add_reasoning
    tag = yield from source.until(_BODY_ENDS, emit)
    if recipient is not None and tag is not None:
        answer.end_call()
    if tag is not None:
        answer.in_reasoning = False
        answer.end_part()
    return tag
