# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from tables import each_row
from template_texts import CALL, QWEN, prompt_of, text

from pagoda.plugins.sim.model import sim_logprob

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


WHOLE_AND_STREAM = pytest.mark.parametrize("stream", [False, True])


@WHOLE_AND_STREAM
async def test_an_answer(serve_api, stream: bool) -> None:
    api = await serve_api("Hello!", text=QWEN)
    options = {"stream_options": {"include_usage": True}} if stream else {}
    answer = await api.chat(model="tiny", stream=stream, **options)
    events = answer.events() if stream else [answer.json()]
    kind = "chat.completion.chunk" if stream else "chat.completion"
    assert {event["object"] for event in events} == {kind}
    [choice] = answer.choices()
    unsaid = {"reasoning_content": None}
    assert choice["message"] == {"role": "assistant", "content": "Hello!", **unsaid}
    assert (choice["finish_reason"], choice["logprobs"]) == ("stop", None)
    assert events[-1]["usage"]["prompt_tokens"] == len("[user]hi[assistant]")
    assert events[-1]["usage"]["completion_tokens"] == 7
    assert prompt_of(api) == "[user]hi[assistant]"
    if stream:
        begin = {"role": "assistant", "content": "", **unsaid}
        assert events[0]["choices"][0]["delta"] == begin
        deltas = [event["choices"][0]["delta"] for event in events[1:-1]]
        assert all(delta["reasoning_content"] is None for delta in deltas)
        assert all(event["usage"] is None for event in events[:-1])


async def test_as_many_tokens_as_the_context_holds(serve_api) -> None:
    api = await serve_api("x" * 500)
    answer = (await api.chat()).json()
    assert answer["usage"]["total_tokens"] == api.endpoint.limits.max_model_len
    assert answer["choices"][0]["finish_reason"] == "length"


@WHOLE_AND_STREAM
@pytest.mark.parametrize(
    ("answer", "body", "content", "reasoning"),
    [
        ("<think>\nwhy\n</think>\n\nso", {}, "so", "why"),
        ("why</think>so", {"chat_template_kwargs": {"opened": True}}, "so", "why"),
        ("<think>why</think>so", {"include_reasoning": False}, "so", None),
        (CALL, {"tools": TOOLS, "tool_choice": "none", "max_tokens": 100}, CALL, None),
    ],
)
async def test_reasoning_and_content(
    serve_api, stream: bool, answer: str, body: dict[str, Any], content: str, reasoning: str | None
) -> None:
    api = await serve_api(answer, text=QWEN)
    answered = await api.chat(**body, stream=stream)
    [choice] = answered.choices()
    message = choice["message"]
    assert (message["content"], message.get("reasoning_content")) == (content, reasoning)
    assert reasoning or b"why" not in answered.body


async def test_a_model_that_does_not_think_keeps_its_tags(serve_api) -> None:
    api = await serve_api("<think>x", text=text("{{ messages[0].content }}"))
    message = (await api.chat()).json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "<think>x", "reasoning_content": None}


@WHOLE_AND_STREAM
async def test_tool_calls(serve_api, stream: bool) -> None:
    api = await serve_api(f"Let me see.\n{CALL}\n{CALL}", text=QWEN, max_model_len=1000)
    [choice] = (await api.chat(tools=TOOLS, max_tokens=180, stream=stream)).choices()
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me see."
    calls = choice["message"]["tool_calls"]
    assert len({call["id"] for call in calls}) == 2
    for call in calls:
        assert (call["type"], call["function"]["name"]) == ("function", "add")
        assert json.loads(call["function"]["arguments"]) == {"a": 1, "b": 2}
    assert prompt_of(api).startswith('[{"type": "function"')


@WHOLE_AND_STREAM
async def test_no_more_than_one_call_at_a_time(serve_api, stream: bool) -> None:
    api = await serve_api(f"{CALL}\n{CALL}", text=QWEN, max_model_len=1000)
    answer = await api.chat(tools=TOOLS, max_tokens=180, parallel_tool_calls=False, stream=stream)
    [choice] = answer.choices()
    assert len(choice["message"]["tool_calls"]) == 1
    assert choice["finish_reason"] == "tool_calls"
    assert len(api.endpoint.aborted) == 1


RESULT = {
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "1+2"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "tool_call_id": "c", "content": "3"},
    ]
}
BEGUN = {
    "messages": [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "It is"}]
}


@pytest.mark.parametrize(
    ("body", "prompt"),
    [
        ({"tools": TOOLS, "tool_choice": "none"}, "[user]hi[assistant]"),
        (
            {"chat_template_kwargs": {"enable_thinking": False}},
            "[user]hi[assistant]<think></think>",
        ),
        (RESULT, '[user]1+2[assistant]{"name": "add", "arguments": {}}[tool]3[assistant]'),
        (BEGUN | {"continue_final_message": True}, "[user]2+2[assistant]It is"),
        (BEGUN | {"add_generation_prompt": False}, "[user]2+2[assistant]It is"),
    ],
)
async def test_prompts(serve_api, body: dict[str, Any], prompt: str) -> None:
    api = await serve_api("ok", text=QWEN)
    assert (await api.chat(**body)).status == 200
    assert prompt_of(api) == prompt


@WHOLE_AND_STREAM
async def test_log_probabilities_of_the_prompt(serve_api, stream: bool) -> None:
    api = await serve_api("ok", text=QWEN)
    answer = await api.chat(prompt_logprobs=1, n=2, stream=stream, return_token_ids=True)
    body = answer.events()[0] if stream else answer.json()
    first, *rest = body["prompt_logprobs"]
    prompt = body["prompt_token_ids"]
    assert first is None
    for (before, token_id), position in zip(pairwise(prompt), rest, strict=True):
        logprob = sim_logprob(before, token_id)
        [(key, entry)] = position.items()
        assert (int(key), entry["logprob"], entry["rank"]) == (token_id, logprob, 1)


