# SPDX-License-Identifier: Apache-2.0
"""Inputs that have broken serving systems: each gets a clear error, and nothing reaches the engine."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from operations import assert_linear
from scripted_endpoint import TEXT
from tables import each_row

from pagoda.api.bodies.body import parse_body
from pagoda.api.openai.bodies import ChatRequest, CompletionRequest
from pagoda.errors import InvalidRequestError

DEEP = b"[" * 10_000 + b"]" * 10_000
DEEPER = b"[" * 200_000 + b"]" * 200_000


BAD_VALUES = {
    "n": [1000000, 0, -1],
    "best_of": [1000000],
    "prompt": [
        ["x"] * 100000,
        "",
        [],
        [[]],
        None,
        5,
        {"a": 1},
        [1, "a"],
        [512],
        "x" * 256,
        "x" * 2000000,
        [1] * 550000,
    ],
    "temperature": [-1, 1e308, "hot", True],
    "top_p": [0, 1.1],
    "top_k": [-2, 1.5],
    "min_p": [2],
    "typical_p": [0, 1.1],
    "frequency_penalty": [3],
    "presence_penalty": [-1e308],
    "repetition_penalty": [0, 1e-38],
    "logit_bias": [
        {"512": 1},
        {"-1": 1},
        {"x": 1},
        {"1": 1e308},
        {str(i): 1 for i in range(2000)},
        [1],
    ],
    "allowed_token_ids": [[], [512], [1] * 16385],
    "stop_token_ids": [[1] * 2000],
    "logprobs": [21, -1, 10**9],
    "max_tokens": [0, -1, 2**63, 255],
    "metadata": [{str(i): "" for i in range(17)}],
    "stop": [[""], ["x"] * 17, "x" * 1025],
    "seed": [2**64, -(2**63) - 1, 1.5, 10**400],
    "cache_salt": [5, "", "x" * 1000],
    "priority": [2**40],
    "unknown": [1],
    "stream": ["yes"],
    "stream_options": [{"include_usage": True}],
    "suffix": ["x"],
    "kv_transfer_params": [[], "x", 1, True],
    "bad_words": [["x"]],
    "prompt_logprobs": [21, -1, -2, 10**9],
    "structured_outputs": ["a", []],
    "guided_regex": [5],
    "guided_json": [7, "{", {"multipleOf": 99991}],
    "guided_choice": [[], [1]],
    "guided_grammar": ["", "a b c"],
}


@each_row(
    ("body", "param"),
    [
        *(({name: value}, name) for name, values in BAD_VALUES.items() for value in values),
        ({"prompt": ["x"] * 100, "n": 100}, "prompt"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids[0]"),
        ({"allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 1}, "min_tokens"),
        ({"min_tokens": 2, "allowed_token_ids": [9], "stop_token_ids": [9]}, "min_tokens"),
        ({"stop_token_ids": [2**40]}, "stop_token_ids[0]"),
        ({"min_tokens": 20, "max_tokens": 10}, "min_tokens"),
        ({"prompt": [1.5]}, "prompt[0]"),
        ({"prompt": [[1.5]]}, "prompt[0][0]"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": [[[1]]]}, "prompt[0][0]"),
        ({"prompt": [[1] * 550000]}, "prompt[0]"),
        ({"stop": [5]}, "stop[0]"),
        ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params.a"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"metadata": {"a": 1}}, "metadata[...]"),
    ],
)
async def test_bad_values_name_the_field(api, body: dict[str, Any], param: str) -> None:
    answer = await api.complete(**body)
    assert (answer.status, answer.error()["param"]) == (400, param)
    assert answer.error()["type"] == "invalid_request_error"
    assert api.endpoint.requests == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"x"',
        b"{}",
        b'{"prompt": "hi", "temperature": NaN}',
        b'{"prompt": "hi", "temperature": Infinity}',
        b'{"prompt": "hi", "temperature": 1e999}',
        b'{"prompt": "hi", "n": ' + b"9" * 5000 + b"}",
        b'{"prompt": "hi", "prompt": "ho"}',
        b'{"prompt": "hi", "logit_bias": {"1": 1, "1": 2}}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\x00"}',
        b'{"prompt": "hi"} x',
        b'\xef\xbb\xbf{"prompt": "hi"}',
        b'{"prompt": ' + DEEP + b"}",
        b'{"prompt": "hi", "logit_bias": ' + DEEP + b"}",
        b'{"prompt": "hi", "response_format": ' + DEEP + b"}",
        b'{"prompt": "hi", "response_format": ' + DEEPER + b"}",
        b'{"prompt": "hi", "unknown": ' + DEEPER + b"}",
        b'{"prompt": "hi", "model": "' + b"x" * 100_000 + b'"}',
    ],
)
async def test_bad_bodies(api, body: bytes) -> None:
    answer = await api.post("/v1/completions", body)
    assert answer.status in (400, 404)
    assert len(answer.body) < 2000
    assert answer.error()["message"]
    assert api.endpoint.requests == []


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"role": "user", "content": "x"}] * 8193, "messages"),
        (
            [{"role": "user", "content": [{"type": "text", "text": ""}] * 1025}],
            "messages[0].content",
        ),
        ([{"role": "user", "content": "x" * 2_000_000}], "messages"),
    ],
)
async def test_conversations_out_of_all_bounds(api, messages: list[Any], param: str) -> None:
    for path in ("/v1/chat/completions", "/tokenize"):
        answer = await api.post(path, {"messages": messages})
        assert (answer.status, answer.error()["param"]) == (400, param)
    assert api.endpoint.requests == []


async def test_a_text_that_no_tokens_of_the_context_could_spell_is_not_tokenized(
    api, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = api.service.generator.text.tokenizer
    most = 256 * tokenizer.longest_token_chars
    monkeypatch.setattr(tokenizer, "encode", lambda *_, **__: pytest.fail("was tokenized"))
    error = (await api.complete(prompt="x" * (most + 1))).error()
    assert f"{most + 1} characters" in error["message"]
    assert f"maximum context length is 256 tokens, which hold {most}" in error["message"]
    assert error["code"] == "context_length_exceeded"


async def test_the_context_error_says_both_lengths(api) -> None:
    error = (await api.complete(prompt="x" * 300)).error()
    assert "300 tokens" in error["message"]
    assert "This model's maximum context length is 256 tokens" in error["message"]
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize("longest", [0, 256, 1024])
async def test_the_context_error_names_the_flag_where_one_helps(serve_api, longest: int) -> None:
    api = await serve_api(text=replace(TEXT, longest=longest))
    for body in ({"prompt": "x" * 300}, {"prompt": "x" * 10**6}, {"max_tokens": 300}):
        message = (await api.complete(**body)).error()["message"]
        hint = "the model can take 1024 tokens; --max-model-len of this server allows fewer"
        assert (hint in message) is (longest == 1024)


@pytest.mark.parametrize("seed", [-1, 0, 2**63, 2**64 - 1, -(2**63)])
async def test_seeds_with_a_defined_result(api, seed: int) -> None:
    assert (await api.complete(seed=seed)).status == 200


async def test_a_prompt_of_only_special_tokens(api) -> None:
    assert (await api.complete(prompt="<|im_end|>")).status == 200
    assert (await api.complete(prompt=[257])).status == 200


async def test_a_null_character_in_a_prompt_is_text(api) -> None:
    answer = await api.post("/v1/completions", b'{"prompt": "a\\u0000b"}')
    assert answer.status == 200
    assert api.endpoint.requests[0].prompt_token_ids == [97, 0, 98]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
FIELDS = sorted({*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__})


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(body=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4), kind=st.booleans())
def test_whatever_comes_is_a_body_or_an_error_that_names_a_field(
    body: dict[str, Any], kind: bool
) -> None:
    with contextlib.suppress(InvalidRequestError):
        parse_body(json.dumps(body).encode(), ChatRequest if kind else CompletionRequest)


@given(st.binary(max_size=60))
def test_whatever_bytes_come_are_a_body_or_an_error(body: bytes) -> None:
    with contextlib.suppress(InvalidRequestError):
        assert isinstance(parse_body(body, CompletionRequest), CompletionRequest)


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (rb'{"prompt": "a", "user": "", "prompt": "b"}', "prompt"),
        (rb'{"prompt": "a", "\u0070rompt": "b"}', "prompt"),
        (rb'{"prompt": "\\", "metadata": {"a\"": "x", "b": "", "a\"" : "y"}}', 'a"'),
        (rb'{"prompt": "a", "metadata": {"\\": "", "\\": ""}}', "\\"),
        (rb'{"metadata": {"a": "}"}, "prompt": "x", "metadata": {}}', "metadata"),
    ],
)
def test_a_key_that_is_given_twice_is_refused(body: bytes, name: str) -> None:
    with pytest.raises(InvalidRequestError, match="is given twice") as caught:
        parse_body(body, CompletionRequest)
    assert caught.value.param == name


@pytest.mark.parametrize(
    "body",
    [
        rb'{"prompt": "prompt", "user": "\"prompt\": {", "metadata": {"prompt": "}", "a": "\\"}}',
        rb'{"prompt": ["\"", ":", "\\\"", "{"], "metadata": {}}',
        rb' { "prompt" : "a" , "stop" : [ ":" , "prompt" ] } ',
    ],
)
def test_keys_that_only_look_as_if_they_were_given_twice(body: bytes) -> None:
    assert parse_body(body, CompletionRequest).prompt


def test_decoding_a_body_takes_linear_work() -> None:
    def parse(size: int) -> Callable[[], object]:
        body = json.dumps({"messages": [{"role": "user", "content": "x"}] * size}).encode()
        return lambda: parse_body(body, ChatRequest)

    assert_linear(parse, [100, 200, 400])
