"""Tool calls as JSON objects with a name and arguments, alone, in lists, or with the name before them.

The arguments stream as they come where the object begins with its name; objects in other orders of keys are read
as a whole. What turns out to be no call becomes content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from pagoda.api.parsers.deltas import AnswerBuilder
from pagoda.api.parsers.schemas import ToolSchemas
from pagoda.api.parsers.source import BraceScanner, Steps, Tags, TextSource, ignore

MAX_HEAD_CHARS = 1024
"""The name of a call must come within so many characters to be streamed; names have at most 64."""
_HEAD = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)',
    re.DOTALL,
)
_NAME = re.compile(r"[\w.\-:/]{1,128}")
_FENCE = "```json"

_HERMES, _HERMES_END = Tags("<tool_call>"), Tags("</tool_call>")
_PYTHON_TAG = Tags("<|python_tag|>")
_MISTRAL, _MISTRAL_NAME_END = Tags("[TOOL_CALLS]"), Tags("[ARGS]", "[CALL_ID]", "{")
_MISTRAL_ARGS = Tags("[ARGS]")
_GRANITE = Tags("<|tool_call|>", "<tool_call>")
_PHI = Tags("functools[", "<|tool_call|>")
_PHI_END = "<|/tool_call|>"


def _any_name(name: str) -> bool:
    del name
    return True


def read_hermes(source: TextSource, answer: AnswerBuilder, tools: ToolSchemas) -> Steps[None]:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes 2 Pro, Qwen 2.5 and 3, Granite 4)."""
    del tools
    while (tag := (yield from source.until(_HERMES, answer.add_content))) is not None:
        taken = tag + (yield from source.spaces())
        body = yield from _read_object(source, answer, end=_HERMES_END)
        if body is not None:
            answer.add_content(taken + body)
            continue
        yield from source.until(_HERMES_END, ignore)
        answer.end_call()


def read_llama3_json(source: TextSource, answer: AnswerBuilder, tools: ToolSchemas) -> Steps[None]:
    """`{"name": ..., "parameters": {...}}` from the beginning or behind `<|python_tag|>`; `;` is between several.

    An object without the tag is a call only if it names a tool that was offered: answers may be JSON too.
    """
    taken = yield from source.spaces()
    is_call = yield from _read_objects(source, answer, taken, accept=tools.has)
    while not is_call:
        tag = yield from source.until(_PYTHON_TAG, answer.add_content)
        if tag is None:
            return
        taken = tag + (yield from source.spaces())
        is_call = yield from _read_objects(source, answer, taken)


