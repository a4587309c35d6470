# SPDX-License-Identifier: Apache-2.0
"""Answers that must call, and calls of strict tools, of a real model: they fit their schemas."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from openai import BadRequestError, OpenAI

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "unit": {"enum": ["c", "f"]},
        "days": {"$ref": "#/$defs/days"},
    },
    "required": ["city", "unit", "days"],
    "additionalProperties": False,
    "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
}
ONE = {
    "type": "object",
    "properties": {"expression": {"enum": ["1 + 1"]}},
    "required": ["expression"],
    "additionalProperties": False,
}
SCHEMAS = {"weather": WEATHER, "calc": ONE}
QUESTION = [{"role": "user", "content": "What is 12 + 30?"}]


def tools(*, strict: bool = False) -> list[dict[str, Any]]:
    return [
        {"type": "function", "function": {"name": name, "parameters": schema, "strict": strict}}
        for name, schema in SCHEMAS.items()
    ]


@pytest.fixture(scope="module")
def client(plain_url: str) -> OpenAI:
    return OpenAI(base_url=f"{plain_url}/v1", api_key="-", max_retries=0)


def ask(client: OpenAI, *, stream: bool = False, **body: Any) -> Any:
    """The choice of an answer; that of a stream is put together by the official client."""
    body = {"model": client.models.list().data[0].id, "messages": QUESTION, **body}
    if not stream:
        return client.chat.completions.create(**body).choices[0]
    with client.chat.completions.stream(**body) as events:
        return events.get_final_completion().choices[0]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("temperature", [0, 1, 2])
@pytest.mark.parametrize("named", [None, "weather", "calc"])
def test_answers_that_must_call(
    client: OpenAI, named: str | None, temperature: float, stream: bool
) -> None:
    choice: Any = "required"
    if named is not None:
        choice = {"type": "function", "function": {"name": named}}
    answer = ask(
        client,
        stream=stream,
        tools=tools(strict=stream),
        tool_choice=choice,
        parallel_tool_calls=False,
        temperature=temperature,
        seed=5,
        max_tokens=200,
    )
    [call] = answer.message.tool_calls
    assert named in (None, call.function.name)
    assert answer.finish_reason == ("tool_calls" if named is None else "stop")
    jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


def test_only_allowed_tools_are_called(client: OpenAI) -> None:
    weather = {"type": "function", "function": {"name": "weather"}}
    allowed = {"mode": "required", "tools": [weather]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    answer = ask(client, tools=tools(), tool_choice=choice, temperature=0, max_tokens=200)
    assert {call.function.name for call in answer.message.tool_calls} == {"weather"}


def test_a_strict_tool_is_held_to_its_schema_whenever_it_is_called(client: OpenAI) -> None:
    calc = [tool for tool in tools(strict=True) if tool["function"]["name"] == "calc"]
    answer = ask(client, tools=calc, temperature=0, max_tokens=200)
    [call] = answer.message.tool_calls
    assert json.loads(call.function.arguments) == {"expression": "1 + 1"}
    assert answer.finish_reason == "tool_calls"


def test_a_schema_that_cannot_be_held_is_refused(client: OpenAI) -> None:
    function = {"name": "f", "strict": True, "parameters": {"unevaluatedProperties": False}}
    with pytest.raises(BadRequestError, match="unevaluatedProperties"):
        ask(client, tools=[{"type": "function", "function": function}])


@pytest.mark.parametrize("budget", [0, 3, 1000])
def test_reasoning_ends_with_its_budget(client: OpenAI, budget: int) -> None:
    answer = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=QUESTION,
        temperature=0,
        max_tokens=300,
        reasoning_effort="high",
        extra_body={"thinking_token_budget": budget},
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    count = answer.usage.completion_tokens_details.reasoning_tokens
    assert count is not None
    # The two tags are counted too, where there is reasoning between them.
    assert count <= budget + 2
    assert answer.choices[0].message.content
    assert bool(answer.choices[0].message.reasoning_content) == bool(budget)  # type: ignore[attr-defined]
