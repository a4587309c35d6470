# SPDX-License-Identifier: Apache-2.0
"""SGLang's own API."""

from __future__ import annotations

from typing import Any

import pytest
from tables import each_row

from pagoda.plugins.sim.model import sim_logprob


async def test_one_prompt(api) -> None:
    for prompt in ({"text": "hi"}, {"input_ids": [104, 105]}):
        got = (await api.post("/generate", {**prompt, "rid": "mine"})).json()
        assert got["text"] == "ok"
        assert got["output_ids"][:2] == [111, 107]
        meta = got["meta_info"]
        assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"]) == ("mine", 2, 3)
        assert meta["finish_reason"] == {"type": "stop", "matched": got["output_ids"][-1]}
        assert meta["e2e_latency"] >= 0
        assert api.endpoint.requests[-1].prompt_token_ids == [104, 105]
        assert api.endpoint.requests[-1].work.sampling.max_tokens == 128


async def test_sampling_has_sglangs_names(api) -> None:
    params = {
        "max_new_tokens": 10**6,
        "min_new_tokens": 1,
        "sampling_seed": 7,
        "temperature": 0,
        "top_k": -1,
        "logit_bias": {"65": 1.5},
        "custom_params": None,
        "stream_interval": 2,
        "spaces_between_special_tokens": True,
    }
    assert (await api.post("/generate", {"text": "hi", "sampling_params": params})).status == 200
    sampling = api.endpoint.requests[0].work.sampling
    assert (sampling.max_tokens, sampling.min_tokens, sampling.seed) == (254, 1, 7)
    assert sampling.logit_bias == {65: 1.5}
    cut = {"text": "hi", "sampling_params": {"max_new_tokens": 1}}
    got = (await api.post("/generate", cut)).json()
    assert got["meta_info"]["finish_reason"] == {"type": "length", "length": 1}
    kept = {"stop": "k", "no_stop_trim": True}
    got = (await api.post("/generate", {"text": "hi", "sampling_params": kept})).json()
    assert (got["text"], got["meta_info"]["finish_reason"]["matched"]) == ("ok", "k")


async def test_lists(api) -> None:
    body = {
        "input_ids": [[1, 2], [3]],
        "sampling_params": [{"max_new_tokens": 1}, {"n": 2}],
        "rid": "r",
    }
    got = (await api.post("/generate", body)).json()
    assert [one["text"] for one in got] == ["o", "ok", "ok"]
    assert [one["meta_info"]["id"] for one in got] == ["r_0", "r_1", "r_1"]
    got = (await api.post("/generate", {"text": ["hi"]})).json()
    assert [one["text"] for one in got] == ["ok"]


async def test_events_repeat_the_answer(api) -> None:
    events = (await api.post("/generate", {"text": "hi", "stream": True})).events()
    assert [event["text"] for event in events] == ["o", "ok", "ok"]
    assert [event["meta_info"]["completion_tokens"] for event in events] == [1, 2, 3]
    assert [event["meta_info"]["finish_reason"] is None for event in events] == [True, True, False]
    events = (await api.post("/generate", {"text": ["a", "b"], "stream": True})).events()
    assert {event["index"] for event in events} == {0, 1}
    seldom = {"stream_interval": 2}
    body = {"text": "hi", "stream": True, "sampling_params": seldom}
    events = (await api.post("/generate", body)).events()
    assert [event["text"] for event in events] == ["o", "ok"]