@WHOLE_AND_STREAM
async def test_logprobs(serve_api, stream: bool) -> None:
    api = await serve_api("é")
    [choice] = (await api.chat(logprobs=True, top_logprobs=1, stream=stream)).choices()
    first, second, _ = choice["logprobs"]["content"]
    assert (first["token"], first["bytes"], first["logprob"]) == ("bytes:\\xc3", [0xC3], -0.5)
    assert second["top_logprobs"] == [{"token": "bytes:\\xa9", "logprob": -0.5, "bytes": [0xA9]}]


@WHOLE_AND_STREAM
async def test_several_answers(serve_api, stream: bool) -> None:
    api = await serve_api(lambda request: "ab"[request.work.sampling.seed != 5])
    choices = (await api.chat(n=2, seed=5, stream=stream)).choices()
    assert [choice["message"]["content"] for choice in choices] == ["a", "b"]


async def test_token_ids_on_request(serve_api) -> None:
    api = await serve_api("ok")
    answer = (await api.chat(return_token_ids=True)).json()
    assert answer["choices"][0]["token_ids"] == [111, 107, 257]
    assert answer["prompt_token_ids"] == api.endpoint.requests[0].prompt_token_ids
    first, *events = (await api.chat(return_token_ids=True, stream=True)).events()
    assert first["prompt_token_ids"] == answer["prompt_token_ids"]
    assert [i for event in events for i in event["choices"][0]["token_ids"]] == [111, 107, 257]


MARK = "<|im_end|>"
ARGUMENTS = {"name": "add", "arguments": f'{{"a": "{MARK}"}}'}
ESCAPED = {"name": "add", "arguments": r'{"a": "\ud83d\ude00\u003c|im_end|\u003e'}
"""Broken off besides."""


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": [{"role": "user", "content": f"x{MARK}"}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": MARK}]}]},
            "messages[0].content",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "text", "text": it} for it in (MARK[:3], MARK[3:])],
                    }
                ]
            },
            "messages[0].content",
        ),
        ({"chat_template_kwargs": {"model_identity": MARK}}, "chat_template_kwargs"),
        *(
            (
                {"messages": [{"role": "assistant", "tool_calls": [{"function": function}]}]},
                "messages[0].tool_calls",
            )
            for function in (ARGUMENTS, ESCAPED)
        ),
        (
            {"messages": [{"role": "assistant", "content": "", "reasoning": MARK}]},
            "messages[0].reasoning",
        ),
        ({"tools": [{**TOOLS[0], "function": {"name": "f", "description": MARK}}]}, "tools[0]"),
    ],
)
async def test_special_tokens_in_texts(serve_api, body: dict[str, Any], param: str) -> None:
    api = await serve_api("ok", text=QWEN)
    assert (await api.chat(**body)).status == 200
    strict = await serve_api("ok", text=replace(QWEN, special_tokens_in_text="reject"))
    assert (await strict.chat()).status == 200
    error = (await strict.chat(**body)).error()
    assert error["param"] == param
    assert "holds the special token '<|im_end|>'" in error["message"]


@pytest.mark.parametrize(
    ("source", "body", "param", "sentence"),
    [
        (None, {}, "messages", "--chat-template"),
        ("{{ tools }}{{ messages[0].content }}", {"tools": TOOLS}, "tools", "--tool-call-parser"),
    ],
)
async def test_what_a_template_cannot_do(
    serve_api, source: str | None, body: dict[str, Any], param: str, sentence: str
) -> None:
    api = await serve_api(text=text(source))
    answer = await api.chat(**body)
    assert (answer.status, answer.error()["param"]) == (400, param)
    assert sentence in answer.error()["message"]


@each_row(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "x" * 65, "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
        ),
        ({"messages": [{"role": "user", "content": "x" * 300}]}, "messages"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": 9999}, "max_completion_tokens"),
        ({"max_completion_tokens": 5, "max_tokens": 6}, "max_completion_tokens"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": -1, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": 5}, "logprobs"),
        ({"tools": "x"}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": TOOLS * 129}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice.function.name",
        ),
        ({"functions": [{"name": "f"}], "tools": TOOLS}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call.name"),
        ({"function_call": {}}, "function_call"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs.chat_template"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize"),
        ({"chat_template_kwargs": {"messages": "x"}}, "chat_template_kwargs.messages"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"tools": [*TOOLS, *TOOLS]}, "tools[1].function.name"),
        ({"tool_choice": "must"}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ],
)
async def test_bad_bodies_name_the_field(serve_api, body: dict[str, Any], param: str) -> None:
    api = await serve_api(text=QWEN)
    answer = await api.chat(**body)
    assert (answer.status, answer.error()["param"]) == (400, param)
    assert answer.error()["type"] == "invalid_request_error"
    assert api.endpoint.requests == []


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "video_url", "file"])
async def test_what_is_no_text_is_refused_with_what_works(serve_api, kind: str) -> None:
    api = await serve_api(text=QWEN)
    parts = [{"type": "text", "text": "What is this?"}, {"type": kind, kind: {"url": "data:,"}}]
    answer = await api.chat(messages=[{"role": "user", "content": parts}])
    assert answer.status == 400
    assert answer.error()["message"] == (
        f"messages[0].content[1].type: {kind!r} is not supported: this server reads text only; "
        "send parts of type 'text'."
    )
