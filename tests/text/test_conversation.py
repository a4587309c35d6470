# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from operations import assert_linear

from pagoda.concurrency.async_utils import LONG_TEXT_CHARS
from pagoda.errors import InvalidRequestError
from pagoda.text.templates.conversation import Message, check_tools, template_messages, text_size


def turns(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    return template_messages(msgspec.convert(list(messages), list[Message]))


def call(arguments: str | dict[str, Any]) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}


def tool(**parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


@pytest.mark.parametrize(
    ("message", "turn"),
    [
        (
            {"role": "user", "content": [{"type": "text", "text": part} for part in "ab"]},
            {"role": "user", "content": [{"type": "text", "text": part} for part in "ab"]},
        ),
        (
            {"role": "assistant", "content": None, "tool_calls": [call('{"x": 1}')]},
            {"role": "assistant", "content": "", "tool_calls": [call('{"x": 1}')]},
        ),
        *(  # calls that a model broke off, or made without an object
            (
                {"role": "assistant", "content": None, "tool_calls": [call(arguments)]},
                {"role": "assistant", "content": "", "tool_calls": [call(arguments)]},
            )
            for arguments in ("{", '{"a":' * 100_000, "[1]", "null", '"text"')
        ),
        (  # an answer as a client got it
            {"role": "assistant", "content": "4", "annotations": []}
            | dict.fromkeys(("refusal", "audio", "function_call", "tool_calls")),
            {"role": "assistant", "content": "4"},
        ),
    ],
)
def test_what_templates_see(message: dict[str, Any], turn: dict[str, Any]) -> None:
    assert turns(message) == [turn]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "tool"}, "messages[0].content"),
        ({"role": "user", "content": "x", "tool_calls": [call("{}")]}, "messages[0].tool_calls"),
        *(
            ({"role": "user", "content": "x", "name": name}, "messages[0].name")
            for name in ("ada<|im_end|>", "ada\nuser", "[INST]")
        ),
    ],
)
def test_messages_that_lack_what_their_role_needs(message: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        turns(message)
    assert caught.value.param == param


def test_tools_as_they_should_be() -> None:
    nested = {"type": "array", "items": {"type": ["string", "null"], "pattern": "^a+$"}}
    other = {"type": "function", "function": {"name": "g"}}
    check_tools([tool(type="object", properties={"x": nested}, required=["x"]), other])


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"x": schema}}
    return schema


@pytest.mark.parametrize(
    ("bad", "param"),
    [
        ({}, "tools[0]"),
        ({"type": "other", "function": {"name": "f"}}, "tools[0].type"),
        ({"type": "function", "function": {"name": "a b"}}, "tools[0].function.name"),
        ({"type": "function", "function": {"name": "x" * 65}}, "tools[0].function.name"),
        (tool(type="text"), "tools[0].function.parameters.type"),
        (tool(type={"a": 1}), "tools[0].function.parameters.type"),
        (tool(pattern="x" * 1025), "tools[0].function.parameters.pattern"),
        (tool(pattern=5), "tools[0].function.parameters.pattern"),
        (tool(properties=[1]), "tools[0].function.parameters.properties"),
        (tool(properties={"a": 1}), "tools[0].function.parameters.properties.a"),
    ],
)
def test_malformed_tools(bad: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_tools([bad])
    assert caught.value.param == param


def test_patterns_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some patterns take seconds to compile, and others are valid in JSON Schema but not in Python."""
    monkeypatch.setattr(re, "compile", lambda *_: pytest.fail("a pattern was compiled"))
    for pattern in ("(?i)[\u0100-\U0010ffff]" * 50, r"\p{L}", "("):
        check_tools([tool(pattern=pattern)])


def test_two_tools_have_two_names() -> None:
    with pytest.raises(InvalidRequestError, match="earlier tool") as caught:
        check_tools([tool(), tool(type="object")])
    assert caught.value.param == "tools[1].function.name"


def test_checking_a_schema_takes_linear_work() -> None:
    def check(size: int) -> Callable[[], object]:
        tools = [tool(type="object", properties={f"p{i}": {"type": "string"} for i in range(size)})]
        return lambda: check_tools(tools)

    assert_linear(check, [200, 400, 800])


def test_long_names_in_a_schema_are_not_copied_for_each_child() -> None:
    """The text of a path is put together for an error only, and is short there."""
    name = "n" * 100_000
    children = {str(i): {"type": "string"} for i in range(2000)}
    tracemalloc.start()
    try:
        check_tools([tool(properties={name: {"properties": children}})])
        assert tracemalloc.get_traced_memory()[1] < 20 * len(name)
    finally:
        tracemalloc.stop()
    with pytest.raises(InvalidRequestError) as caught:
        check_tools([tool(properties={name: {"type": 5}})])
    assert len(str(caught.value)) < 500


def test_tools_are_bounded() -> None:
    with pytest.raises(InvalidRequestError, match="at most 128"):
        check_tools([tool()] * 129)
    with pytest.raises(InvalidRequestError, match="nested deeper"):
        check_tools([tool(**deep(40))])


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "x"}] * 100,
        [{"role": "assistant", "tool_calls": [call("")] * 100}],
        [{"role": "user", "content": [{"type": "text", "text": ""}] * 600}],
        [{"role": "user", "content": "x", "name": "n" * 20_000}],
        [{"role": "assistant", "refusal": "x" * 20_000}],
        [{"role": "assistant", "function_call": {"name": "f", "arguments": "x" * 20_000}}],
        [{"role": "assistant", "tool_calls": [{**call(""), "id": "x" * 20_000}]}],
        [{"role": "assistant", "reasoning_content": "x", "reasoning": "x" * 20_000}],
    ],
    ids=[
        *("messages", "calls", "parts", "name", "refusal", "function call", "id of a call"),
        "second reasoning",
    ],
)
def test_what_takes_a_template_long_counts_as_a_long_text(messages: list[dict[str, Any]]) -> None:
    """It is rendered in a thread: a template may look from each message or call at all others."""
    assert text_size(msgspec.convert(messages, list[Message]), None) > LONG_TEXT_CHARS
    few = msgspec.convert([{"role": "user", "content": "x"}] * 50, list[Message])
    assert text_size(few, None) < LONG_TEXT_CHARS
