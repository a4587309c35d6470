# SPDX-License-Identifier: Apache-2.0
"""Tool calls as JSON objects with a name and arguments: alone, in lists, in code blocks, or behind their name.

The arguments stream as they come where the object begins with its name; objects in other orders of keys are read
as a whole. What turns out to be no call becomes content.
"""

from __future__ import annotations

import json
import re

from pagoda.api.parsers.deltas import AnswerBuilder
from pagoda.api.parsers.json_text import JsonMender, dumped, mended, read_json
from pagoda.api.parsers.schemas import ToolSchemas
from pagoda.text.text_source import Steps, Tags, TextSource, ignore

MAX_HEAD_CHARS = 1024
"""The name of a call must come within so many characters to be streamed; names have at most 64."""
_FIRST_CHARS = 16
"""Characters of an object that are taken at a time until its name is known."""
_HEAD = re.compile(
    r"""\{\s*(?:(["'])type\1\s*:\s*(["'])function\2\s*,\s*)?(["'])name\3\s*:\s*"""
    r"""(?P<name>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')\s*,"""
    r"""\s*(["'])(?:arguments|parameters)\5\s*:\s*(?=\{)""",
    re.DOTALL,
)
_FIRST_KEY = re.compile(r"""\{\s*(?:["'](?P<key>[^"']*)["']|[^\s"'])""")
"""The beginning of an object, up to its first key, if it has any."""
_KEYS = frozenset(("name", "function", "arguments", "parameters"))
_ADDED_KEYS = frozenset(("type", "id", "index", "call_id"))
_NAME = re.compile(r"[\w.\-:/]{1,128}")
FENCE = "```"
_FENCE_WORDS = re.compile(r"json|python|tool_call|tool_code")

_GRANITE_END = "</tool_call>"
_MISTRAL_TAG = "[TOOL_CALLS]"
_MISTRAL, _MISTRAL_NAME_END = Tags(_MISTRAL_TAG), Tags("[ARGS]", "[CALL_ID]", "{")
_MISTRAL_ARGS = Tags("[ARGS]")
_GRANITE = Tags("<|tool_call|>", "<tool_call>")
_PHI = Tags("functools[", "<|tool_call|>")
_PHI_END = "<|/tool_call|>"


def read_mistral(source: TextSource, answer: AnswerBuilder, tools: ToolSchemas) -> Steps[None]:
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`; since tokenizer 11 `[TOOL_CALLS]name[ARGS]{...}`."""
    while (tag := (yield from source.until(_MISTRAL, answer.add_content))) is not None:
        taken = tag + (yield from source.spaces())
        if (yield from source.peek()) in ("[", "{", "`"):
            yield from read_calls(source, answer, tools, taken)
            continue
        name, tag = yield from source.collect(_MISTRAL_NAME_END, limit=MAX_HEAD_CHARS)
        taken += name + (tag or "")
        if tag == "[CALL_ID]":
            call_id, tag = yield from source.collect(_MISTRAL_ARGS, limit=MAX_HEAD_CHARS)
            taken += call_id + (tag or "")
        if tag == "{":
            source.put_back("{")
            taken = taken[:-1]
        name = tools.meant(name) if tag else ""
        yield from read_arguments(source, answer, name, taken, then=_MISTRAL_TAG)


def read_granite(source: TextSource, answer: AnswerBuilder, tools: ToolSchemas) -> Steps[None]:
    """`<|tool_call|>[{"name": ..., "arguments": {...}}, ...]` (Granite 3)."""
    while (tag := (yield from source.until(_GRANITE, answer.add_content))) is not None:
        yield from read_calls(source, answer, tools, tag, _GRANITE_END)


def read_phi4_mini(source: TextSource, answer: AnswerBuilder, tools: ToolSchemas) -> Steps[None]:
    """`functools[{"name": ..., "arguments": {...}}]`, or the list between `<|tool_call|>` tags (Phi-4 mini)."""
    while (tag := (yield from source.until(_PHI, answer.add_content))) is not None:
        if tag.endswith("["):
            source.put_back("[")
            tag = tag[:-1]
        yield from read_calls(source, answer, tools, tag, _PHI_END)


def _numbered_name(name: str, tools: ToolSchemas) -> str:
    """The tool that a name means: Kimi K2 numbers its calls, and takes ids that it has seen as its pattern."""
    if not _NAME.fullmatch(name):
        return ""
    names = re.sub(r":\d+$", "", name), re.sub(r"^functions[._]?|[:_]?\d+$", "", name)
    return tools.meant(next(filter(tools.offers, names), names[0]))