def read_mistral(source: TextSource, answer: AnswerBuilder, tools: ToolSchemas) -> Steps[None]:
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`; since tokenizer 11 `[TOOL_CALLS]name[ARGS]{...}`."""
    del tools
    while (tag := (yield from source.until(_MISTRAL, answer.add_content))) is not None:
        taken = tag + (yield from source.spaces())
        if (yield from source.peek()) in ("[", "{"):
            yield from read_list(source, answer, taken)
            continue
        name, tag = yield from source.collect(_MISTRAL_NAME_END, limit=MAX_HEAD_CHARS)
        taken += name + (tag or "")
        if tag == "[CALL_ID]":
            call_id, tag = yield from source.collect(_MISTRAL_ARGS, limit=MAX_HEAD_CHARS)
            taken += call_id + (tag or "")
        if tag == "{":
            source.put_back("{")
            taken = taken[:-1]
        yield from _read_arguments(source, answer, name if tag else None, taken)


def read_granite(source: TextSource, answer: AnswerBuilder, tools: ToolSchemas) -> Steps[None]:
    """`<|tool_call|>[{"name": ..., "arguments": {...}}, ...]` (Granite 3)."""
    del tools
    while (tag := (yield from source.until(_GRANITE, answer.add_content))) is not None:
        yield from read_list(source, answer, tag + (yield from source.spaces()))
        yield from source.accept("</tool_call>")


def read_phi4_mini(source: TextSource, answer: AnswerBuilder, tools: ToolSchemas) -> Steps[None]:
    """`functools[{"name": ..., "arguments": {...}}]`, or the list between `<|tool_call|>` tags (Phi-4 mini)."""
    del tools
    while (tag := (yield from source.until(_PHI, answer.add_content))) is not None:
        if tag.endswith("["):
            source.put_back("[")
            tag = tag[:-1]
        yield from read_list(source, answer, tag + (yield from source.spaces()))
        yield from source.accept(_PHI_END)


def read_bare_list(source: TextSource, answer: AnswerBuilder, tools: ToolSchemas) -> Steps[None]:
    """`[{"name": ..., "parameters": {...}}]` from the beginning: a form for models that were trained on none."""
    taken = yield from source.spaces()
    yield from read_list(source, answer, taken, accept=tools.has)


class TokenFormat:
    """Calls between tokens of their own: a name, then the arguments (DeepSeek, Kimi K2)."""

    def __init__(self, *, begin: str, end: str, call: str, arguments: str, call_end: str) -> None:
        self._section = Tags(begin, end, call)
        self._call = call
        self._arguments = Tags(arguments, call_end)
        self._arguments_tag = arguments
        self._call_end = Tags(call_end)
        self._separators = begin, end

    def read(self, source: TextSource, answer: AnswerBuilder, tools: ToolSchemas) -> Steps[None]:
        del tools
        while (tag := (yield from source.until(self._section, answer.add_content))) is not None:
            if tag != self._call:
                answer.end_part()
                continue
            head, end = yield from source.collect(self._arguments, limit=MAX_HEAD_CHARS)
            taken = tag + head + (end or "")
            name = head if end == self._arguments_tag else None
            if name is not None and (yield from source.peek()) not in ("{", "\n", " "):
                # DeepSeek V3 and R1: `function`, the separator, the name, and the arguments in a code block.
                name, end = yield from source.collect(Tags(_FENCE), limit=MAX_HEAD_CHARS)
                taken += name + (end or "")
                name = name if end else None
            if name is not None:
                name = name.strip().removeprefix("functions.")
                name = name.rpartition(":")[0] or name  # Kimi K2 numbers its calls
            if (yield from _read_arguments(source, answer, name, taken)):
                yield from source.until(self._call_end, ignore)
                answer.end_part()


DEEPSEEK = TokenFormat(
    begin="<｜tool▁calls▁begin｜>",
    end="<｜tool▁calls▁end｜>",
    call="<｜tool▁call▁begin｜>",
    arguments="<｜tool▁sep｜>",
    call_end="<｜tool▁call▁end｜>",
)
KIMI_K2 = TokenFormat(
    begin="<|tool_calls_section_begin|>",
    end="<|tool_calls_section_end|>",
    call="<|tool_call_begin|>",
    arguments="<|tool_call_argument_begin|>",
    call_end="<|tool_call_end|>",
)


def read_list(
    source: TextSource,
    answer: AnswerBuilder,
    taken: str,
    *,
    accept: Callable[[str], bool] = _any_name,
) -> Steps[None]:
    """Reads calls in a JSON list, or one call without a list. `taken` becomes content if there is none."""
    if not (yield from source.accept("[")):
        yield from _read_objects(source, answer, taken, accept=accept)
        return
    taken += "["
    while True:
        taken += yield from source.spaces()
        body = yield from _read_object(source, answer, accept=accept)
        if body is not None:
            answer.add_content(taken + body)
            return
        answer.end_call()
        taken = yield from source.spaces()
        if not (yield from source.accept(",")):
            break
        taken += ","
    if not (yield from source.accept("]")):
        answer.add_content(taken)


def _read_objects(
    source: TextSource,
    answer: AnswerBuilder,
    taken: str,
    *,
    accept: Callable[[str], bool] = _any_name,
) -> Steps[bool]:
    """Reads calls one behind another. Without any, `taken` becomes content, and False is returned."""
    is_call = False
    while True:
        body = yield from _read_object(source, answer, accept=accept)
        if body is not None:
            answer.add_content(taken + body)
            return is_call
        is_call = True
        answer.end_call()
        taken = yield from source.spaces()
        if (yield from source.accept(";")):
            taken += ";" + (yield from source.spaces())


def _read_arguments(
    source: TextSource, answer: AnswerBuilder, name: str | None, taken: str
) -> Steps[bool]:
    """Reads the arguments of a call by `name`. If they are none, or the name is none, `taken` becomes content."""
    if name is None or not _NAME.fullmatch(name.strip()):
        answer.add_content(taken)
        return False
    taken += yield from source.spaces()
    if (yield from source.peek()) != "{":
        answer.add_content(taken)
        return False
    answer.begin_call(name.strip())
    if (yield from source.json_value(answer.add_arguments)):
        answer.end_call()
    return True


def _read_object(
    source: TextSource,
    answer: AnswerBuilder,
    *,
    end: Tags | None = None,
    accept: Callable[[str], bool] = _any_name,
) -> Steps[str | None]:
    """Begins a call, whose `end_call` is left to the caller; or returns the text that was taken and is no call.

    An object that does not begin with its name reaches to `end`, or to its closing brace.
    """
    if end is None and (yield from source.peek()) != "{":
        return ""
    held: list[str] = []
    scanner = BraceScanner()
    num_held, closed = 0, False
    while not closed and num_held < MAX_HEAD_CHARS:
        text, closed = yield from source.take_value(scanner)
        if not text:
            break
        held.append(text)
        num_held += len(text)
        head = _HEAD.match("".join(held), 0, MAX_HEAD_CHARS)
        name = None if head is None else _decoded(head.group(1))
        if head is not None:
            if name is None or not accept(name):
                break
            source.put_back("".join(held)[head.end() :])
            answer.begin_call(name)
            if (yield from source.json_value(answer.add_arguments)):
                answer.in_arguments = False
                yield from source.json_value(ignore, depth=1)
            return None
    if end is None:
        return (yield from _read_whole(source, answer, held, scanner, closed, accept))
    source.put_back("".join(held))
    body, tag = yield from source.collect(end)
    if _add_whole(answer, body, accept):
        source.put_back(tag or "")
        return None
    return body + (tag or "")


def _read_whole(
    source: TextSource,
    answer: AnswerBuilder,
    held: list[str],
    scanner: BraceScanner,
    closed: bool,
    accept: Callable[[str], bool],
) -> Steps[str | None]:
    """Takes an object to its closing brace, behind the text `held`; then as `_read_object`."""
    while not closed:
        text, closed = yield from source.take_value(scanner)
        if not text:
            break
        held.append(text)
    body = "".join(held)
    return None if _add_whole(answer, body, accept) else body


def _add_whole(answer: AnswerBuilder, body: str, accept: Callable[[str], bool]) -> bool:
    """Adds a call in any order of keys. Returns False if `body` is none."""
    call = _parse_call(body)
    if call is None or not accept(call[0]):
        return False
    name, arguments = call
    answer.begin_call(name)
    answer.add_arguments(arguments)
    answer.in_arguments = False
    return True


def _decoded(literal: str) -> str | None:
    """The value of a JSON string; None if it has an escape that JSON does not know."""
    try:
        value: str = json.loads(literal, strict=False)
    except ValueError:
        return None
    return value


def _parse_call(body: str) -> tuple[str, str] | None:
    """Name and arguments (as JSON text) of a call in any order of keys."""
    try:
        call = json.loads(body, strict=False)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):
        return call["name"], arguments
    return call["name"], json.dumps(arguments, ensure_ascii=False)
