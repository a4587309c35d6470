# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import pytest
from operations import assert_linear

from pagoda.text.templates.generic_tools import show_tools, write_calls, write_results

USER = {"role": "user", "content": "Is it warm?"}
TOOL = {"type": "function", "function": {"name": "get_weather"}}


def result(text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text, "tool_call_id": "c"}


def call(function_name: str, arguments: Any, content: Any = "", **fields: Any) -> dict[str, Any]:
    function = {"name": function_name, "arguments": arguments}
    calls = [{"type": "function", "function": function}]
    return {"role": "assistant", "content": content, "tool_calls": calls, **fields}


@pytest.mark.parametrize(
    ("turns", "contents"),
    [
        ([USER, result("18"), result("30")], ["Is it warm?", "R18R\nR30R"]),
        ([result("18"), USER, USER], ["R18R\nIs it warm?", "Is it warm?"]),
        ([result("18"), {"role": "assistant", "content": "Yes."}], ["R18R", "Yes."]),
        ([result(""), {"role": "user", "content": [{"type": "text", "text": "a"}]}], ["RR\na"]),
    ],
)
def test_results_are_messages_of_the_user(turns: list[Any], contents: list[str]) -> None:
    written = write_results(turns)
    texts = [turn["content"] for turn in written]
    marks = {"<tool_response>\n": "R", "\n</tool_response>": "R"}
    for mark, short in marks.items():
        texts = [text.replace(mark, short) for text in texts]
    assert texts == contents
    assert "tool" not in {turn["role"] for turn in written}


def test_calls_are_in_contents() -> None:
    turn = call("f", '{"a": 1', "See.", reasoning_content="why", name="g")
    text = '{"name": "f", "arguments": {"a": 1}'
    assert write_calls([turn], None) == [
        {
            "role": "assistant",
            "content": f"See.\n<tool_call>\n{text}\n</tool_call>",
            "reasoning_content": "why",
        }
    ]
    assert write_calls([call("f", {})], "granite")[0]["content"] == (
        '<|tool_call|>[{"name": "f", "arguments": {}}]'
    )


@pytest.mark.parametrize(
    ("turns", "has_system", "begin", "end"),
    [
        ([USER], True, ("system", "# Tools"), ("user", "Is it warm?")),
        ([USER], False, ("user", "# Tools"), ("user", "\n\nIs it warm?")),
        ([{"role": "system", "content": "S"}, USER], True, ("system", "S\n\n# T"), ("user", "Is")),
        ([{"role": "system", "content": "S"}, USER], False, ("user", "S\n\n# T"), ("user", "m?")),
        ([{"role": "assistant", "content": "A"}], False, ("user", "# Tools"), ("assistant", "A")),
    ],
)
def test_tools_are_shown_before_the_conversation(
    turns: list[Any], has_system: bool, begin: tuple[str, str], end: tuple[str, str]
) -> None:
    shown = show_tools(turns, [TOOL], has_system=has_system)
    assert (shown[0]["role"], shown[-1]["role"]) == (begin[0], end[0])
    assert shown[0]["content"].startswith(begin[1])
    assert '{"type": "function", "function": {"name": "get_weather"}}' in shown[0]["content"]
    assert end[1] in shown[-1]["content"]


def test_many_results_take_linear_work() -> None:
    assert_linear(lambda size: lambda: write_results([result("x" * 100)] * size), [200, 400, 800])
