# SPDX-License-Identifier: Apache-2.0
"""Tool calls as tags: around JSON (Hermes), or around names and values (Qwen3-Coder and GLM-4.5).

Values may hold what looks like a tag: a tag ends a value only where what follows is what follows it in a call.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from pagoda.api.parsers.deltas import AnswerBuilder
from pagoda.api.parsers.json_calls import MAX_HEAD_CHARS, read_calls, read_closers
from pagoda.api.parsers.json_text import read_json
from pagoda.api.parsers.schemas import ToolSchemas, quoted
from pagoda.text.text_source import Steps, Tags, TextSource, ignore

_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_HERMES = Tags(_CALL)
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_QWEN = Tags(_CALL, _FUNCTION)
_NAME_END = Tags(">")
_NAME = re.compile(r"[ \t\"']*([^\s<\"':=]+)[\"':=]*")
"""A name as models misspell it, with quotes around it or a colon behind."""


class _Ending:
    """The tags with which a value may end."""

    def __init__(
        self, key: str, key_end: str, closer: str, followers: Mapping[str, tuple[str, ...]]
    ) -> None:
        """`closer` is the tag of its own, with a line break in front that belongs to it; models leave it out.
        `key` and `key_end` are around the name of the next argument. `followers` are tags that may follow a tag
        that ends a value; so may the end of the text."""
        self.key, self.closer = key, closer.lstrip()
        self.key_ends = Tags(key_end)
        others = (key, *followers)
        self.tags = Tags(closer, self.closer, *others, *(f"\n{tag}" for tag in others))
        self.next = Tags(*others)
        self.followers = {self.closer: others, **followers}

    def ends_at(self, source: TextSource, tag: str, tools: ToolSchemas, tool: str) -> Steps[bool]:
        """True if `tag` ends a value."""
        if tag == self.key:
            name, end = yield from source.collect(self.key_ends, limit=MAX_HEAD_CHARS)
            source.put_back(name + (end or ""))
            return end is not None and tools.takes(tool, name.strip())
        space = yield from source.spaces()
        is_followed = not (yield from source.peek())
        for follower in self.followers[tag]:
            if not is_followed and (yield from source.accept(follower)):
                source.put_back(follower)
                is_followed = True
        source.put_back(space)
        return is_followed


_QWEN_ENDING = _Ending(
    "<parameter=",
    ">",
    "\n</parameter>",
    {
        _FUNCTION_END: (_CALL_END, _CALL, _FUNCTION),
        _CALL_END: (_CALL,),
        _CALL: (),
        _FUNCTION: (),
    },
)
_GLM_ENDING = _Ending("<arg_key>", "</arg_key>", "</arg_value>", {_CALL_END: (_CALL,), _CALL: ()})
_GLM_VALUE = "<arg_value>"
_GLM_KEY_ENDS = Tags("</arg_key>", _GLM_VALUE)


@dataclass
class _Arguments:
    """The arguments of one call as JSON text. Values of strings are added as they come."""

    source: TextSource
    answer: AnswerBuilder
    tools: ToolSchemas
    tool: str
    separator: str = ""

    def begin(self) -> None:
        self.answer.begin_call(self.tool)
        self.answer.add_arguments("{")

    def read_value(self, name: str, ending: _Ending) -> Steps[None]:
        """Reads the value of argument `name`. Only the tag of its own is taken from behind it."""
        self.answer.add_arguments(f"{self.separator}{quoted(name)}: ")
        self.separator = ", "
        parts: list[str] = []
        is_string = self.tools.is_string(self.tool, name)
        emit = self._add_escaped if is_string else parts.append
        if is_string:
            self.answer.add_arguments('"')
        elif (yield from self.source.peek()) in ("{", "["):
            yield from read_json(self.source, ignore, raw=emit)
        while (found := (yield from self.source.until(ending.tags, emit))) is not None:
            tag = found.removeprefix("\n")
            if (yield from ending.ends_at(self.source, tag, self.tools, self.tool)):
                if tag != ending.closer:
                    self.source.put_back(tag)
                break
            emit(found)
        if is_string and not self.source.is_cut:
            self.answer.add_arguments('"')
        elif not is_string:
            value = self.tools.value(self.tool, name, "".join(parts))
            self.answer.add_arguments("".join(parts) if self.source.is_cut else value)

    def _add_escaped(self, text: str) -> None:
        self.answer.add_arguments(quoted(text)[1:-1])

    def end(self) -> None:
        if not self.source.is_cut:
            self.answer.add_arguments("}")
            self.answer.end_call()


def read_hermes(source: TextSource, answer: AnswerBuilder, tools: ToolSchemas) -> Steps[None]:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes 2 Pro, Qwen 2.5 and 3, Granite 4)."""
    while (tag := (yield from source.until(_HERMES, answer.add_content))) is not None:
        yield from _read_block(source, answer, tools, tag)


