# SPDX-License-Identifier: Apache-2.0
"""A real conversation through the official client."""

from __future__ import annotations

import math

import openai
import pytest

from pagoda.cli.server_process import ServerProcess

QUESTION = {"role": "user", "content": "Who was the first person to walk on the Moon?"}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none")


def chat(client: openai.OpenAI, **body):
    return client.chat.completions.create(
        **{"model": "smollm2", "messages": [QUESTION], "temperature": 0, "max_tokens": 64} | body
    )


def test_a_conversation(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["smollm2"]
    question = {"role": "user", "content": "What is the capital of Japan?"}
    first = chat(client, messages=[question]).choices[0]
    assert "Tokyo" in first.message.content
    assert "<|" not in first.message.content
    assert first.finish_reason == "stop"
    messages = [
        {"role": "user", "content": "What is the capital of Spain?"},
        {"role": "assistant", "content": "The capital of Spain is Madrid."},
        {"role": "user", "content": "And of Portugal?"},
    ]
    assert "Lisbon" in chat(client, messages=messages).choices[0].message.content


def test_a_stream_is_the_whole_answer(client: openai.OpenAI) -> None:
    whole = chat(client)
    events = list(chat(client, stream=True, stream_options={"include_usage": True}))
    deltas = [event.choices[0].delta.content or "" for event in events if event.choices]
    assert "".join(deltas) == whole.choices[0].message.content
    assert "Neil Armstrong" in whole.choices[0].message.content
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert getattr(events[-1].usage, name) == getattr(whole.usage, name)


def test_a_stop_string_in_real_text(client: openai.OpenAI) -> None:
    whole = chat(client).choices[0].message.content
    for stop in ("Neil Arm", "rong, wh", " on July", "1969,"):
        for stream in (False, True):
            answer = chat(client, stop=[stop, "nowhere"], stream=stream)
            text = (
                "".join(e.choices[0].delta.content or "" for e in answer if e.choices)
                if stream
                else answer.choices[0].message.content
            )
            assert text == whole[: whole.index(stop)]


def test_log_probabilities(client: openai.OpenAI) -> None:
    choice = chat(client, logprobs=True, top_logprobs=5).choices[0]
    tokens = choice.logprobs.content
    end = tokens[-1].token if tokens[-1].token.startswith("<|") else ""
    assert "".join(token.token for token in tokens) == choice.message.content + end
    for token in tokens:
        assert token.top_logprobs[0].token == token.token
        assert token.logprob == token.top_logprobs[0].logprob <= 0
        assert sum(math.exp(it.logprob) for it in token.top_logprobs) <= 1 + 1e-6
    assert tokens[0].logprob > math.log(0.2)


def test_several_answers_and_seeds(client: openai.OpenAI) -> None:
    body = {"temperature": 1.0, "top_p": 0.95, "n": 3, "seed": 11, "max_tokens": 24}
    once, again, other = (chat(client, **body | {"seed": seed}) for seed in (11, 11, 12))
    texts = [[choice.message.content for choice in it.choices] for it in (once, again, other)]
    assert [choice.index for choice in once.choices] == [0, 1, 2]
    assert texts[0] == texts[1] != texts[2]
    assert len(set(texts[0])) == 3


def test_tools_that_the_chat_template_does_not_know(client: openai.OpenAI) -> None:
    question = {"role": "user", "content": "What is the weather in Oslo?"}
    function = {"type": "function", "function": {"name": TOOL["function"]["name"]}}
    for choice in ("required", function):
        [message] = [
            it.message
            for it in chat(client, messages=[question], tools=[TOOL], tool_choice=choice).choices
        ]
        assert message.tool_calls[0].function.name == TOOL["function"]["name"]
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": "18 degrees"}
            for call in message.tool_calls
        ]
        assert (
            chat(client, messages=[question, message, *results], tools=[TOOL])
            .choices[0]
            .message.content
        )


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"messages": [{"role": "user", "content": "word " * 3000}]}, "2048"),
        ({"top_logprobs": 50, "logprobs": True}, "top_logprobs"),
    ],
)
def test_refusals(client: openai.OpenAI, body: dict[str, object], named: str) -> None:
    with pytest.raises(openai.BadRequestError, match=named):
        chat(client, **body)