class TokenFormat:
    """Calls between tokens of their own: a name, then the arguments (DeepSeek, Kimi K2)."""

    def __init__(
        self,
        *,
        begins: tuple[str, ...],
        ends: tuple[str, ...],
        call: str,
        arguments: str,
        call_end: str,
    ) -> None:
        self._section = Tags(*begins, *ends, call)
        self._begins = begins
        self._call = call
        self._name_ends = Tags(arguments, call_end, "{", FENCE)
        self._arguments = arguments
        self._call_end = call_end
        self._late_name_ends = Tags(call_end, "{", FENCE)

    def read(self, source: TextSource, answer: AnswerBuilder, tools: ToolSchemas) -> Steps[None]:
        in_section = False
        while (tag := (yield from source.until(self._section, answer.add_content))) is not None:
            taken = tag
            if tag in self._begins:
                taken += yield from source.spaces()
                if not (yield from source.accept(self._call)):
                    answer.add_content(taken)
                    continue
                taken += self._call
            elif tag != self._call:
                if not in_section:
                    answer.add_content(tag)
                in_section = False
                continue
            in_section = yield from self._read_call(source, answer, tools, taken)

    def _read_call(
        self, source: TextSource, answer: AnswerBuilder, tools: ToolSchemas, taken: str
    ) -> Steps[bool]:
        name, end = yield from source.collect(self._name_ends, limit=MAX_HEAD_CHARS)
        taken += name + (end or "")
        if end == self._arguments and (yield from source.peek()) not in ("{", "\n", " ", "`", "<"):
            # DeepSeek V3 and R1: `function`, the separator, the name, and the arguments in a code block.
            name, end = yield from source.collect(self._late_name_ends, limit=MAX_HEAD_CHARS)
            taken += name + (end or "")
        if end is not None and end != self._arguments:
            source.put_back(end)
            taken = taken.removesuffix(end)
        known = _numbered_name(name.strip(), tools) if end is not None else ""
        return (yield from read_arguments(source, answer, known, taken, end=self._call_end))


DEEPSEEK = TokenFormat(
    begins=("<｜tool▁calls▁begin｜>",),
    ends=("<｜tool▁calls▁end｜>",),
    call="<｜tool▁call▁begin｜>",
    arguments="<｜tool▁sep｜>",
    call_end="<｜tool▁call▁end｜>",
)
KIMI_K2 = TokenFormat(
    begins=("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>"),
    ends=("<|tool_calls_section_end|>", "<|tool_call_section_end|>"),
    call="<|tool_call_begin|>",
    arguments="<|tool_call_argument_begin|>",
    call_end="<|tool_call_end|>",
)


def read_calls(
    source: TextSource,
    answer: AnswerBuilder,
    tools: ToolSchemas,
    taken: str,
    end: str = "",
    *,
    is_known: bool = False,
) -> Steps[bool]:
    """Reads calls one behind another, in a list or not, and the tag `end` behind them, which may be missing.

    Without any, `taken`, the text in front of them, becomes content, and False is returned. With `is_known` only
    objects with the name of a tool that was offered are calls: an answer may be JSON too.
    """
    taken += yield from read_fence(source)
    closers = closers_behind(taken)
    in_list = yield from source.accept("[")
    if in_list:
        taken += "["
        closers += ("]",)
    taken += yield from source.spaces()
    found = False
    while (body := (yield from _read_object(source, answer, tools, is_known=is_known))) is None:
        found = True
        taken = yield from source.spaces()
        separator = yield from source.peek()
        if separator and separator in ",;":
            yield from source.accept(separator)
            space = yield from source.spaces()
            is_between = (yield from source.peek()) in ("", *"{]}<`")
            taken += space if is_between else separator + space
    if not found or body:
        answer.add_content(taken + body)
    else:
        source.put_back(taken)
        yield from read_closers(source, closers, end)
    return found


def read_fence(source: TextSource) -> Steps[str]:
    """Takes white space, and the beginning of a code block."""
    taken = yield from source.spaces()
    if not (yield from source.accept(FENCE)):
        return taken
    word = ""
    while (character := (yield from source.peek())) and (character.isalpha() or character == "_"):
        if len(word) == len("tool_call"):
            break
        word += character
        yield from source.accept(character)
    if word and not _FENCE_WORDS.fullmatch(word):
        source.put_back(word)
        word = ""
    return taken + FENCE + word + (yield from source.spaces())


def closers_behind(taken: str) -> tuple[str, ...]:
    """Closers of an object: a brace too many, and the end of a code block that begins in `taken`, before it."""
    return ("}", FENCE) if FENCE in taken else ("}",)


def read_closers(source: TextSource, closers: tuple[str, ...], end: str) -> Steps[None]:
    """Takes what closes calls: `closers`, be they more than were opened, and the tag `end`."""
    while True:
        space = yield from source.spaces()
        for closer in closers:
            if (yield from source.accept(closer)):
                break
        else:
            if not (end and (yield from source.accept(end))):
                source.put_back(space)
            return


