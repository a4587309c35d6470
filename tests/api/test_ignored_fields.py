# SPDX-License-Identifier: Apache-2.0
"""What would change an answer is refused by name; what would not is accepted and named in a header and the log."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from template_texts import CALL, QWEN, prompt_of

from pagoda.api.bodies.body import parse_body
from pagoda.api.bodies.ignored_fields import IGNORED_HEADER, Ignored, IgnoredNames, is_harmless
from pagoda.api.openai.bodies import ChatRequest
from pagoda.errors import InvalidRequestError

HI = [{"role": "user", "content": "hi"}]
ADD = {"name": "add", "parameters": {"type": "object"}}
FUNCTION = {"type": "function", "function": ADD}
CHAT: tuple[str, dict[str, Any]] = ("/v1/chat/completions", {"messages": HI})
RESPONSES: tuple[str, dict[str, Any]] = ("/v1/responses", {"input": "hi"})
MESSAGES: tuple[str, dict[str, Any]] = ("/v1/messages", {"messages": HI, "max_tokens": 9})
COMPLETIONS: tuple[str, dict[str, Any]] = ("/v1/completions", {"prompt": "hi"})
OLLAMA: tuple[str, dict[str, Any]] = (
    "/api/chat",
    {"model": "tiny", "messages": HI, "stream": False},
)
BATCH: tuple[str, dict[str, Any]] = ("/v1/chat/completions/batch", {"messages": [HI, HI]})
TOKENS: tuple[str, dict[str, Any]] = ("/inference/v1/generate", {"token_ids": [104]})
KEPT_ALL = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}


def _edits(**fields: Any) -> dict[str, Any]:
    return {"context_management": {"edits": [fields]}}


@pytest.mark.parametrize(
    ("route", "fields", "named"),
    [
        (CHAT, {"service_tier": "flex"}, "service_tier"),
        (CHAT, {"verbosity": "low"}, "verbosity"),
        (CHAT, {"web_search_options": {}}, "web_search_options"),
        (CHAT, {"client_metadata": {"a": "b"}, "sessionId": "s"}, "client_metadata, sessionId"),
        (CHAT, {"cache_prompt": False, "n_keep": 5}, "cache_prompt, n_keep"),
        (CHAT, {"tools": [{"type": "web_search"}, FUNCTION]}, "tools.web_search"),
        (COMPLETIONS, {"trace_id": "t", "store": True}, "trace_id, store"),
        (BATCH, {"trace_id": "t", "verbosity": "low", "store": True}, "trace_id, verbosity, store"),
        (TOKENS, {"sampling_params": {"cache_prompt": False}}, "cache_prompt"),
        (RESPONSES, {"client_metadata": {}}, "client_metadata"),
        (RESPONSES, {"verbosity": "low"}, "verbosity"),
        (RESPONSES, {"text": {"verbosity": "low"}}, "text.verbosity"),
        (RESPONSES, {"reasoning": {"summary": "concise"}}, "reasoning.summary"),
        (RESPONSES, {"service_tier": "priority"}, "service_tier"),
        (
            RESPONSES,
            {"tools": [{"type": "web_search"}, {"type": "custom", "name": "c"}]},
            "tools.web_search, tools.custom",
        ),
        (MESSAGES, {"service_tier": "priority", "speed": "fast"}, "service_tier, speed"),
        (MESSAGES, {"cache_prompt": False}, "cache_prompt"),
        (MESSAGES, {"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
        (
            MESSAGES,
            {"tools": [{"type": "bash_20250124", "name": "bash"}, {"type": "mcp_toolset"}]},
            "tools.bash_20250124, tools.mcp_toolset",
        ),
        (OLLAMA, {"max_output_tokens": 9, "tool_choice": "auto"}, "max_output_tokens"),
        (OLLAMA, {"options": {"num_ctx": 32768}}, "options.num_ctx"),
        (OLLAMA, {"session_id": "s"}, "session_id"),
    ],
)
async def test_what_changes_nothing_is_taken_and_named(
    serve_api, caplog, route: tuple[str, dict[str, Any]], fields: dict[str, Any], named: str
) -> None:
    api = await serve_api("ok", text=QWEN)
    path, body = route
    with caplog.at_level(logging.WARNING, "pagoda.api"):
        for _ in range(2):
            answer = await api.post(path, {**body, **fields})
            assert (answer.status, answer.headers.get(IGNORED_HEADER)) == (200, named)
    logged = [record.getMessage() for record in caplog.records]
    assert logged == [f"the field {name} of a request is ignored" for name in named.split(", ")]
    assert IGNORED_HEADER not in (await api.post(path, body)).headers


@pytest.mark.parametrize("route", ["/api/chat", "/completion"])
async def test_the_window_of_a_penalty_is_a_hint(api, route: str) -> None:
    for window, named, penalty in (
        (64, "repeat_last_n", 1.5),
        (-1, None, 1.5),
        (256, None, 1.5),
        (0, None, 1.0),
    ):
        options = {"repeat_penalty": 1.5, "repeat_last_n": window}
        body = {"prompt": "hi", **options} if route == "/completion" else OLLAMA[1]
        if body is OLLAMA[1]:
            body, named = {**body, "options": options}, named and f"options.{named}"
        answer = await api.post(route, body)
        assert (answer.status, answer.headers.get(IGNORED_HEADER)) == (200, named)
        assert api.endpoint.requests[-1].work.sampling.repetition_penalty == penalty


async def test_a_stream_names_what_was_ignored(serve_api) -> None:
    api = await serve_api("ok", text=QWEN)
    answer = await api.chat(stream=True, verbosity="low")
    assert answer.headers[IGNORED_HEADER] == "verbosity"


@pytest.mark.parametrize(
    ("route", "fields", "param"),
    [
        (CHAT, {"temprature": 0}, "temprature"),
        (CHAT, {"adapter_id": "a", "user_id": "u"}, "adapter_id"),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "?"}}]}, "tools[0]"),
        (CHAT, {"tools": [{"type": "mcp"}, {"function": {"name": "?"}}]}, "tools[1]"),
        (CHAT, {"tools": [{"type": "mcp"}], "tool_choice": "required"}, "tool_choice"),
        (RESPONSES, {"text": {"style": "short"}}, "text.style"),
        (RESPONSES, {"tools": [{"type": "namespace", "name": "n"}]}, "tools[0].tools"),
        (RESPONSES, {"context_management": [{"type": "truncate"}]}, "context_management[0]"),
        (OLLAMA, {"options": {"mirostat": 2}}, "options.mirostat"),
        (OLLAMA, {"options": {"user_id": 2}}, "options.user_id"),
    ],
)
async def test_what_may_change_an_answer_is_refused(
    serve_api, route: tuple[str, dict[str, Any]], fields: dict[str, Any], param: str
) -> None:
    api = await serve_api("ok", text=QWEN)
    path, body = route
    answer = await api.post(path, {**body, **fields})
    error = answer.json()["error"]
    assert answer.status == 400
    assert (error if isinstance(error, str) else error["message"]).startswith(param)


def test_names_that_tell_whom_or_what_a_request_is_for() -> None:
    harmless = "client_metadata litellm_metadata threadId x-trace session_tags user_info provider"
    assert all(is_harmless(name) for name in harmless.split())
    others = (
        "temprature lora_id adapter_id user_prompt system_prompt message query top_k2 stop_word"
    )
    assert not any(is_harmless(name) for name in others.split())


def test_names_of_one_request_are_bounded_and_clean() -> None:
    ignored = Ignored(IgnoredNames(takes_unknown=True))
    body = {"messages": HI, "x_\r\nevil: 1": 1, **{f"x_{i}": i for i in range(5000)}}
    parse_body(json.dumps(body).encode(), ChatRequest, ignored)
    [header] = ignored.headers.values()
    assert len(header) < 4096
    assert header.startswith("x___evil:_1, x_0, x_1")


async def test_conversations_with_nothing_to_clear(serve_api) -> None:
    api = await serve_api("ok", text=QWEN)
    path, body = MESSAGES
    uses = {"type": "clear_tool_uses_20250919"}
    for fields in (
        {"context_management": KEPT_ALL},
        {"context_management": {}},
        _edits(type="clear_thinking_20251015"),
        _edits(**uses),
        _edits(**uses, trigger={"type": "tool_uses", "value": 5}),
        _edits(type="compact_20260112", trigger={"type": "input_tokens", "value": 50000}),
    ):
        answer = await api.post(path, {**body, **fields})
        assert answer.status == 200
        assert answer.json()["context_management"] == {"applied_edits": []}
    path, body = RESPONSES
    edit = {"type": "compaction", "compact_threshold": 1000}
    assert (await api.post(path, {**body, "context_management": [edit]})).status == 200


async def test_a_conversation_that_would_be_cleared(serve_api) -> None:
    api = await serve_api("ok", text=QWEN, max_model_len=4096)
    thoughts = [{"type": "thinking", "thinking": "so", "signature": ""}]
    turn = [{"role": "assistant", "content": thoughts}, *HI]
    call = {"type": "tool_use", "id": "c", "name": "add", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": "3"}
    calls = [
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    few = {"type": "input_tokens", "value": 5}
    for messages, edit in (
        (HI + turn + turn, {"type": "clear_thinking_20251015"}),
        (HI + calls * 4, {"type": "clear_tool_uses_20250919", "trigger": few}),
        (HI, {"type": "compact_20260112", "trigger": few}),
        (HI, {"type": "forget_all"}),
        (HI, {}),
    ):
        body = {"messages": messages, "max_tokens": 9, **_edits(**edit)}
        answer = await api.post("/v1/messages", body)
        assert answer.status == 400
        message = answer.json()["error"]["message"]
        assert message.startswith("context_management.edits[0].type")
    edit = {"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 500}}
    tool = {"name": "add", "description": "x" * 1000, "input_schema": {"type": "object"}}
    body = {"messages": HI, "max_tokens": 9, **_edits(**edit)}
    statuses = [
        (await api.post("/v1/messages", {**body, "tools": it})).status for it in ([], [tool])
    ]
    assert statuses == [200, 400], "tools are part of the prompt"


# ---- tools in namespaces

FILES = {
    "type": "namespace",
    "name": "files",
    "description": "Of files.",
    "tools": [{"type": "function", **ADD}, {"type": "custom", "name": "patch"}],
}
IN_FILES = CALL.replace('"add"', '"files__add"')


@pytest.mark.parametrize("stream", [False, True])
async def test_a_function_of_a_namespace_is_called(serve_api, stream: bool) -> None:
    api = await serve_api(IN_FILES, text=QWEN, max_model_len=4096)
    body = {"input": "hi", "tools": [FILES, {"type": "function", **ADD}], "stream": stream}
    answer = await api.post("/v1/responses", body)
    assert answer.headers[IGNORED_HEADER] == "tools.custom"
    last = answer.body.decode().split("data: ")[-1]
    response = json.loads(last)["response"] if stream else answer.json()
    [call] = response["output"]
    assert (call["namespace"], call["name"]) == ("files", "add")
    assert response["tools"][0] == FILES
    assert '"files__add"' in prompt_of(api)
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "3"}
    again = await api.post("/v1/responses", {**body, "input": [*HI, call, result]})
    assert again.status == 200
    assert prompt_of(api).endswith("[tool]3[assistant]")


# ---- whole numbers


@pytest.mark.parametrize(
    ("route", "fields"),
    [
        (CHAT, {"max_tokens": 5.0, "seed": 7.0, "top_k": 3.0}),
        (CHAT, {"logit_bias": {"5": 1.0}, "stop_token_ids": [5.0], "temperature": 1.0}),
        (BATCH, {"max_tokens": 5.0, "n": 2.0}),
        (COMPLETIONS, {"prompt": [104.0, 105.0], "max_tokens": 2.0, "logprobs": 1.0}),
        (COMPLETIONS, {"prompt": [[104.0], [105.0]], "n": 2.0}),
        (RESPONSES, {"max_output_tokens": 5.0}),
        (MESSAGES, {"max_tokens": 5.0, "top_k": 2.0}),
        (OLLAMA, {"options": {"num_predict": 5.0, "seed": 1.0, "temperature": 0.0}}),
        (("/completion", {"prompt": "hi"}), {"n_predict": 5.0, "n_probs": 1.0}),
        (("/generate", {"text": "hi"}), {"sampling_params": {"max_new_tokens": 5.0}}),
        (("/tokenize", {"prompt": "hi"}), {}),
        (("/detokenize", {}), {"tokens": [104.0, 105.0]}),
    ],
)
async def test_whole_numbers_may_be_written_with_a_point(
    serve_api, route: tuple[str, dict[str, Any]], fields: dict[str, Any]
) -> None:
    api = await serve_api("ok", text=QWEN)
    path, body = route
    answer = await api.post(path, {**body, **fields})
    assert answer.status == 200, answer.body


def test_other_numbers_are_refused_where_a_whole_one_is_asked() -> None:
    for value in (5.5, 1e300, -0.5):
        body = json.dumps({"messages": HI, "max_tokens": value, "top_p": 1.0}).encode()
        with pytest.raises(InvalidRequestError, match="max_tokens"):
            parse_body(body, ChatRequest)


def test_numbers_of_conversations_stay_as_they_are() -> None:
    messages = [{"role": "user", "content": "hi", "weight": 5.0}]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"default": 2.0}}}
    body = {"messages": messages, "tools": [tool], "max_tokens": 5.0}
    parsed = parse_body(json.dumps(body).encode(), ChatRequest)
    assert parsed.max_tokens == 5
    assert json.dumps(parsed.tools) == json.dumps([tool])
