# SPDX-License-Identifier: Apache-2.0
"""Fields, headers and flags of other servers and their clients: what changes nothing is accepted."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from pagoda.api.auth.keys import ApiKeys
from pagoda.api.bodies.body import neutral_values
from pagoda.api.bodies.ignored_fields import IgnoredNames
from pagoda.api.http.cors import CorsOrigins
from pagoda.api.routes import ROUTES
from pagoda.errors import ConfigError

SGLANG_ROUTER = {
    "no_stop_trim": False,
    "separate_reasoning": True,
    "stream_reasoning": True,
    "return_hidden_states": False,
    "lora_path": None,
    "session_params": None,
}
OTHERS = {
    "verbosity": None,
    "safety_identifier": "user-7",
    "length_penalty": 1.0,
    "echo": False,
    "spaces_between_special_tokens": True,
    "store": False,
    "service_tier": "auto",
    "prediction": {"type": "content", "content": "ok"},
    "web_search_options": None,
    "cache_prompt": True,
    "watermark": False,
}


@pytest.mark.parametrize("fields", [SGLANG_ROUTER, OTHERS], ids=["routers", "others"])
async def test_neutral_values_are_accepted(api, fields: dict[str, Any]) -> None:
    assert (await api.chat(**fields)).status == 200


@pytest.mark.parametrize(
    ("field", "value", "neutral"),
    [
        ("no_stop_trim", True, "False"),
        ("spaces_between_special_tokens", False, "True"),
        ("echo", True, "False"),
        ("lora_path", "adapter", None),
        ("routed_dp_rank", 7, None),
    ],
)
async def test_other_values_are_refused_by_name(
    api, field: str, value: object, neutral: str | None
) -> None:
    error = (await api.chat(**{field: value})).error()
    assert error["param"] == field
    other = f" other than {neutral}" if neutral else ""
    assert error["message"] == f"{field}{other} is not supported yet."


def test_no_neutral_value_is_declared_as_one_that_another_type_equals() -> None:
    """`typing` gives the declarations `(0,)` and `(False,)` one object, which is the one that was made first."""
    bodies = {route.body for methods in ROUTES.values() for route in methods.values() if route.body}
    alone = [
        (body, name)
        for body in bodies
        for name, values in neutral_values(body).items()
        if isinstance(values, tuple) and len(values) == 1 and type(values[0]) in (int, float)
    ]
    assert alone == []


async def test_an_answer_comes_back_as_a_proxy_has_changed_it(serve_api) -> None:
    """litellm, openai's stream helper and `parse`, OpenRouter, Anthropic's caches."""
    api = await serve_api(max_model_len=4096)
    call = {"name": "f", "arguments": "{}", "parsed_arguments": {}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"x": 1}}]},
        {
            "role": "assistant",
            "content": None,
            "id": "m1",
            "parsed": None,
            "annotations": [{"type": "url_citation"}],
            "provider_specific_fields": {"refusal": None},
            "reasoning": "why",
            "reasoning_details": [{"type": "reasoning.text"}],
            "tool_calls": [{"id": "c", "type": "function", "index": 0, "function": call}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "5", "metadata": {"a": "b"}},
    ]
    tool = {"type": "function", "function": {"name": "f", "x": 1}, "cache_control": None}
    answer = await api.post("/v1/chat/completions", {"messages": messages, "tools": [tool]})
    assert answer.status == 200, answer.body
    answer = await api.post("/v1/chat/completions", {"messages": messages})
    assert answer.status == 200


async def test_unknown_fields_can_be_ignored(serve_api, caplog) -> None:
    api = await serve_api(ignored_names=IgnoredNames(takes_unknown=True))
    fields = {"new_knob": {"deep": [1]}, "other": 2, "logit_bias": {"5": 1.0}}
    with caplog.at_level(logging.WARNING, "pagoda.api"):
        for _ in range(2):
            assert (await api.chat(**fields)).status == 200
    named = [record.getMessage() for record in caplog.records if "ignored" in record.getMessage()]
    assert sorted(named) == [
        f"the field {name} of a request is ignored" for name in ("new_knob", "other")
    ]
    assert (await api.chat(**fields, temperature="hot")).error()["param"] == "temperature"
    assert (await api.chat(**fields, echo=True)).error()["param"] == "echo"
    api = await serve_api()
    assert (await api.chat(**fields)).error()["message"] == "new_knob is not a known field."


def test_names_of_unknown_fields_are_bounded() -> None:
    unknown = IgnoredNames()
    for number in range(1500):
        unknown.note(f"field{number}")
    assert len(unknown.names) == 1000


# ---- streams


async def test_usage_goes_on_through_a_stream(api) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = (await api.chat(stream=True, stream_options=options)).events()
    assert [event["usage"]["completion_tokens"] for event in events] == [0, 1, 2, 3, 3]
    assert all(event["usage"]["prompt_tokens"] for event in events)


async def test_the_operator_can_give_all_streams_their_usage(serve_api) -> None:
    api = await serve_api(always_usage=True)
    events = (await api.complete(stream=True)).events()
    assert [event["usage"]["completion_tokens"] for event in events] == [1, 2, 3, 3]
    events = (await api.complete(stream=True, stream_options={})).events()
    assert events[-1]["usage"]["completion_tokens"] == 3
    assert [event["usage"] for event in events[:-1]] == [None] * (len(events) - 1)


@pytest.mark.parametrize("asked", [None, True, False])
async def test_the_operator_can_have_tokens_written_as_ids(serve_api, asked: bool | None) -> None:
    api = await serve_api(tokens_as_ids=True)
    options = {"logprobs": 1, "return_tokens_as_token_ids": asked}
    [choice] = (await api.complete(**options)).choices()
    spelt = all(it.startswith("token_id:") for it in choice["logprobs"]["tokens"])
    assert spelt == (asked is not False)
    options |= {"logprobs": True}
    [choice] = (await api.chat(**options)).choices()
    spelt = all(it["token"].startswith("token_id:") for it in choice["logprobs"]["content"])
    assert spelt == (asked is not False)


async def test_what_clients_of_vllm_read_unasked(api) -> None:
    whole = (await api.chat()).json()
    assert whole["prompt_logprobs"] is None
    [choice] = (await api.complete()).choices()
    assert (choice["prompt_logprobs"], choice["prompt_token_ids"]) == (None, None)


async def test_obfuscation_of_streams_is_refused(api) -> None:
    options: dict[str, Any] = {"include_obfuscation": False}
    assert (await api.chat(stream=True, stream_options=options)).status == 200
    options = {"include_obfuscation": True}
    error = (await api.chat(stream=True, stream_options=options)).error()
    assert error["param"] == "stream_options.include_obfuscation"


async def test_the_service_tier_is_told_where_one_is_asked_for(api) -> None:
    assert (await api.chat(service_tier="auto")).json()["service_tier"] == "default"
    assert "service_tier" not in (await api.chat()).json()


# ---- names, keys and paths


async def test_a_model_of_several_names(serve_api) -> None:
    api = await serve_api(model_aliases=("small", "latest"))
    assert (await api.chat(model="latest")).json()["model"] == "tiny"
    names = [model["id"] for model in (await api.get("/v1/models")).json()["data"]]
    assert names == ["tiny", "small", "latest"]
    assert (await api.get("/v1/models/small")).json()["id"] == "small"
    assert (await api.chat(model="other")).status == 404


async def test_a_key_may_come_as_x_api_key(serve_api) -> None:
    api = await serve_api(api_keys=ApiKeys(["secret"]))
    assert (await api.get("/v1/models", headers={"x-api-key": "secret"})).status == 200
    wrong = {"x-api-key": "secret", "Authorization": "Bearer other"}
    for headers in ({}, {"x-api-key": "other"}, wrong):
        assert (await api.get("/v1/models", headers=headers)).status == 401


async def test_a_path_before_all_routes(serve_api) -> None:
    api = await serve_api(root_path="/llm")
    for path in ("/llm/v1/models", "/v1/models", "/llm", "/llm/", "/"):
        assert (await api.get(path)).status == 200
    assert (await api.get("/llmv1/models")).status == 404
    assert (await api.get("/llm/llm/v1/models")).status == 404


async def test_answers_tell_how_long_they_took(api) -> None:
    answer = await api.chat()
    assert int(answer.headers["openai-processing-ms"]) >= 0


# ---- web pages of other origins

PAGE = {"Origin": "http://localhost:3000"}
QUESTION = {
    **PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization, content-type",
}


@pytest.mark.parametrize("origins", ["http://localhost:3000", "localhost", "*"])
async def test_pages_of_origins_that_the_operator_allows(serve_api, origins: str) -> None:
    api = await serve_api(cors_origins=CorsOrigins([origins]), api_keys=ApiKeys(["secret"]))
    asked = await api.request("OPTIONS", "/v1/chat/completions", headers=QUESTION)
    assert asked.status == 200
    assert asked.headers["Access-Control-Allow-Origin"] == PAGE["Origin"]
    assert asked.headers["Access-Control-Allow-Methods"] == "POST, GET, OPTIONS"
    assert asked.headers["Access-Control-Allow-Headers"] == "authorization, content-type"
    refused = await api.get("/v1/models", headers=PAGE)
    assert refused.status == 401
    assert refused.headers["Access-Control-Allow-Origin"] == PAGE["Origin"], "pages read errors"
    headers = {**PAGE, "Authorization": "Bearer secret"}
    for stream in (False, True):
        body = {"prompt": "hi", "stream": stream}
        answer = await api.post("/v1/completions", body, headers=headers)
        assert answer.headers["Access-Control-Allow-Origin"] == PAGE["Origin"]
        assert "X-Request-Id" in answer.headers["Access-Control-Expose-Headers"]


async def test_pages_of_other_origins_are_not_told(serve_api) -> None:
    api = await serve_api(cors_origins=CorsOrigins(["localhost"]))
    for origin in ("http://localhost.evil.com", "http://notlocalhost", "null", "http://[::1"):
        asked = await api.request("OPTIONS", "/v1/models", headers={**QUESTION, "Origin": origin})
        assert "Access-Control-Allow-Origin" not in asked.headers
        assert (await api.get("/v1/models", headers={"Origin": origin})).status == 403


async def test_without_the_flag_there_is_no_cors(api) -> None:
    assert (await api.request("OPTIONS", "/v1/models", headers=QUESTION)).status == 403


@pytest.mark.parametrize("flag", ["localhost:3000", "http://a/path", "", "http://"])
def test_flags_that_are_no_origins(flag: str) -> None:
    with pytest.raises(ConfigError, match="--cors-origins"):
        CorsOrigins([flag])


async def test_any_model_name_is_answered_if_the_operator_says_so(serve_api) -> None:
    strict, generous = await serve_api(), await serve_api(any_model_name=True)
    assert (await strict.complete(model="gpt-4")).status == 404
    for answer in (await generous.complete(model="gpt-4"), await generous.chat(model="gpt-4")):
        assert (answer.status, answer.json()["model"]) == (200, "tiny")
    body = {"model": "llama3:latest", "messages": [{"role": "user", "content": "hi"}]}
    assert (await generous.post("/api/chat", body)).status == 200