def read_qwen3_coder(source: TextSource, answer: AnswerBuilder, tools: ToolSchemas) -> Steps[None]:
    """`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`; some models leave out
    the outer tag, or closing tags."""
    while (tag := (yield from source.until(_QWEN, answer.add_content))) is not None:
        if tag == _CALL:
            yield from _read_block(source, answer, tools, tag)
        else:
            yield from _read_function(source, answer, tools, tag)


def _read_block(
    source: TextSource, answer: AnswerBuilder, tools: ToolSchemas, taken: str
) -> Steps[None]:
    """Reads calls behind the tag `taken`, in JSON or as functions: models mix the forms that they have learnt."""
    space = yield from source.spaces()
    if (yield from source.accept(_FUNCTION)):
        yield from _read_function(source, answer, tools, taken + space + _FUNCTION)
    else:
        yield from read_calls(source, answer, tools, taken + space, _CALL_END)


def _read_function(
    source: TextSource, answer: AnswerBuilder, tools: ToolSchemas, taken: str
) -> Steps[None]:
    name, tag = yield from _read_name(source)
    if not name:
        answer.add_content(taken + tag)
        return
    arguments = _Arguments(source, answer, tools, tools.meant(name))
    space = yield from source.spaces()
    if (yield from source.peek()) == "{":  # as Llama 3.1 writes functions of its users
        answer.begin_call(arguments.tool)
        answer.in_arguments = not (yield from read_json(source, answer.add_arguments))
    else:
        source.put_back(space)
        arguments.begin()
        yield from _read_parameters(source, answer, arguments)
    for end in (_FUNCTION_END, _CALL_END):
        yield from read_closers(source, (), end)


def _read_parameters(
    source: TextSource, answer: AnswerBuilder, arguments: _Arguments
) -> Steps[None]:
    while (tag := (yield from source.until(_QWEN_ENDING.next, answer.add_content))) is not None:
        if tag != _QWEN_ENDING.key:
            source.put_back(tag)
            break
        name, end = yield from _read_name(source, arguments)
        if name:
            yield from source.accept("\n")
            yield from arguments.read_value(name, _QWEN_ENDING)
        elif end:
            answer.add_content(tag + end)
    arguments.end()


def _read_name(source: TextSource, arguments: _Arguments | None = None) -> Steps[tuple[str, str]]:
    """Takes a name and the `>` behind it, which may be missing; `arguments` knows names with spaces. Returns the
    name; if there is none, it is empty, and the text that was taken follows."""
    text, tag = yield from source.collect(_NAME_END, limit=MAX_HEAD_CHARS)
    if tag is not None and arguments and arguments.tools.takes(arguments.tool, text):
        return text, ""
    found = _NAME.match(text)
    if found is None or (tag is None and found.end() == len(text)):
        return "", text + (tag or "")
    if found.end() < len(text.rstrip()):
        source.put_back(text[found.end() :] + (tag or ""))
    return found[1], ""


def read_glm45(source: TextSource, answer: AnswerBuilder, tools: ToolSchemas) -> Steps[None]:
    """`<tool_call>name`, then `<arg_key>key</arg_key><arg_value>value</arg_value>` for each argument,
    `</tool_call>`."""
    while (opening := (yield from source.until(_HERMES, answer.add_content))) is not None:
        head, tag = yield from source.collect(_GLM_ENDING.next, limit=MAX_HEAD_CHARS)
        name = head.strip()
        is_named = tag is not None or (tools.offers(name) and not source.is_cut)
        if not is_named or not name or any(c.isspace() or c in "{<" for c in name):
            answer.add_content(opening + head + (tag or ""))
            continue
        arguments = _Arguments(source, answer, tools, tools.meant(name))
        arguments.begin()
        while tag == _GLM_ENDING.key:
            key, tag = yield from source.collect(_GLM_KEY_ENDS)
            if tag is not None and tag != _GLM_VALUE:
                yield from source.spaces()
                yield from source.accept(_GLM_VALUE)
            if tag is not None:
                yield from arguments.read_value(key.strip(), _GLM_ENDING)
                tag = yield from source.until(_GLM_ENDING.next, answer.add_content)
        if tag == _CALL:
            source.put_back(tag)
        arguments.end()
