# SPDX-License-Identifier: Apache-2.0
"""The official client of OpenAI for Python, with strict validation of what comes back."""

from __future__ import annotations

import json
import time

import jsonschema
import openai
import pytest
from conversations import ADD, ANSWER, CITY, QUESTION
from openai._models import validate_type
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from conftest import Server

MESSAGES = [{"role": "user", "content": QUESTION}]


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=server.v1, api_key="none", max_retries=0, _strict_response_validation=True
    )


def test_chat(client: openai.OpenAI, server: Server) -> None:
    answer = client.chat.completions.create(model=server.model, messages=MESSAGES, temperature=0)
    validate_type(type_=ChatCompletion, value=answer.to_dict())
    assert ANSWER in answer.choices[0].message.content
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_chat_in_a_stream(client: openai.OpenAI, server: Server) -> None:
    stream = client.chat.completions.create(
        model=server.model,
        messages=MESSAGES,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    events = list(stream)
    for event in events:
        validate_type(type_=ChatCompletionChunk, value=event.to_dict())
    text = "".join(c.delta.content or "" for event in events for c in event.choices)
    assert ANSWER in text
    assert events[-1].usage.completion_tokens > 0


async def test_the_asynchronous_client(server: Server) -> None:
    async with openai.AsyncOpenAI(base_url=server.v1, api_key="none") as client:
        answer = await client.chat.completions.create(model=server.model, messages=MESSAGES)
        assert answer.choices[0].message.content


def test_completions(client: openai.OpenAI, server: Server) -> None:
    answer = client.completions.create(
        model=server.model, prompt=["a", "b"], max_tokens=4, n=2, logprobs=2
    )
    validate_type(type_=Completion, value=answer.to_dict())
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert len(answer.choices[0].logprobs.top_logprobs[0]) == 2


def test_log_probabilities(client: openai.OpenAI, server: Server) -> None:
    answer = client.chat.completions.create(
        model=server.model, messages=MESSAGES, logprobs=True, top_logprobs=20, max_tokens=3
    )
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 20


def test_models(client: openai.OpenAI, server: Server) -> None:
    assert [model.id for model in client.models.list()] == [server.model]
    assert client.models.retrieve(server.model).owned_by == "pagoda"


def test_errors_have_their_classes(client: openai.OpenAI, server: Server) -> None:
    with pytest.raises(openai.NotFoundError, match="not served here"):
        client.chat.completions.create(model="other", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match="maximum context length") as caught:
        client.completions.create(model=server.model, prompt="x " * 5000)
    assert caught.value.code == "context_length_exceeded"


def test_a_tool_loop_by_the_stream_helper(client: openai.OpenAI, server: Server) -> None:
    """Answers go back as the helper has put them together."""
    messages = list(MESSAGES)
    for _ in range(2):
        with client.chat.completions.stream(
            model=server.model, messages=messages, tools=[ADD], temperature=0, max_tokens=200
        ) as stream:
            for _ in stream:
                pass
            message = stream.get_final_completion().choices[0].message
        messages.append(message.to_dict())
        for call in message.tool_calls or ():
            assert json.loads(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "42"})
        messages.append({"role": "user", "content": "Sure?"})


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema(client: openai.OpenAI, server: Server, stream: bool) -> None:
    schema = {"name": "place", "schema": CITY, "strict": True}
    answer = client.chat.completions.create(
        model=server.model,
        messages=MESSAGES,
        response_format={"type": "json_schema", "json_schema": schema},
        max_tokens=200,
        stream=stream,
    )
    if stream:
        text = "".join(c.delta.content or "" for event in answer for c in event.choices)
    else:
        text = answer.choices[0].message.content
    jsonschema.validate(json.loads(text), CITY)


@pytest.mark.parametrize("choice", ["required", "named"])
def test_a_tool_that_must_be_called(client: openai.OpenAI, server: Server, choice: str) -> None:
    named = {"type": "function", "function": {"name": "calculator"}}
    answer = client.chat.completions.create(
        model=server.model,
        messages=MESSAGES,
        tools=[ADD],
        tool_choice=named if choice == "named" else "required",
        max_tokens=300,
    )
    [call, *_] = answer.choices[0].message.tool_calls
    assert call.function.name == "calculator"
    jsonschema.validate(json.loads(call.function.arguments), ADD["function"]["parameters"])


@pytest.mark.parametrize("stream", [False, True])
def test_responses(client: openai.OpenAI, server: Server, stream: bool) -> None:
    answer = client.responses.create(
        model=server.model, input=QUESTION, temperature=0, stream=stream
    )
    if stream:
        events = list(answer)
        assert events[0].type == "response.created"
        assert [event.sequence_number for event in events] == list(range(len(events)))
        answer = events[-1].response
    assert ANSWER in answer.output_text


def test_responses_go_on(client: openai.OpenAI, server: Server) -> None:
    first = client.responses.create(model=server.model, input=QUESTION)
    second = client.responses.create(
        model=server.model, input="And?", previous_response_id=first.id
    )
    assert second.previous_response_id == first.id
    assert client.responses.retrieve(first.id).output_text == first.output_text


def test_embeddings(client: openai.OpenAI, server: Server) -> None:
    # Left to itself the client asks for base64, which it then finds no list of numbers if it is strict.
    lenient = openai.OpenAI(base_url=server.v1, api_key="none")
    numbers = client.embeddings.create(
        model=server.model, input=["a", "b"], encoding_format="float"
    )
    decoded = lenient.embeddings.create(model=server.model, input=["a", "b"])
    assert [it.embedding for it in decoded.data] == [it.embedding for it in numbers.data]
    assert len(numbers.data) == 2
    assert len(numbers.data[0].embedding) > 0


def test_what_agents_ask_for_besides(client: openai.OpenAI, server: Server) -> None:
    """Hints, tools of servers, and answers that are kept."""
    ask = client.chat.completions.with_raw_response.create
    answer = ask(
        model=server.model,
        messages=MESSAGES,
        service_tier="flex",
        verbosity="low",
        web_search_options={},
        tools=[{"type": "custom", "custom": {"name": "patch"}}],
    )
    named = {"service_tier", "verbosity", "web_search_options", "tools.custom"}
    assert set(answer.headers["x-pagoda-ignored"].split(", ")) == named
    kept = client.chat.completions.create(
        model=server.model, messages=MESSAGES, store=True, metadata={"a": "b"}
    )
    assert kept.id in [one.id for one in client.chat.completions.list(metadata={"a": "b"})]
    assert client.chat.completions.retrieve(kept.id).choices == kept.choices
    assert client.chat.completions.delete(kept.id).deleted


def test_a_batch(client: openai.OpenAI, server: Server) -> None:
    body = {"model": server.model, "messages": MESSAGES, "max_tokens": 20}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    file = client.files.create(file=("a.jsonl", json.dumps(line).encode()), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    deadline = time.monotonic() + 60
    while batch.status != "completed" and time.monotonic() < deadline:
        time.sleep(0.1)
        batch = client.batches.retrieve(batch.id)
    assert ANSWER in client.files.content(batch.output_file_id).text
