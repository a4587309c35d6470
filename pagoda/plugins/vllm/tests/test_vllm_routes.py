# SPDX-License-Identifier: Apache-2.0
"""The routes that vLLM's server has besides those of OpenAI."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

HI = [{"role": "user", "content": "hi"}]


async def test_tokens_in_and_out(api) -> None:
    body = {"token_ids": list(b"hi"), "sampling_params": {"max_tokens": 2, "temperature": 0}}
    answer = (await api.post("/inference/v1/generate", body)).json()
    [choice] = answer["choices"]
    assert (choice["token_ids"], choice["finish_reason"]) == (list(b"ok"), "length")
    assert choice["logprobs"] is None
    streamed = await api.post("/inference/v1/generate", {**body, "stream": True})
    ids = [i for event in streamed.events() for i in event["choices"][0]["token_ids"]]
    assert ids == list(b"ok")
    assert streamed.events()[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("num_top", [0, 1, 3])
async def test_logprobs_of_tokens(api, num_top: int) -> None:
    sampling = {"max_tokens": 2, "logprobs": num_top, "detokenize": False, "stop": None}
    body = {"token_ids": list(b"hi"), "sampling_params": sampling, "request_id": "r"}
    answer = (await api.post("/inference/v1/generate", body)).json()
    assert answer["request_id"] == "r"
    content = answer["choices"][0]["logprobs"]["content"]
    assert [len(entry["top_logprobs"]) >= 1 for entry in content] == [True, True]


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"sampling_params": {"unheard": 1}}, "sampling_params.unheard"),
        ({"sampling_params": {"model": "x"}}, "sampling_params.model"),
        ({"sampling_params": {"detokenize": False, "stop": ["x"]}}, "sampling_params.stop"),
        ({"token_ids": []}, "token_ids"),
        ({"features": {}}, "features"),
    ],
)
async def test_bodies_of_tokens_are_checked(api, fields: dict[str, Any], word: str) -> None:
    answer = await api.post("/inference/v1/generate", {"token_ids": [1], **fields})
    assert (answer.status, answer.error()["param"]) == (400, word)


async def test_what_is_rendered_can_be_generated(api) -> None:
    chat = {"messages": HI, "temperature": 0, "max_tokens": 2, "stream": True}
    rendered = (await api.post("/v1/chat/completions/render", chat)).json()
    assert (rendered["model"], rendered["stream"]) == ("tiny", True)
    assert not api.endpoint.requests
    assert (await api.post("/inference/v1/generate", rendered)).status == 200
    assert (await api.post("/v1/chat/completions", chat)).status == 200
    first, second = api.endpoint.requests
    assert first.prompt_token_ids == second.prompt_token_ids
    assert first.work.sampling.max_tokens == second.work.sampling.max_tokens
    body = {"prompt": ["a", "b"], "n": 2}
    both = (await api.post("/v1/completions/render", body)).json()
    assert [bytes(one["token_ids"]) for one in both] == [b"a", b"b"]
    assert (await api.post("/inference/v1/generate", both[0])).json()["choices"][1]["index"] == 1


async def test_several_conversations_in_one_body(serve_api) -> None:
    api = await serve_api(lambda request: "ok" if b"hi" in _bytes(request) else "no")
    other = [{"role": "user", "content": "yo"}]
    answer = await api.post("/v1/chat/completions/batch", {"messages": [HI, other], "n": 2})
    texts = [choice["message"]["content"] for choice in answer.json()["choices"]]
    assert texts == ["ok", "ok", "no", "no"]
    assert [choice["index"] for choice in answer.json()["choices"]] == [0, 1, 2, 3]
    assert answer.json()["usage"]["completion_tokens"] == 12
    for body in ({"messages": []}, {"messages": [HI], "stream": True}, {"messages": [[]] * 2000}):
        assert (await api.post("/v1/chat/completions/batch", body)).status == 400


def _bytes(request: Any) -> bytes:
    return bytes(i for i in request.prompt_token_ids if i < 256)


async def test_invocations(api) -> None:
    chat = (await api.post("/invocations", {"messages": HI})).json()
    assert chat["object"] == "chat.completion"
    text = (await api.post("/invocations", {"prompt": "hi"})).json()
    assert text["object"] == "text_completion"
    assert (await api.post("/invocations", {})).status == 400


async def test_the_tokenizer(api) -> None:
    info = (await api.get("/tokenizer_info")).json()
    assert info["eos_token"] == "<|im_end|>"
    assert info["model_max_length"] == 256
    assert info["added_tokens_decoder"]["257"]["content"] == "<|im_end|>"


async def test_load_counts_requests(serve_api) -> None:
    api = await serve_api("abc")
    api.endpoint.pause_after = 1
    assert (await api.get("/load")).json() == {"server_load": 0}
    asking = asyncio.ensure_future(api.complete())
    await api.endpoint.paused.wait()
    assert (await api.get("/load")).json() == {"server_load": 1}
    api.endpoint.go_on.set()
    await asking
    assert (await api.get("/load")).json() == {"server_load": 0}


async def test_sagemaker_pings(api) -> None:
    assert (await api.get("/ping")).status == 200
    assert (await api.post("/ping")).status == 200


async def test_what_has_no_meaning_here_says_so(api) -> None:
    for path in ("/sleep", "/wake_up", "/collective_rpc", "/reset_prefix_cache"):
        answer = await api.post(path, {})
        assert (answer.status, path in answer.error()["message"]) == (501, True)


async def test_sglangs_name_of_the_stop(api) -> None:
    [choice] = (await api.chat()).json()["choices"]
    assert choice["matched_stop"] == 257
    [choice] = (await api.chat(stop="k")).json()["choices"]
    assert choice["matched_stop"] == "k"
    [choice] = (await api.chat(max_tokens=1)).json()["choices"]
    assert choice["matched_stop"] is None
