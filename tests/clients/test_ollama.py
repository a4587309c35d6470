# SPDX-License-Identifier: Apache-2.0
"""The official client of Ollama."""

from __future__ import annotations

import ollama
import pytest
from conversations import ADD, ANSWER, QUESTION

from conftest import Server

MESSAGES = [{"role": "user", "content": QUESTION}]


@pytest.fixture
def client(server: Server) -> ollama.Client:
    return ollama.Client(host=server.url)


def test_chat(client: ollama.Client, server: Server) -> None:
    answer = client.chat(model=server.model, messages=MESSAGES, options={"temperature": 0})
    assert ANSWER in answer.message.content
    assert answer.done


def test_chat_in_a_stream(client: ollama.Client, server: Server) -> None:
    parts = list(client.chat(model=server.model, messages=MESSAGES, stream=True))
    assert ANSWER in "".join(part.message.content or "" for part in parts)
    assert parts[-1].eval_count > 0


def test_generate(client: ollama.Client, server: Server) -> None:
    assert client.generate(model=server.model, prompt=QUESTION).response


def test_tools(client: ollama.Client, server: Server) -> None:
    answer = client.chat(model=server.model, messages=MESSAGES, tools=[ADD])
    for call in answer.message.tool_calls or ():
        assert call.function.name == "calculator"
        assert isinstance(call.function.arguments, dict | None.__class__)


def test_models(client: ollama.Client, server: Server) -> None:
    assert server.model in [model.model.removesuffix(":latest") for model in client.list().models]
    assert client.show(server.model).template
