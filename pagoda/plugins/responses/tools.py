# SPDX-License-Identifier: Apache-2.0
"""The tools of a response in the form of chat completions.

Functions are served, also those in a namespace, whose names the model sees as one: `files__read` is `read` of
`files`. Tools that another server would run, such as a search of the web, are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pagoda.api.bodies.body import text_in
from pagoda.api.bodies.ignored_fields import Ignored
from pagoda.errors import refuse

Tool = Mapping[str, Any]


class NamedTool(NamedTuple):
    """A function tool, with its place in the body."""

    place: str
    namespace: str
    """Empty for a tool of no namespace."""
    tool: Tool


def joined_name(namespace: str, name: str) -> str:
    """The name that the model sees of a function in a namespace."""
    return name if not namespace else f"{namespace}{'' if namespace.endswith('__') else '__'}{name}"


def named_in(item: Mapping[str, Any], place: str) -> str:
    """The name that the model sees of the function that a call or a choice at `place` names.
    Raises InvalidRequestError: it has no name, or its namespace is no text."""
    namespace = "" if item.get("namespace") is None else text_in(item, "namespace", place)
    return joined_name(namespace, text_in(item, "name", place))


def function_tools(tools: Sequence[Tool], place: str) -> Iterator[NamedTool]:
    """The functions among the tools at `place` of a body, with those of its namespaces.
    Raises InvalidRequestError: a tool is not as it must be; names it."""
    for index, tool in enumerate(tools):
        where = f"{place}[{index}]"
        kind = text_in(tool, "type", where)
        if kind == "function":
            yield NamedTool(where, "", tool)
        elif kind == "namespace":
            inner = tool.get("tools")
            if not isinstance(inner, list) or not all(isinstance(it, dict) for it in inner):
                refuse(f"{where}.tools", "must be a list of tools")
            name = text_in(tool, "name", where)
            for number, function in enumerate(inner):
                if function.get("type") == "function":
                    yield NamedTool(f"{where}.tools[{number}]", name, function)


def names_in(tools: Sequence[Tool]) -> dict[str, tuple[str, str]]:
    """Namespace and name of each function in a namespace, by the name that the model sees."""
    return {
        joined_name(it.namespace, it.tool["name"]): (it.namespace, it.tool["name"])
        for it in function_tools(tools, "tools")
        if it.namespace
    }


def chat_tools(
    tools: Sequence[Tool], ignored: Ignored, names: dict[str, str]
) -> list[dict[str, Any]]:
    """The tools as chat completions spell them. What is left out is noted in `ignored`; `names` gets the places of
    the others. Raises InvalidRequestError: a tool is not as it must be."""
    for tool in tools:
        left_out = [tool] if tool.get("type") != "namespace" else tool.get("tools")
        for one in left_out if isinstance(left_out, list) else ():
            kind = one.get("type") if isinstance(one, dict) else None
            if isinstance(kind, str) and kind != "function":
                ignored.note(f"tools.{kind}")
    found = list(function_tools(tools, "tools"))
    for index, one in enumerate(found):
        names[f"tools[{index}].function"] = one.place
    return [_chat_tool(one) for one in found]


def _chat_tool(one: NamedTool) -> dict[str, Any]:
    tool = one.tool
    if "function" in tool and not one.namespace:  # as chat completions spell it
        return dict(tool)
    given = ("name", "description", "parameters", "strict")
    function = {name: tool[name] for name in given if tool.get(name) is not None}
    if one.namespace:
        function["name"] = joined_name(one.namespace, text_in(tool, "name", one.place))
    return {"type": "function", "function": function}


def chat_tool_choice(choice: str | Mapping[str, Any]) -> str | dict[str, Any]:
    """`tool_choice` as chat completions spell it. Raises InvalidRequestError: it is none that can be served."""
    if isinstance(choice, str):
        return choice
    kind = choice.get("type")
    if kind == "function":
        if "function" in choice:
            return dict(choice)
        return {"type": "function", "function": {"name": named_in(choice, "tool_choice")}}
    if kind != "allowed_tools":
        rule = "must be auto, none, required, function or allowed_tools"
        refuse("tool_choice.type", rule, "not_supported")
    tools = choice.get("tools")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        refuse("tool_choice.tools", "must be a list of tools")
    named = [_chat_tool(one) for one in function_tools(tools, "tool_choice.tools")]
    return {
        "type": "allowed_tools",
        "allowed_tools": {"mode": choice.get("mode"), "tools": named},
    }