async def test_a_stream_is_linear_in_its_answer(serve_api) -> None:
    sizes = []
    for length in (4000, 8000):
        api = await serve_api("x" * length, max_model_len=16384)
        body = {"text": "hi", "stream": True, "sampling_params": {"max_new_tokens": length}}
        answer = await api.post("/generate", body)
        assert answer.events()[-1]["text"] == "x" * length
        sizes.append(len(answer.body))
    assert sizes[1] < 2.5 * sizes[0]


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs(api, stream: bool) -> None:
    body = {
        "input_ids": [1, 2, 3, 4],
        "return_logprob": True,
        "logprob_start_len": 1,
        "top_logprobs_num": 1,
        "return_text_in_logprobs": True,
        "stream": stream,
    }
    answer = await api.post("/generate", body)
    meta = (answer.events()[-1] if stream else answer.json())["meta_info"]
    found = [
        [None, 2, "\x02"],
        [pytest.approx(sim_logprob(2, 3)), 3, "\x03"],
        [pytest.approx(sim_logprob(3, 4)), 4, "\x04"],
    ]
    assert meta["input_token_logprobs"] == found
    assert meta["input_top_logprobs"][0] is None
    assert meta["input_top_logprobs"][1] == [found[1]]
    assert [one[1] for one in meta["output_token_logprobs"]][:2] == [111, 107]
    assert len(meta["output_top_logprobs"]) == 3
    for left_out in ({"logprob_start_len": -1}, {"logprob_start_len": None}):
        answer = await api.post("/generate", {**body, **left_out, "stream": False})
        assert answer.json()["meta_info"]["input_token_logprobs"] == []


async def test_a_prompt_can_be_scored_alone(api) -> None:
    none = {"max_new_tokens": 0}
    body: dict[str, Any] = {"input_ids": [1, 2], "sampling_params": none}
    assert (await api.post("/generate", body)).json()["output_ids"] == []
    got = (
        await api.post("/generate", {**body, "return_logprob": True, "logprob_start_len": 0})
    ).json()
    assert got["meta_info"]["input_token_logprobs"][1][0] == pytest.approx(sim_logprob(1, 2))


@each_row(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": []}, "text"),
        ({"text": ""}, "text"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [[1], []]}, "input_ids"),
        ({"input_ids": [1, [2]]}, "input_ids"),
        ({"input_ids": [[2], 1]}, "input_ids"),
        ({"input_ids": [[2]] * 1025}, "input_ids"),
        ({"text": "x" * 256}, "text"),
        ({"text": "a", "sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        (
            {"text": "a", "sampling_params": {"max_new_tokens": -1}},
            "sampling_params.max_new_tokens",
        ),
        (
            {"text": "a", "sampling_params": {"max_new_tokens": "1"}},
            "sampling_params.max_new_tokens",
        ),
        (
            {"text": "a", "sampling_params": {"stream_interval": 0}},
            "sampling_params.stream_interval",
        ),
        ({"text": "a", "sampling_params": {"prompt": "b"}}, "sampling_params.prompt"),
        ({"text": "a", "sampling_params": {"stop_regex": "b"}}, "sampling_params.stop_regex"),
        ({"text": "a", "sampling_params": {"n": 2000}}, "sampling_params.n"),
        ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params"),
        ({"text": "a", "token_ids_logprob": [1]}, "token_ids_logprob"),
        ({"text": "a", "top_logprobs_num": 1}, "top_logprobs_num"),
        ({"text": "a", "return_logprob": True, "logprob_start_len": 1}, "logprob_start_len"),
        ({"text": "a", "lora_path": "none", "model": "tiny"}, "lora_path"),
        ({"text": "a", "nonsense": 1}, "nonsense"),
    ],
)
async def test_what_is_refused(api, body: dict[str, Any], param: str) -> None:
    answer = await api.post("/generate", body)
    assert answer.status == 400
    assert answer.error()["param"] == param


async def test_small_routes(api) -> None:
    for path in ("/get_model_info", "/model_info"):
        info = (await api.get(path)).json()
        assert (info["model_path"], info["is_generation"]) == ("tiny", True)
    assert (await api.get("/health_generate")).status == 200
    assert (await api.post("/flush_cache")).status == 501
    missing = await api.post("/generate", {"text": "a", "lora_path": "none"})
    assert missing.status == 404