def read_arguments(
    source: TextSource,
    answer: AnswerBuilder,
    name: str,
    taken: str,
    *,
    end: str = "",
    then: str = "",
) -> Steps[bool]:
    """Reads the arguments of a call by `name`, and the tag `end` behind them. If there are none before `end`,
    `then` or the end of the text, they are empty. If they are something else, or `name` is no name, `taken`
    becomes content."""
    if not _NAME.fullmatch(name):
        answer.add_content(taken)
        return False
    taken += yield from read_fence(source)
    character = yield from source.peek()
    if character == "{":
        answer.begin_call(name)
        answer.in_arguments = not (yield from read_json(source, answer.add_arguments))
        yield from read_closers(source, closers_behind(taken), end)
        return True
    is_empty = not source.is_cut if not character else (yield from source.accept(end or then))
    if not is_empty:
        answer.add_content(taken)
        return False
    if character and then:
        source.put_back(then)
    answer.begin_call(name)
    answer.add_arguments("{}")
    answer.end_call()
    return True


def _read_object(
    source: TextSource, answer: AnswerBuilder, tools: ToolSchemas, *, is_known: bool
) -> Steps[str | None]:
    """Reads a call; or returns the text that was taken and is none.

    An object that does not begin with its name reaches to its closing brace.
    """
    if (yield from source.peek()) != "{":
        return ""
    mender, held, parts = JsonMender(), list[str](), list[str]()
    num_held, end = 0, None
    while end is None:
        # Little at first: where it shows that this is no call, the rest is read again.
        few = num_held < MAX_HEAD_CHARS
        text = yield from (source.take_some(_FIRST_CHARS) if few else source.take_some())
        if not text:
            break
        part, end = mender.push(text)
        if end is not None:
            source.put_back(text[end:])
        held.append(text[:end])
        parts.append(part)
        if num_held < MAX_HEAD_CHARS:
            num_held += len(held[-1])
            begun = "".join(held)
            first = _FIRST_KEY.match(begun, 0, MAX_HEAD_CHARS) if is_known else None
            if first is not None and first["key"] not in _KEYS | _ADDED_KEYS:
                source.put_back(begun[first.end() :])
                return first[0]
            head = _HEAD.match(begun, 0, MAX_HEAD_CHARS)
            if head is not None:
                name = json.loads(mended(f"[{head['name']}]") or "[]", strict=False)[0]
                source.put_back(begun[head.end() :])
                if not _is_name(name, tools, is_known=is_known):
                    return head[0]
                answer.begin_call(tools.meant(name))
                answer.in_arguments = not (yield from read_json(source, answer.add_arguments))
                yield from _skip_rest(source)
                return None
    if end is None:
        parts.append(mender.finish(is_cut=source.is_cut))
    call = _parse_call("".join(parts), tools)
    if call is None or not _is_name(call[0], tools, is_known=is_known):
        return "".join(held)
    answer.begin_call(tools.meant(call[0]))
    answer.add_arguments(call[1])
    answer.end_call()
    return None


def _is_name(name: str, tools: ToolSchemas, *, is_known: bool) -> bool:
    return tools.offers(name) or (not is_known and _NAME.fullmatch(name) is not None)


def _skip_rest(source: TextSource) -> Steps[None]:
    """Takes the rest of a call's object behind its arguments. Where its closing brace is missing, text stays."""
    taken = yield from source.spaces()
    if (yield from source.accept("}")):
        return
    if (yield from source.accept(",")):
        taken += "," + (yield from source.spaces())
        if (yield from source.peek()) in ('"', "'"):
            yield from read_json(source, ignore, within="{")
            return
    source.put_back(taken)


def _parse_call(body: str, tools: ToolSchemas) -> tuple[str, str] | None:
    """Name and arguments (as JSON text) of a call in any order of keys; None if it is none."""
    try:
        call = json.loads(body)
        if not isinstance(call, dict):
            return None
        if isinstance(call.get("function"), dict):
            call = call["function"]
        name = call.get("name", call.get("function"))
        arguments = call.get("arguments", call.get("parameters"))
        if isinstance(arguments, str):
            arguments = json.loads(mended(arguments.strip()) or "") if arguments.strip() else {}
        if not isinstance(name, str) or not isinstance(arguments or {}, dict):
            return None
        others = call.keys() - _KEYS - _ADDED_KEYS
        if not arguments and others:  # arguments beside the name
            if not all(tools.takes(tools.meant(name), key) for key in others):
                return None
            arguments = {key: value for key, value in call.items() if key in others}
        return name, dumped(arguments or {})
    except (ValueError, RecursionError):
        return None
