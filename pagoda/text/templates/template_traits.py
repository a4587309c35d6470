# SPDX-License-Identifier: Apache-2.0
"""Traits of chat templates: the forms of a conversation that they want, found out by rendering probes.

Templates differ in what they can take: arguments of calls as objects or as text, contents as texts or as parts, a
system message anywhere or only first. A probe is a conversation of words that no template has; what the template
takes is what it renders with all of its words.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from types import MappingProxyType
from typing import Any, Literal, get_args

Turn = Mapping[str, Any]
Render = Callable[[Sequence[Turn], Sequence[Mapping[str, Any]] | None], str]
"""Renders messages and tools; the text is empty if the template refuses them."""

NO_CONTENT: Mapping[str, Turn] = MappingProxyType(
    {"text": {"content": ""}, "null": {"content": None}, "absent": {}}
)
"""The content of a message that has calls only, by `TemplateTraits.no_content`."""
SHORT_ID_CHARS = 9
CallIds = Literal["any", "short", "named"]
_RESULT_ROLES = ("tool", "ipython", "observation", "function", "environment")
_NAME, _KEY, _VALUE, _RESULT = "probename", "probekey", "probevalue", "proberesult"
_ONE, _TWO, _ROLE = "probeone", "probetwo", "proberole"
_BROKEN = '{"' + _KEY + '": "' + _VALUE
_GARBLED = re.compile(rf"""'{_KEY}'|\\"{_KEY}\\"|['"]text['"]\s*:\s*['"]({_ONE}|{_TWO})""")
"""Python's spelling of an object, JSON in a string of JSON, and parts that are written out."""
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "finds",
        "parameters": {
            "type": "object",
            "properties": {_KEY: {"type": "string", "description": "place"}},
            "required": [_KEY],
        },
    },
}
_BARE_TOOL = {"type": "function", "function": {"name": _NAME}}
_USER: Turn = {"role": "user", "content": "question"}
_ANSWER: Turn = {"role": "assistant", "content": "answer"}


@dataclass(frozen=True)
class TemplateTraits:
    tools: Literal["shown", "in_system", "none"] = "none"
    """The place of tools: a variable of the template, or a field of the system message."""
    whole_tools: bool = False
    """Tools must have descriptions and parameters."""
    calls: bool = False
    """Calls in earlier messages are shown."""
    results: bool = False
    """Messages with the results of calls are shown."""
    arguments: Literal["object", "text"] = "object"
    """The form of a call's arguments."""
    broken_arguments: bool = False
    """Arguments that are no JSON are shown as they are."""
    no_content: Literal["text", "null", "absent"] = "text"
    """The content of a message that has calls only."""
    calls_beside_content: bool = True
    """A message with content may have calls too; else they are two messages."""
    parallel_calls: bool = True
    """A message may have several calls; else each has a message, with its result behind it."""
    call_ids: CallIds = "any"
    """Ids of calls: any, nine letters and digits, or the name of the function with the number of the call."""
    needs_ids: bool = False
    """Calls must have ids."""
    result_role: str = "tool"
    """The role of a call's result."""
    system: Literal["anywhere", "first", "none"] = "none"
    """The places where system messages are shown."""
    parts: frozenset[str] = frozenset()
    """Roles whose content may be a list of text parts."""
    one_part: frozenset[str] = frozenset()
    """Roles whose content must be a list of parts, of which the first is read."""
    names: bool = False
    """The name of a user's message is shown."""
    any_role: bool = False
    """Messages of any role are shown."""

    def __str__(self) -> str:
        """The traits in words, for the log and for operators."""
        tools = {"shown": "shown", "in_system": "in the system message", "none": "not shown"}
        said = [
            f"tools {tools[self.tools]}",
            f"calls {'shown' if self.calls else 'not shown'}",
            f"system messages {'not shown' if self.system == 'none' else self.system}",
        ]
        if self.calls:
            said.append(f"arguments as {self.arguments}")
            said += [] if self.no_content == "text" else [f"content {self.no_content} beside calls"]
            said += [] if self.calls_beside_content else ["content and calls apart"]
            said += [] if self.parallel_calls else ["one call a message"]
            said += [] if self.call_ids == "any" else [f"{self.call_ids} ids of calls"]
        said += [] if self.result_role == "tool" else [f"results as {self.result_role}"]
        said += [f"parts for {', '.join(sorted(self.parts))}"] if self.parts else []
        said += [f"one part for {', '.join(sorted(self.one_part))}"] if self.one_part else []
        return "; ".join(said)


def probe_traits(render: Render, *, with_tools: bool) -> TemplateTraits:
    """The traits of a template in conversations with tools, or without: some dozens of short renderings."""
    tools = [_TOOL] if with_tools else None
    known = render([_USER], tools)
    num_garbled = len(_GARBLED.findall(known))

    def shows(turns: Sequence[Turn], *words: str) -> bool:
        """True if the turns are in the text with all words, which tools may have too."""
        text = render(turns, tools)
        return len(_GARBLED.findall(text)) == num_garbled and all(
            text.count(word) > known.count(word) for word in words
        )

    calls = _Calls.found(shows)
    role = calls.role if calls else _result_role(shows)
    system, parts, one_part = _contents(shows, calls)
    return TemplateTraits(
        tools="shown" if _NAME in known else _in_system(shows),
        whole_tools=_NAME in known and _NAME not in render([_USER], [_BARE_TOOL]),
        results=role is not None,
        result_role=role or "tool",
        names=shows([{**_USER, "name": _ONE}], _ONE),
        any_role=shows([_USER, {"role": _ROLE, "content": _ONE}], _ONE),
        system=system,
        parts=parts,
        one_part=one_part,
        **({} if calls is None else calls.traits(shows)),
    )


