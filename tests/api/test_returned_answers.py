# SPDX-License-Identifier: Apache-2.0
"""What the server gives is accepted when it comes back.

Answers with calls, in each format that a model may say them in, are sent back with their results through each API,
and stand in the next prompt; so do calls of other servers, on every published template.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
from published_templates import JUDGES, PUBLISHED, published
from scripted_endpoint import TEXT

from pagoda.errors import InvalidRequestError
from pagoda.text.answer_formats import ParserChoice
from pagoda.text.model_text import ModelText
from pagoda.text.templates.conversation import Message, render_conversation

FUNCTION = {
    "name": "get_weather",
    "description": "Tells the weather.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "The city."}},
    },
}
TOOL = {"type": "function", "function": FUNCTION}
USER = {"role": "user", "content": "Is it warm?"}
RESULT = "1818"
JSON_CALL = '{"name": "get_weather", "arguments": {"city": "Oslo"}}'
LLAMA_CALL = JSON_CALL.replace("arguments", "parameters")
HERMES = f"<tool_call>\n{JSON_CALL}\n</tool_call>"
SAID: dict[str, tuple[str, str]] = {
    "hermes": ("qwen2.5:0.5b", HERMES),
    "hermes behind reasoning": ("qwen3:0.6b", f"<think>\nAsk.\n</think>\n\n{HERMES}"),
    "hermes behind text": ("qwen3:0.6b", f"Let me see.\n{HERMES}\n{HERMES}"),
    "hermes, no tools in the template": ("smollm2:135m", HERMES),
    "qwen3_coder": (
        "qwen3-coder:30b",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n"
        "</tool_call>",
    ),
    "llama3_json": ("llama3.1:8b", LLAMA_CALL),
    "pythonic": ("llama3.2:3b", '[get_weather(city="Oslo"), get_weather(city="Oslo")]'),
    "mistral": ("mistralai-Mistral-Nemo-Instruct-2407.jinja", f"[TOOL_CALLS][{JSON_CALL}]"),
    "kimi_k2": (
        "moonshotai-Kimi-K2.jinja",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        '<|tool_call_argument_begin|>{"city": "Oslo"}<|tool_call_end|><|tool_calls_section_end|>',
    ),
    "openai": (
        "openai-gpt-oss-120b.jinja",
        "<|channel|>analysis<|message|>Ask.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.get_weather <|constrain|>json<|message|>{"city": "Oslo"}<|call|>',
    ),
    "glm45": (
        "GLM-4.6.jinja",
        "<think>Ask.</think>\n<tool_call>get_weather\n<arg_key>city</arg_key>\n"
        "<arg_value>Oslo</arg_value>\n</tool_call>",
    ),
    "granite": ("granite3.3:2b", f"<|tool_call|>[{JSON_CALL}]"),
    "phi4_mini_json": ("phi4-mini:3.8b", f"<|tool_call|>[{JSON_CALL}]<|/tool_call|>"),
}


async def answered(api: Any, path: str, body: dict[str, Any]) -> Any:
    answer = await api.post(path, body)
    assert answer.status == 200, (path, answer.body)
    return answer.json()


async def chat(api: Any) -> None:
    path, body = "/v1/chat/completions", {"tools": [TOOL], "max_tokens": 999}
    first = await answered(api, path, {**body, "messages": [USER]})
    message = first["choices"][0]["message"]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": RESULT}
        for call in message["tool_calls"]
    ]
    await answered(api, path, {**body, "messages": [USER, message, *results]})


async def messages(api: Any) -> None:
    tool = {"name": FUNCTION["name"], "input_schema": FUNCTION["parameters"]}
    path, body = "/v1/messages", {"tools": [tool], "max_tokens": 999}
    content = (await answered(api, path, {**body, "messages": [USER]}))["content"]
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": RESULT}
        for block in content
        if block["type"] == "tool_use"
    ]
    turns = [{"role": "assistant", "content": content}, {"role": "user", "content": results}]
    await answered(api, path, {**body, "messages": [USER, *turns]})


async def responses(api: Any) -> None:
    path, tool = "/v1/responses", {"type": "function", **FUNCTION}
    body = {"tools": [tool], "max_output_tokens": 999}
    output = (await answered(api, path, {**body, "input": [USER]}))["output"]
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": RESULT}
        for item in output
        if item["type"] == "function_call"
    ]
    await answered(api, path, {**body, "input": [USER, *output, *results]})


async def ollama(api: Any) -> None:
    path, body = "/api/chat", {"model": "tiny", "tools": [TOOL], "stream": False}
    message = (await answered(api, path, {**body, "messages": [USER]}))["message"]
    results = [
        {"role": "tool", "tool_name": call["function"]["name"], "content": RESULT}
        for call in message["tool_calls"]
    ]
    await answered(api, path, {**body, "messages": [USER, message, *results]})


@pytest.mark.parametrize("said", SAID)
async def test_answers_come_back_through_each_api(serve_api, said: str) -> None:
    name, answer = SAID[said]
    choice = ParserChoice("pythonic") if said == "pythonic" else ParserChoice()
    text = ModelText(TEXT.tokenizer, published(name), TEXT.eos_token_ids, parsers=choice)
    api = await serve_api(answer, text=text, max_model_len=32_768)
    ways: tuple[Callable[[Any], Awaitable[None]], ...] = (chat, messages, responses, ollama)
    for way in ways:
        await way(api)
        token_ids = api.endpoint.requests[-1].prompt_token_ids
        prompt = TEXT.tokenizer.decode(token_ids, skip_special_tokens=False)
        for word in ("get_weather", "Oslo", RESULT):
            assert word in prompt, (way.__name__, word, prompt)


WHOLE = '{"city": "Oslo"}'
CALL_ID = "call_0123456789abcdef01234567"
RETURNED: tuple[tuple[str | None, str, dict[str, Any]], ...] = (
    *((it, WHOLE, {"content": None}) for it in (CALL_ID, "aB3dE6gH9", "functions.f:0", None)),
    *((CALL_ID, it, {}) for it in ('{"city":"Oslo"}', '{"city": "Oslo', '["Oslo"]', "Oslo")),
    (CALL_ID, WHOLE, {"content": ""}),
    (CALL_ID, WHOLE, {"content": "Let me see.", "reasoning_content": None, "refusal": None}),
    (CALL_ID, WHOLE, {"content": None, "reasoning_content": "Ask.", "reasoning": "Ask."}),
)


def rendered(name: str, turns: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
    """The prompt, or why it is refused."""
    try:
        return render_conversation(
            published(name), msgspec.convert(turns, list[Message]), tools=tools
        )
    except InvalidRequestError as error:
        return f"REFUSED {error}"


def test_calls_come_back_on_every_template() -> None:
    lost = []
    for name in PUBLISHED.keys() - set(JUDGES):
        for call_id, arguments, extra in RETURNED:
            function = {"name": "get_weather", "arguments": arguments}
            call = {"id": call_id, "type": "function", "function": function}
            turns = [
                USER,
                {"role": "assistant", "tool_calls": [call], **extra},
                {"role": "tool", "content": RESULT, "tool_call_id": call_id},
            ]
            for tools in (None, [TOOL]):
                if rendered(name, [USER], tools).startswith("REFUSED"):
                    continue  # the template takes tools only, or more than a conversation
                prompt = rendered(name, turns, tools)
                if not all(word in prompt for word in ("get_weather", "Oslo", RESULT)):
                    lost.append((name, call_id, arguments, extra, bool(tools), prompt[:300]))
    assert not lost, "\n".join(map(str, lost))
