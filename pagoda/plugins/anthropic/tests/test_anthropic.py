# SPDX-License-Identifier: Apache-2.0
"""`/v1/messages`, checked with the types of Anthropic's client."""

from __future__ import annotations

import json
from typing import Any

import pytest
from anthropic.types import Message, MessageTokensCount, ModelInfo, RawMessageStreamEvent
from pydantic import TypeAdapter
from template_texts import CALL, PARTS, QWEN, prompt_of, text

from pagoda.api.auth.keys import ApiKeys

WHOLE_AND_STREAM = pytest.mark.parametrize("stream", [False, True])
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
TOOLS = [
    {"name": "add", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}
]
HI = [{"role": "user", "content": "hi"}]


def events_of(answer: Any) -> list[dict[str, Any]]:
    """The events of a stream but pings, each checked for its type."""
    *blocks, rest = answer.body.decode().split("\n\n")
    assert rest == ""
    events = []
    for block in blocks:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if event["type"] != "ping":
            EVENT.validate_json(data.removeprefix("data: "), strict=True)
            events.append(event)
    return events


def message_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that the events of a stream add up to."""
    start, *events, delta, stop = events
    assert (start["type"], delta["type"], stop["type"]) == (
        "message_start",
        "message_delta",
        "message_stop",
    )
    message: dict[str, Any] = start["message"]
    assert message["usage"]["output_tokens"] == 0
    message |= delta["delta"]
    message["usage"] = delta["usage"]
    content: list[dict[str, Any]] = message["content"]
    partial = ""
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(content)
            content.append(event["content_block"])
            partial = ""
            continue
        assert event["index"] == len(content) - 1
        block = content[-1]
        if event["type"] == "content_block_stop":
            if block["type"] == "tool_use":
                block["input"] = json.loads(partial or "{}")
            continue
        match event["delta"]:
            case {"type": "input_json_delta", "partial_json": piece}:
                partial += piece
            case {"type": "text_delta", "text": piece}:
                block["text"] += piece
            case {"type": "thinking_delta", "thinking": piece}:
                block["thinking"] += piece
            case {"type": "signature_delta", "signature": signature}:
                block["signature"] = signature
    return message


async def create(api: Any, **body: Any) -> dict[str, Any]:
    answer = await api.post("/v1/messages", {"messages": HI, "max_tokens": 150, **body})
    assert answer.status == 200, answer.body
    if body.get("stream"):
        return message_of(events_of(answer))
    Message.model_validate_json(answer.body, strict=True)
    message: dict[str, Any] = answer.json()
    return message


def texts(message: dict[str, Any]) -> list[Any]:
    fields = {"text": "text", "thinking": "thinking", "tool_use": "input"}
    return [block[fields[block["type"]]] for block in message["content"]]


@WHOLE_AND_STREAM
async def test_an_answer(serve_api, stream: bool) -> None:
    api = await serve_api("Hello!", text=QWEN)
    message = await create(api, stream=stream, model="tiny", metadata={"user_id": "u"})
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "tiny")
    assert message["id"].startswith("msg_")
    assert texts(message) == ["Hello!"]
    assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)
    assert message["usage"]["input_tokens"] == len("[user]hi[assistant]")
    assert message["usage"]["output_tokens"] == 7
    assert api.endpoint.requests[0].session == "u"


async def test_the_events_of_a_text(serve_api) -> None:
    api = await serve_api("Hi", text=QWEN)
    body = {"messages": HI, "max_tokens": 9, "stream": True}
    answer = await api.post("/v1/messages?beta=true", body)
    names = [line[7:] for line in answer.body.decode().split("\n") if line.startswith("event: ")]
    assert names == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


@WHOLE_AND_STREAM
async def test_thinking_and_tools(serve_api, stream: bool) -> None:
    answer = f"<think>\nwhy\n</think>\n\nSo.\n{CALL}\n{CALL}"
    api = await serve_api(answer, text=QWEN, max_model_len=1000)
    message = await create(api, tools=TOOLS, max_tokens=300, stream=stream)
    assert texts(message) == ["why", "So.", {"a": 1, "b": 2}, {"a": 1, "b": 2}]
    assert message["stop_reason"] == "tool_use"
    assert message["content"][0]["signature"]
    assert len({block["id"] for block in message["content"][2:]}) == 2
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    assert prompt_of(api).startswith(json.dumps([tool]))


@WHOLE_AND_STREAM
async def test_one_tool_at_a_time(serve_api, stream: bool) -> None:
    api = await serve_api(f"{CALL}\n{CALL}", text=QWEN, max_model_len=1000)
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    message = await create(api, tools=TOOLS, tool_choice=choice, stream=stream)
    assert texts(message) == [{"a": 1, "b": 2}]


@WHOLE_AND_STREAM
@pytest.mark.parametrize(
    ("body", "said", "reason", "sequence"),
    [
        ({"max_tokens": 2}, "He", "max_tokens", None),
        ({"max_tokens": 10**6}, "Hello!", "end_turn", None),
        ({"stop_sequences": ["o", "x"]}, "Hell", "stop_sequence", "o"),
        ({"stop_sequences": ["x"]}, "Hello!", "end_turn", None),
        ({"top_k": 5, "top_p": 0.5, "temperature": 0.1}, "Hello!", "end_turn", None),
    ],
)
async def test_stop_reasons(
    serve_api, stream: bool, body: dict[str, Any], said: str, reason: str, sequence: str | None
) -> None:
    api = await serve_api("Hello!", text=QWEN)
    message = await create(api, stream=stream, **body)
    assert texts(message) == [said]
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)


@WHOLE_AND_STREAM
async def test_a_full_context(serve_api, stream: bool) -> None:
    api = await serve_api("x" * 500, text=QWEN)
    message = await create(api, max_tokens=1000, stream=stream)
    assert message["stop_reason"] == "model_context_window_exceeded"


@WHOLE_AND_STREAM
async def test_no_text_at_all(serve_api, stream: bool) -> None:
    api = await serve_api("", text=QWEN)
    assert texts(await create(api, stream=stream)) == [""]


async def test_a_cut_call_is_not_to_be_made(serve_api) -> None:
    api = await serve_api(f"So.{CALL}", text=QWEN)
    message = await create(api, tools=TOOLS, max_tokens=CALL.index("1") + 4)
    assert (texts(message), message["stop_reason"]) == (["So."], "max_tokens")


async def test_input_that_is_not_json_becomes_text(serve_api) -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": New York}}\n</tool_call>'
    api = await serve_api(call, text=QWEN)
    message = await create(api, tools=TOOLS)
    assert (texts(message), message["stop_reason"]) == (['{"a": "New" ,"York"}'], "end_turn")


async def test_cached_tokens_are_no_input_tokens(serve_api) -> None:
    api = await serve_api("ok", text=QWEN)
    api.endpoint.num_cached_tokens = 16
    usage = (await create(api))["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (3, 16)


@pytest.mark.parametrize(
    ("body", "prompt"),
    [
        ({"system": "S"}, "[system]S[user]hi[assistant]"),
        (
            {"system": [{"type": "text", "text": "S"}, {"type": "text", "text": "T"}]},
            "[system]S\nT[user]hi[assistant]",
        ),
        (
            {"messages": [
                {"role": "user", "content": [{"type": "text", "text": "1+2"}]},
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "R", "signature": ""},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "See."},
                    {"type": "tool_use", "id": "t", "name": "add", "input": {"a": 1}},
                ]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "t", "content": "3"},
                    {"type": "tool_result", "tool_use_id": "t", "is_error": True, "content": [
                        {"type": "text", "text": "no"}
                    ]},
                    {"type": "tool_result", "tool_use_id": "t"},
                    {"type": "text", "text": "And?"},
                ]},
            ]},
             '[user]1+2[assistant]See.{"name": "add", "arguments": {"a": 1}}'
            "[tool]3[tool]Error: no[tool][user]And?[assistant]",
        ),
        ({"messages": [*HI, {"role": "assistant", "content": "It is"}]}, "[user]hi[assistant]It is"),
        ({"messages": [{"role": "system", "content": "S"}, *HI]}, "[system]S[user]hi[assistant]"),
        ({"thinking": {"type": "disabled"}}, "[user]hi[assistant]<think></think>"),
        ({"thinking": {"type": "enabled"}}, "[user]hi[assistant]"),
        ({"thinking": {"type": "adaptive"}}, "[user]hi[assistant]"),
        ({"tools": TOOLS, "tool_choice": {"type": "none"}}, "[user]hi[assistant]"),
    ],
)  # fmt: skip
async def test_prompts(serve_api, body: dict[str, Any], prompt: str) -> None:
    api = await serve_api("ok", text=QWEN)
    await create(api, **body)
    assert prompt_of(api) == prompt


async def test_several_texts_of_one_message_reach_the_template_as_parts(serve_api) -> None:
    api = await serve_api("ok", text=PARTS)
    one, two = ({"type": "text", "text": it} for it in ("One.", "Two."))
    call = {"type": "tool_use", "id": "c", "name": "add", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [one, two], "is_error": True}
    messages = [
        {"role": "user", "content": [one, two]},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result, one, two]},
    ]
    await create(api, system=[one, two], messages=messages)
    texts = "[system]One.Two.[user]One.Two.[assistant]add{}[tool]Error: One.Two.[user]One.Two."
    assert prompt_of(api) == f"{texts}[assistant]"


async def test_thoughts_of_an_earlier_turn_reach_the_template(serve_api) -> None:
    source = "{% for m in messages %}[{{ m.role }}]{{ m.reasoning_content }}{% endfor %}</think>"
    api = await serve_api("ok", text=text(source))
    thought = {"type": "thinking", "thinking": "R", "signature": "x"}
    reply = {"role": "assistant", "content": [thought, {"type": "text", "text": "x"}]}
    await create(api, messages=[*HI, reply, *HI])
    assert "[assistant]R[user]" in prompt_of(api)


async def test_counting_tokens(serve_api) -> None:
    api = await serve_api("ok", text=QWEN)
    answer = await api.post("/v1/messages/count_tokens", {"messages": HI, "system": "S"})
    count = MessageTokensCount.model_validate_json(answer.body, strict=True).input_tokens
    assert count == len("[system]S[user]hi[assistant]")
    long = [{"role": "user", "content": "x" * 300}]
    answer = await api.post("/v1/messages/count_tokens", {"messages": long})
    assert answer.json()["input_tokens"] == 300 + len("[user][assistant]")
    assert api.endpoint.requests == []


async def test_models(serve_api) -> None:
    api = await serve_api("ok", text=QWEN)
    headers = {"anthropic-version": "2023-06-01"}
    listed = (await api.get("/v1/models", headers=headers)).json()
    assert (listed["has_more"], listed["first_id"]) == (False, "tiny")
    answer = await api.get("/v1/models/tiny", headers=headers)
    assert listed["data"] == [answer.json()]
    model = ModelInfo.model_validate_json(answer.body, strict=True)
    assert model.max_input_tokens == api.endpoint.limits.max_model_len


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        (
            {"system": "S", "messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content[0].type",
        ),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"tools": [{"type": "custom"}]}, "tools[0].name"),
        ({"tools": [{"name": "?"}]}, "tools[0].name"),
        (
            {"tools": [{"name": "f", "input_schema": {"type": "wrong"}}]},
            "tools[0].input_schema.type",
        ),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "?"}}, "tool_choice.name"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
        # The tag behind the thoughts is no token of this tokenizer, so it cannot be forced.
        ({"thinking": {"type": "enabled", "budget_tokens": 50}}, "thinking.budget_tokens"),
        ({"container": "c"}, "container"),
        ({"what": 1}, "what"),
    ],
)
async def test_errors_name_the_field(serve_api, body: dict[str, Any], place: str) -> None:
    api = await serve_api(text=QWEN)
    answer = await api.post("/v1/messages", {"messages": HI, "max_tokens": 9, **body})
    error = answer.json()
    assert (answer.status, error["type"]) == (400, "error")
    assert error["error"]["type"] == "invalid_request_error"
    assert error["error"]["message"].startswith(place)
    assert api.endpoint.requests == []


async def test_errors_have_the_names_of_anthropic(serve_api) -> None:
    api = await serve_api("ok", text=QWEN, api_keys=ApiKeys(["k"]))
    body = {"messages": HI, "max_tokens": 9}
    for headers, extra, status, kind in (
        ({"x-api-key": "wrong"}, {}, 401, "authentication_error"),
        ({"x-api-key": "k"}, {"model": "other"}, 404, "not_found_error"),
        ({"x-api-key": "k"}, {"max_tokens": "x"}, 400, "invalid_request_error"),
    ):
        answer = await api.post("/v1/messages", {**body, **extra}, headers=headers)
        assert (answer.status, answer.json()["error"]["type"]) == (status, kind)
    assert (await api.post("/v1/messages", body, headers={"x-api-key": "k"})).status == 200
    assert (await api.post("/v1/messages", b"no", headers={"x-api-key": "k"})).status == 400


async def test_an_engine_that_breaks_in_a_stream(serve_api) -> None:
    api = await serve_api("Hello!", text=QWEN)
    api.endpoint.breaks_after = 2
    body = {"messages": HI, "max_tokens": 9}
    whole = await api.post("/v1/messages", body)
    assert (whole.status, whole.json()["error"]["type"]) == (500, "api_error")
    stream = await api.post("/v1/messages", {**body, "stream": True})
    last = stream.body.decode().split("\n\n")[-2]
    assert last.startswith('event: error\ndata: {"type":"error"')


@pytest.mark.parametrize("stream", [False, True])
async def test_fields_that_strict_clients_read(serve_api, stream: bool) -> None:
    api = await serve_api("ok", text=QWEN)
    body = {"messages": HI, "max_tokens": 9, "stream": stream}
    answer = await api.post("/v1/messages", body)
    if stream:
        data = [line[6:] for line in answer.body.decode().splitlines() if line[:6] == "data: "]
        events = {event["type"]: event for event in map(json.loads, data)}
        [block] = [events["content_block_start"]["content_block"]]
        assert events["message_delta"]["delta"].keys() >= {"stop_details", "container"}
        message = events["message_start"]["message"]
    else:
        message = answer.json()
        [block] = message["content"]
    assert "citations" not in block, "a list or nothing, for the AI SDK"
    assert message.keys() >= {"id", "model", "stop_sequence", "stop_details", "container"}
    usage = message["usage"]
    assert usage["cache_creation"].keys() == {
        "ephemeral_5m_input_tokens",
        "ephemeral_1h_input_tokens",
    }
    assert usage.keys() >= {"server_tool_use", "inference_geo", "service_tier"}
