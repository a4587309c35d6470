# SPDX-License-Identifier: Apache-2.0
"""`/v1/responses`, checked with the types of OpenAI's client."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from tables import each_row
from template_texts import CALL, PARTS, QWEN, prompt_of, text

WHOLE_AND_STREAM = pytest.mark.parametrize("stream", [False, True])
TOOLS = [{"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}]
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def checked(response: dict[str, Any]) -> dict[str, Any]:
    Response.model_validate_json(json.dumps(response), strict=True)
    return response


def events_of(answer: Any) -> list[dict[str, Any]]:
    """The events of a stream, each checked for its type and number."""
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    *blocks, rest = answer.body.decode().split("\n\n")
    assert rest == ""
    events = []
    for number, block in enumerate(blocks):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        EVENT.validate_json(data.removeprefix("data: "), strict=True)
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        events.append(event)
    return events


async def respond(api: Any, **body: Any) -> dict[str, Any]:
    """The response to a body; that of a stream is the one of the last event."""
    answer = await api.post("/v1/responses", {"input": "hi", **body})
    assert answer.status == 200, answer.body
    return checked(events_of(answer)[-1]["response"] if body.get("stream") else answer.json())


def texts(response: dict[str, Any]) -> list[Any]:
    """What the items of a response say, by type."""
    said: list[Any] = []
    for item in response["output"]:
        match item["type"]:
            case "function_call":
                said.append((item["name"], json.loads(item["arguments"])))
            case "reasoning":
                said.append("".join(part["text"] for part in item["content"] or item["summary"]))
            case _:
                said.append([part["text"] for part in item["content"]])
    return said


@WHOLE_AND_STREAM
async def test_an_answer(serve_api, stream: bool) -> None:
    api = await serve_api("Hello!", text=QWEN)
    response = await respond(api, stream=stream, model="tiny", metadata={"a": "b"}, user="u")
    assert (response["status"], texts(response)) == ("completed", [["Hello!"]])
    assert response["id"].startswith("resp_")
    assert response["output"][0]["id"].startswith("msg_")
    assert (response["metadata"], response["user"], response["model"]) == ({"a": "b"}, "u", "tiny")
    assert response["usage"]["input_tokens"] == len("[user]hi[assistant]")
    assert response["usage"]["output_tokens"] == 7
    assert prompt_of(api) == "[user]hi[assistant]"


async def test_the_events_of_a_message(serve_api) -> None:
    api = await serve_api("Hi", text=QWEN)
    events = events_of(await api.post("/v1/responses", {"input": "hi", "stream": True}))
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert events[0]["response"]["status"] == "in_progress"


@WHOLE_AND_STREAM
async def test_reasoning_and_calls(serve_api, stream: bool) -> None:
    answer = f"<think>\nwhy\n</think>\n\nSo.\n{CALL}\n{CALL}"
    api = await serve_api(answer, text=QWEN, max_model_len=1000)
    response = await respond(api, tools=TOOLS, stream=stream)
    call = ("add", {"a": 1, "b": 2})
    assert texts(response) == ["why", ["So."], call, call]
    assert len({item["call_id"] for item in response["output"][2:]}) == 2
    reasoning = response["usage"]["output_tokens_details"]["reasoning_tokens"]
    assert 3 <= reasoning < response["usage"]["output_tokens"]
    assert response["tools"] == [{"description": None, **TOOLS[0]}]


@WHOLE_AND_STREAM
async def test_reasoning_as_a_summary(serve_api, stream: bool) -> None:
    api = await serve_api("<think>why</think>so", text=QWEN)
    response = await respond(api, reasoning={"summary": "auto"}, stream=stream)
    [reasoning, message] = response["output"]
    assert reasoning["summary"] == [{"type": "summary_text", "text": "why"}]
    assert "content" not in reasoning
    assert message["content"][0]["text"] == "so"


@WHOLE_AND_STREAM
async def test_without_reasoning(serve_api, stream: bool) -> None:
    api = await serve_api("<think>why</think>so", text=QWEN)
    assert texts(await respond(api, include_reasoning=False, stream=stream)) == [["so"]]


@WHOLE_AND_STREAM
async def test_a_cut_answer(serve_api, stream: bool) -> None:
    api = await serve_api("Hello!", text=QWEN)
    response = await respond(api, max_output_tokens=2, stream=stream)
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == "incomplete"
    assert texts(response) == [["He"]]


@WHOLE_AND_STREAM
async def test_a_cut_call_is_not_to_be_made(serve_api, stream: bool) -> None:
    api = await serve_api(CALL, text=QWEN, max_model_len=1000)
    length = CALL.index("1") + 1
    response = await respond(api, tools=TOOLS, max_output_tokens=length, stream=stream)
    assert (response["status"], texts(response)) == ("incomplete", [[""]])


@WHOLE_AND_STREAM
async def test_an_answer_without_text(serve_api, stream: bool) -> None:
    api = await serve_api("", text=QWEN)
    assert texts(await respond(api, stream=stream)) == [[""]]


async def test_more_tokens_than_the_context_holds(serve_api) -> None:
    api = await serve_api("x" * 500, text=QWEN)
    response = await respond(api, max_output_tokens=10**6)
    assert response["usage"]["total_tokens"] == api.endpoint.limits.max_model_len
    assert response["max_output_tokens"] == 10**6


@WHOLE_AND_STREAM
@pytest.mark.parametrize(
    "body", [{"top_logprobs": 2}, {"include": ["message.output_text.logprobs"], "top_logprobs": 2}]
)
async def test_logprobs(serve_api, stream: bool, body: dict[str, Any]) -> None:
    api = await serve_api("<think>why</think>\n\né!", text=QWEN)
    response = await respond(api, stream=stream, **body)
    entries = response["output"][1]["content"][0]["logprobs"]
    assert bytes(byte for entry in entries for byte in entry["bytes"]) == "é!".encode()
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)


async def test_what_the_model_saw(serve_api) -> None:
    api = await serve_api("Hello!", text=QWEN)
    response = await respond(api, enable_response_messages=True)
    [prompt], [output] = response["input_messages"], response["output_messages"]
    assert prompt["message"] == "[user]hi[assistant]"
    assert prompt["tokens"] == list(prompt["message"].encode())
    assert output["tokens"][:6] == list(b"Hello!")
    assert output["message"].startswith("Hello!")


CONVERSATION = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": [{"type": "input_text", "text": "1+2"}]},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [
        {"type": "reasoning_text", "text": "R"}
    ]},
    {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "3"}]},
    {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": [
        {"type": "output_text", "text": "It is 3.", "annotations": []}
    ]},
    {"role": "user", "content": "Sure?"},
]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "prompt"),
    [
        (
            {"input": CONVERSATION},
            '[system]S[user]1+2[assistant]{"name": "add", "arguments": {}}'
            "[tool]3[assistant]It is 3.[user]Sure?[assistant]",
        ),
        ({"instructions": "I", "input": "hi"}, "[system]I[user]hi[assistant]"),
        (
            {"instructions": "I", "input": CONVERSATION[:2]},
            "[system]I[system]S[user]1+2[assistant]",
        ),
        (
            {"input": [{"role": "assistant", "content": "It", "status": "incomplete"}]},
            "[assistant]It",
        ),
        (
            {"chat_template_kwargs": {"enable_thinking": False}},
            "[user]hi[assistant]<think></think>",
        ),
        ({"tools": TOOLS, "tool_choice": "none"}, "[user]hi[assistant]"),
    ],
)
async def test_prompts(serve_api, body: dict[str, Any], prompt: str) -> None:
    api = await serve_api("ok", text=QWEN)
    await respond(api, **body)
    assert prompt_of(api) == prompt


async def test_several_texts_of_one_message_reach_the_template_as_parts(serve_api) -> None:
    api = await serve_api("ok", text=PARTS)
    one, two = ({"type": "input_text", "text": it} for it in ("One.", "Two."))
    said = [{**one, "type": "output_text"}, {**two, "type": "output_text"}]
    call = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": [one, two]}
    items = [
        {"role": "user", "content": [one, two]},
        {"role": "assistant", "content": said},
        {"role": "user", "content": [one]},
        *(call, output),
    ]
    await respond(api, input=items)
    texts = "[user]One.Two.[assistant]One.Two.[user]One.[assistant]add{}[tool]One.Two."
    assert prompt_of(api) == f"{texts}[assistant]"


async def test_reasoning_of_an_earlier_turn_reaches_the_template(serve_api) -> None:
    source = (
        "{% for m in messages %}[{{ m.role }}]{{ m.reasoning_content }}"
        "{{ m.tool_calls | tojson if m.tool_calls }}{{ m.content }}{% endfor %}</think>"
    )
    api = await serve_api("ok", text=text(source))
    await respond(api, input=CONVERSATION)
    assert "[assistant]R[{" in prompt_of(api)


@each_row(
    ("body", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{}]}, "input[0].type"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [5]}]}, "input[0].content[0]"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
        ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input[0].encrypted_content"),
        ({"input": "x" * 400}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"n": 2}, "n"),
        ({"temperature": -1}, "temperature"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"tools": [{"type": "namespace", "name": "n"}]}, "tools[0].tools"),
        (
            {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "custom"}, {"type": "function"}]}]},
            "tools[0].tools[1].name",
        ),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "namespace": 5}}, "tool_choice.namespace"),
        ({"input": [{"type": "function_call", "namespace": [], "name": "f"}]}, "input[0].namespace"),
        ({"tools": [{"type": "function", "name": "?"}]}, "tools[0].name"),
        ({"tools": TOOLS, "tool_choice": {"type": "mcp"}}, "tool_choice.type"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "?"}}, "tool_choice.name"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
            "tool_choice.tools",
        ),
        ({"reasoning": {"effort": "giant"}}, "reasoning.effort"),
        ({"include": ["x"]}, "include[0]"),
        ({"conversation": "c", "previous_response_id": "r"}, "previous_response_id"),
        ({"conversation": 5}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"background": True, "store": False}, "background"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
        ),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"what": 1}, "what"),
    ],
)  # fmt: skip
async def test_bad_bodies_name_the_field(serve_api, body: dict[str, Any], param: str) -> None:
    api = await serve_api(text=QWEN)
    answer = await api.post("/v1/responses", {"input": "hi", **body})
    assert (answer.status, answer.error()["param"]) == (400, param)
    assert param in answer.error()["message"] or param == "previous_response_id"
    assert api.endpoint.requests == []


LONG = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "a" * 100},
    {"role": "assistant", "content": "b" * 100},
    {"role": "user", "content": "c" * 50},
    {"role": "assistant", "content": "d"},
    {"role": "user", "content": "e"},
]


@pytest.mark.parametrize(
    ("room", "prompt"),
    [
        (None, f"[system]S[user]{'c' * 50}[assistant]d[user]e[assistant]"),
        (100, f"[system]S[user]{'c' * 50}[assistant]d[user]e[assistant]"),
        (200, "[system]S[user]e[assistant]"),
        (1000, "[system]S[user]e[assistant]"),
    ],
)
async def test_truncation(serve_api, room: int | None, prompt: str) -> None:
    api = await serve_api("ok", text=QWEN)
    response = await respond(api, input=LONG, truncation="auto", max_output_tokens=room)
    assert response["truncation"] == "auto"
    assert prompt_of(api) == prompt
    answer = await api.post("/v1/responses", {"input": LONG})
    assert (answer.status, answer.error()["code"]) == (400, "context_length_exceeded")
    body = {"input": [{"role": "user", "content": "x" * 300}], "truncation": "auto"}
    assert (await api.post("/v1/responses", body)).status == 400


async def test_input_tokens(serve_api) -> None:
    api = await serve_api(text=QWEN)
    answer = await api.post("/v1/responses/input_tokens", {"input": "hi", "tools": TOOLS})
    count = answer.json()["input_tokens"]
    assert answer.json()["object"] == "response.input_tokens"
    await respond(api, tools=TOOLS)
    assert len(api.endpoint.requests[0].prompt_token_ids) == count
    long = await api.post("/v1/responses/input_tokens", {"input": "x" * 300})
    assert long.json()["input_tokens"] == len("[user][assistant]") + 300


@WHOLE_AND_STREAM
async def test_a_broken_engine(serve_api, stream: bool) -> None:
    api = await serve_api("Hello!", text=QWEN)
    api.endpoint.breaks_after = 2
    answer = await api.post("/v1/responses", {"input": "hi", "stream": stream})
    if not stream:
        assert answer.status == 500
        return
    last = events_of(answer)[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"]["code"] == "server_error"
    assert texts(last["response"]) == [["He"]]


async def test_fields_that_strict_clients_read(serve_api) -> None:
    api = await serve_api("ok", text=QWEN)
    asked = {"presence_penalty": 0.5, "safety_identifier": "u", "prompt_cache_retention": "24h"}
    response = await respond(api, **asked)
    assert {name: response[name] for name in asked} == asked
    assert (response["frequency_penalty"], response["prompt"]) == (0, None)
