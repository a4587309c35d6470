# SPDX-License-Identifier: Apache-2.0
"""The harmony format of gpt-oss: messages with channels (https://github.com/openai/harmony, docs/format.md).

`analysis` is reasoning, `final` is content, and a message to `functions.name` is a tool call. The prompt ends with
`<|start|>assistant`, so an answer begins within a header.
"""

from __future__ import annotations

import re

from pagoda.api.parsers.deltas import AnswerBuilder
from pagoda.api.parsers.json_calls import closers_behind, read_closers, read_fence
from pagoda.api.parsers.json_text import dumped, read_json
from pagoda.api.parsers.literals import read_literal
from pagoda.api.parsers.schemas import ToolSchemas, quoted
from pagoda.text.reasoning_border import (
    HARMONY_BODY_ENDS,
    HARMONY_HEADER_END,
    MAX_HARMONY_HEADER_CHARS,
)
from pagoda.text.text_source import Emit, Steps, Tags, TextSource

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_HEADER = Tags(_START, _CHANNEL, "<|end|>")
_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_NAMES = re.compile(r"(<\|start\|>\w*)?(<\|channel\|>(analysis|commentary|final|[\W\d])*)?")
"""Beginning of a header that says nothing by itself."""
_RECIPIENT = re.compile(r"\bto=([\w.\-]+)")


def read_harmony(
    source: TextSource, answer: AnswerBuilder, tools: ToolSchemas | None
) -> Steps[None]:
    """Reads the messages of an answer; other text is content. `tools`: None if the answer has no calls."""
    tag: str | None = _START if (yield from source.accept(" to=")) else None
    if tag is not None:
        source.put_back("to=")
    while True:
        while tag is None or tag == "<|end|>":
            tag = yield from source.until(_HEADER, answer.add_content)
            if tag is None:
                return
        header, end = yield from source.collect(HARMONY_HEADER_END, limit=MAX_HARMONY_HEADER_CHARS)
        header = (tag or "") + header
        if end != _MESSAGE:
            # A header that the text ends in says nothing; of another, what is no header is content.
            if end is not None:
                header = _NAMES.sub("", header, count=1)
            answer.add_content("" if source.ended and end is None else header)
            tag = end
            continue
        tag = yield from _read_message(source, answer, header, tools)
        if tag not in (_START, _CHANNEL):
            tag = None


def _read_message(
    source: TextSource, answer: AnswerBuilder, header: str, tools: ToolSchemas | None
) -> Steps[str | None]:
    channels = _NAME.findall(header)
    name = _called(header, tools)
    emit: Emit = answer.add_content
    answer.end_part("\n")
    if name is not None:
        return (yield from _read_call(source, answer, name))
    if channels and channels[-1] == "analysis":
        answer.in_reasoning = True
        emit = answer.add_reasoning
    tag = yield from source.until(HARMONY_BODY_ENDS, emit)
    if tag is not None:
        answer.in_reasoning = False
        answer.end_part()
    return tag


def _read_call(source: TextSource, answer: AnswerBuilder, name: str) -> Steps[str | None]:
    answer.begin_call(name)
    taken = yield from read_fence(source)
    if (yield from source.peek()) == "{":
        answer.in_arguments = not (yield from read_json(source, answer.add_arguments))
        yield from read_closers(source, closers_behind(taken), "")
        tag = yield from source.until(HARMONY_BODY_ENDS, answer.add_content)
    else:
        body, tag = yield from source.collect(HARMONY_BODY_ENDS)
        body = (taken + body).strip()
        answer.add_arguments(body if source.is_cut else _value(body or "{}"))
    if tag is not None:
        answer.end_call()
        answer.end_part()
    return tag


def _value(body: str) -> str:
    """The JSON of a body that is no object."""
    try:
        return dumped(read_literal(body))
    except ValueError:
        return quoted(body)


def _called(header: str, tools: ToolSchemas | None) -> str | None:
    """The tool that a message goes to; None if it is no call. Models leave out the namespace."""
    recipient = None if tools is None else _RECIPIENT.search(header)
    if tools is None or recipient is None:
        return None
    name = recipient[1].rstrip(".")
    is_call = name.startswith("functions.") or tools.offers(name)
    return tools.meant(name) if is_call else None