Shows = Callable[..., bool]


@dataclass(frozen=True)
class _Calls:
    """A form in which a template shows calls and their results."""

    content: Literal["text", "null", "absent"]
    arguments: Literal["object", "text"]
    role: str
    ids: CallIds

    @staticmethod
    def found(shows: Shows) -> _Calls | None:
        """The first form that the template takes, if it takes any."""
        contents: tuple[Literal["text", "absent", "null"], ...] = ("text", "absent", "null")
        kinds: tuple[Literal["object", "text"], ...] = ("object", "text")
        forms = (
            _Calls(content, arguments, "", ids)
            for ids, content, arguments in product(get_args(CallIds), contents, kinds)
        )
        for form in forms:
            call = [_USER, form.message(1)]
            if not shows(call, _NAME, _KEY, _VALUE):
                continue
            for role in _RESULT_ROLES:
                whole = replace(form, role=role)
                if shows([*call, whole.result(1)], _NAME, _KEY, _VALUE, _RESULT):
                    return whole
        return None

    def message(self, count: int, arguments: str | None = None) -> Turn:
        """A message with `count` calls."""
        given: Any = arguments or ({_KEY: _VALUE} if self.arguments == "object" else _BROKEN + '"}')
        calls = [
            {
                "id": self._id(index),
                "type": "function",
                "function": {"name": _NAME * index, "arguments": given},
            }
            for index in range(1, count + 1)
        ]
        return {"role": "assistant", **NO_CONTENT[self.content], "tool_calls": calls}

    def result(self, index: int, content: Any = _RESULT) -> Turn:
        return {
            "role": self.role,
            "tool_call_id": self._id(index),
            "name": _NAME * index,
            "content": content,
        }

    def _id(self, index: int) -> str:
        stems = {"short": "probe000", "any": "call_0123456789abcdef0123456"}
        return f"{stems.get(self.ids, f'functions.{_NAME * index}:')}{index}"

    def traits(self, shows: Shows) -> dict[str, Any]:
        one = self.message(1)
        both = [_USER, {**one, "content": _ONE}, self.result(1)]
        apart = [_USER, {**_ANSWER, "content": _ONE}, one, self.result(1)]
        nameless = [{name: it for name, it in one["tool_calls"][0].items() if name != "id"}]
        without_ids = [_USER, {**one, "tool_calls": nameless}, self.result(1)]
        two = [_USER, self.message(2), self.result(1), self.result(2, _TWO)]
        in_turn = [_USER, one, self.result(1), one, self.result(1, _TWO)]
        return {
            "calls": True,
            "arguments": self.arguments,
            "broken_arguments": shows([_USER, self.message(1, _BROKEN)], _BROKEN),
            "no_content": self.content,
            "calls_beside_content": shows(both, _NAME, _VALUE)
            or not shows(apart, _ONE, _NAME, _VALUE),
            "parallel_calls": shows(two, _NAME * 2, _RESULT, _TWO)
            or not shows(in_turn, _NAME, _RESULT, _TWO),
            "call_ids": self.ids,
            "needs_ids": not shows(without_ids, _NAME, _VALUE, _RESULT),
        }


def _result_role(shows: Shows) -> str | None:
    """The role of results in a template that shows no calls."""
    for role in _RESULT_ROLES:
        if shows([_USER, _ANSWER, {"role": role, "name": _NAME, "content": _RESULT}], _RESULT):
            return role
    return None


def _in_system(shows: Shows) -> Literal["in_system", "none"]:
    turn = {"role": "system", "content": "", "tools": _ONE}
    return "in_system" if shows([turn, _USER], _ONE) else "none"


System = Literal["anywhere", "first", "none"]


def _contents(shows: Shows, calls: _Calls | None) -> tuple[System, frozenset[str], frozenset[str]]:
    """The places of system messages, the roles that take parts, and those that take one part only."""
    places: dict[str, Callable[[Any], list[Turn]]] = {
        "system": lambda content: [{"role": "system", "content": content}, _USER],
        "user": lambda content: [{"role": "user", "content": content}],
        "assistant": lambda content: [_USER, {"role": "assistant", "content": content}, _USER],
    }
    if calls is not None:
        places["tool"] = lambda content: [_USER, calls.message(1), calls.result(1, content)]
    text, (one, two) = f"{_ONE} {_TWO}", ({"type": "text", "text": it} for it in (_ONE, _TWO))
    texts = {role for role, place in places.items() if shows(place(text), _ONE, _TWO)}
    parts = {role for role, place in places.items() if shows(place([one, two]), _ONE, _TWO)}
    if calls is not None:
        words, listed = ([_USER, {**calls.message(1), "content": it}] for it in (text, [one, two]))
        if shows(words, _ONE, _TWO) and not shows(listed, _ONE, _TWO):
            parts.discard("assistant")
    singles = {role for role in places.keys() - texts if shows(places[role]([one]), _ONE)}
    if "system" not in texts | parts | singles:
        return "none", frozenset(parts), frozenset(singles)
    first, later = (
        {"role": "system", "content": word if "system" in texts else [part]}
        for word, part in ((_ONE, one), (_TWO, two))
    )
    in_places = ([first, later, _USER], [first, _USER, _ANSWER, later, _USER])
    is_anywhere = all(shows(place, _ONE, _TWO) for place in in_places)
    return "anywhere" if is_anywhere else "first", frozenset(parts), frozenset(singles)
