# SPDX-License-Identifier: Apache-2.0
"""The official client of Anthropic."""

from __future__ import annotations

import anthropic
import pytest
from conversations import ADD, ANSWER, QUESTION

from conftest import Server

MESSAGES = [{"role": "user", "content": QUESTION}]
TOOL = {
    "name": "calculator",
    "description": "Calculates.",
    "input_schema": ADD["function"]["parameters"],
}


@pytest.fixture
def client(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(
        base_url=server.url, api_key="none", max_retries=0, _strict_response_validation=True
    )


def test_a_message(client: anthropic.Anthropic, server: Server) -> None:
    answer = client.messages.create(
        model=server.model, max_tokens=100, messages=MESSAGES, system="Be brief."
    )
    assert answer.stop_reason == "end_turn"
    assert answer.usage.output_tokens > 0
    assert any(block.type == "text" for block in answer.content)


def test_a_stream(client: anthropic.Anthropic, server: Server) -> None:
    with client.messages.stream(model=server.model, max_tokens=100, messages=MESSAGES) as stream:
        text = "".join(stream.text_stream)
        assert stream.get_final_text() == text
    assert ANSWER in text


def test_a_tool_loop(client: anthropic.Anthropic, server: Server) -> None:
    answer = client.messages.create(
        model=server.model,
        max_tokens=300,
        messages=MESSAGES,
        tools=[TOOL],
        tool_choice={"type": "tool", "name": "calculator"},
    )
    [use] = [block for block in answer.content if block.type == "tool_use"]
    assert (use.name, list(use.input)) == ("calculator", ["expression"])
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "42"}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [result]},
    ]
    final = client.messages.create(
        model=server.model, max_tokens=100, messages=messages, tools=[TOOL]
    )
    assert final.content


def test_tokens_are_counted(client: anthropic.Anthropic, server: Server) -> None:
    count = client.messages.count_tokens(model=server.model, messages=MESSAGES)
    answer = client.messages.create(model=server.model, max_tokens=1, messages=MESSAGES)
    assert count.input_tokens == answer.usage.input_tokens
