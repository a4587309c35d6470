# SPDX-License-Identifier: Apache-2.0
"""llama.cpp's API."""

from __future__ import annotations

import json
from typing import Any

import pytest
from infill_texts import fim_text


def events(answer: Any) -> list[Any]:
    assert answer.status == 200
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    *found, rest = answer.body.decode().split("\n\n")
    assert rest == ""
    return [json.loads(event.removeprefix("data: ")) for event in found]


def error(answer: Any) -> dict[str, Any]:
    [(name, value)] = answer.json().items()
    assert (name, value.keys() - {"n_prompt_tokens", "n_ctx"}) == (
        "error",
        {"code", "message", "type"},
    )
    assert value["code"] == answer.status
    return value


async def test_a_completion(api) -> None:
    whole = (await api.post("/completion", {"prompt": "hi", "return_tokens": True})).json()
    assert (whole["content"], whole["stop"], whole["stop_type"]) == ("ok", True, "eos")
    assert whole["tokens"][:2] == list(b"ok")
    assert (whole["tokens_evaluated"], whole["prompt"]) == (2, "hi")
    assert (whole["truncated"], whole["has_new_line"]) == (False, False)
    assert whole["generation_settings"]["n_predict"] == 254
    assert whole["timings"]["prompt_n"] == 2
    assert all(value is not None and value >= 0 for value in whole["timings"].values())
    assert (await api.post("/completions", {"prompt": "hi"})).json()["tokens"] == []


async def test_a_stream_says_the_same(serve_api) -> None:
    api = await serve_api("a\nb")
    body = {"prompt": "hi", "stream": True, "timings_per_token": True, "return_progress": True}
    got = events(await api.post("/completion", body))
    progress = [event for event in got if "prompt_progress" in event]
    assert [event["prompt_progress"]["processed"] for event in progress] == [0, 2]
    assert progress[0]["timings"]["prompt_ms"] == 0
    *pieces, last = got[len(progress) :]
    assert "".join(piece["content"] for piece in pieces) == "a\nb"
    assert all(piece["tokens"] and not piece["stop"] for piece in pieces)
    assert (last["stop"], last["stop_type"], last["has_new_line"]) == (True, "eos", True)
    assert last["tokens_predicted"] == last["timings"]["predicted_n"] == 4


@pytest.mark.parametrize(
    ("prompt", "sent"),
    [
        ("hi", [b"hi"]),
        (list(b"hi"), [b"hi"]),
        ({"prompt_string": "hi"}, [b"hi"]),
        (["hi", list(b"yo")], [b"hi", b"yo"]),
        ([104, "i", 33], [b"hi!"]),
        ([[104, "i"], {"prompt_string": "yo"}], [b"hi", b"yo"]),
        (["hi"], [b"hi"]),
    ],
)
async def test_forms_of_prompts(api, prompt: Any, sent: list[bytes]) -> None:
    answer = (await api.post("/completion", {"prompt": prompt})).json()
    assert isinstance(answer, list) == (isinstance(prompt, list) and 104 not in prompt)
    assert [bytes(r.prompt_token_ids) for r in api.endpoint.requests] == sent


async def test_fields_are_sampling(api) -> None:
    body = {
        **{"prompt": "hi", "n_predict": 1, "seed": 3, "temperature": 0.5, "repeat_penalty": 1.1},
        **{"logit_bias": [[5, -1], ["ab", False]], "ignore_eos": True, "cache_prompt": False},
        **{"id_slot": 0, "mirostat": 0, "stop": ["x"], "min_keep": 0, "n_keep": 4},
    }
    whole = (await api.post("/completion", body)).json()
    assert whole.get("error") is None
    assert (whole["stop_type"], whole["content"]) == ("limit", "o")
    sampling = api.endpoint.requests[0].work.sampling
    assert (sampling.max_tokens, sampling.seed, sampling.temperature) == (1, 3, 0.5)
    assert sampling.repetition_penalty == 1.1
    assert sampling.logit_bias == {5: -1.0, ord("a"): -100.0, ord("b"): -100.0}
    settings = whole["generation_settings"]
    assert any(entry["bias"] is None for entry in settings["logit_bias"])
    assert settings["stop"] == ["x"]


async def test_a_stop_word_is_told(serve_api) -> None:
    api = await serve_api("well done")
    whole = (await api.post("/completion", {"prompt": "hi", "stop": ["done"]})).json()
    assert (whole["content"], whole["stop_type"], whole["stopping_word"]) == (
        "well ",
        "word",
        "done",
    )


async def test_probabilities(api) -> None:
    whole = (await api.post("/completion", {"prompt": "hi", "n_probs": 2})).json()
    first = whole["completion_probabilities"][0]
    assert (first["id"], first["token"], first["bytes"]) == (ord("o"), "o", [ord("o")])
    assert all("id" in top and top["logprob"] <= 0 for top in first["top_logprobs"])


async def test_response_fields(api) -> None:
    fields = ["content", "generation_settings/n_predict", "nothing"]
    body = {"prompt": "hi", "n_predict": 2, "response_fields": fields}
    whole = (await api.post("/completion", body)).json()
    assert whole == {"content": "ok", "generation_settings/n_predict": 2}


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [[[1]]]}, "prompt"),
        ({"prompt": {"prompt_string": "x", "multimodal_data": ["a"]}}, "prompt"),
        ({"prompt": "x", "mirostat": 2}, "mirostat"),
        ({"prompt": "x", "n_predict": -3}, "n_predict"),
        ({"prompt": "x", "logit_bias": [[1]]}, "logit_bias"),
        ({"prompt": "x", "post_sampling_probs": True}, "post_sampling_probs"),
        ({"prompt": "x", "n_probs": 1000}, "n_probs"),
        ({"prompt": "x", "grammar": "a", "json_schema": {}}, "grammar"),
        ({"prompt": "x", "temperature": -1}, "temperature"),
        ({"prompt": "x", "unheard": 1}, "unheard"),
    ],
)
async def test_what_is_refused_is_named(api, fields: dict[str, Any], word: str) -> None:
    answer = await api.post("/completion", fields)
    assert answer.status == 400
    assert error(answer)["message"].startswith(word)


async def test_a_prompt_that_is_too_long(api) -> None:
    refused = error(await api.post("/completion", {"prompt": "x" * 300}))
    assert refused["type"] == "exceed_context_size_error"
    assert "exceeds the available context size" in refused["message"]
    assert (refused["n_prompt_tokens"], refused["n_ctx"]) == (300, 256)


async def test_an_answer_that_fills_the_context_is_truncated(serve_api) -> None:
    api = await serve_api("y" * 300)
    whole = (await api.post("/completion", {"prompt": "x" * 250, "n_predict": -1})).json()
    assert (whole["truncated"], len(whole["content"])) == (True, 6)


# ---- infill


async def test_infill(serve_api) -> None:
    text = fim_text()
    api = await serve_api(text=text)
    body = {"input_prefix": "ab", "input_suffix": "yz", "prompt": "c"}
    assert (await api.post("/infill", body)).json()["content"] == "ok"
    marks = [text.tokenizer.token_id(f"<|fim_{part}|>") for part in ("prefix", "suffix", "middle")]
    expected = [marks[0], *b"ab", marks[1], *b"yz", marks[2], *b"c"]
    assert api.endpoint.requests[0].prompt_token_ids == expected
    extra = [{"filename": "f.h", "text": "int f();"}]
    assert (await api.post("/infill", {**body, "input_extra": extra})).status == 200
    assert b"int f();" in bytes(i for i in api.endpoint.requests[1].prompt_token_ids if i < 256)


@pytest.mark.parametrize("extra", [{}, {"filename": "ok"}, {"filename": 1, "text": "x"}])
async def test_files_of_infill_are_checked(api, extra: dict[str, Any]) -> None:
    body = {"input_prefix": "a", "input_suffix": "b", "input_extra": [extra]}
    assert (await api.post("/infill", body)).status == 400


async def test_infill_needs_tokens_for_it(api) -> None:
    answer = await api.post("/infill", {"input_prefix": "a", "input_suffix": "b"})
    assert (answer.status, "no tokens" in error(answer)["message"]) == (400, True)


# ---- the server


async def test_props(api) -> None:
    props = (await api.get("/props")).json()
    assert props["total_slots"] == 8
    assert props["default_generation_settings"]["n_ctx"] == 256
    assert props["default_generation_settings"]["params"]["seed"] == -1
    assert "message.role" in props["chat_template"]
    assert (await api.post("/props", {})).status == 405


async def test_slots_show_what_runs(serve_api) -> None:
    import asyncio

    api = await serve_api("abc")
    api.endpoint.pause_after = 1
    asking = asyncio.ensure_future(api.post("/completion", {"prompt": "hi", "n_predict": 3}))
    await api.endpoint.paused.wait()
    slots = (await api.get("/slots")).json()
    assert [slot["is_processing"] for slot in slots] == [True] + [False] * 7
    assert slots[0]["n_prompt_tokens"] == 2
    api.endpoint.go_on.set()
    await asking
    slots = (await api.get("/slots")).json()
    assert not any(slot["is_processing"] for slot in slots)
    assert slots[0]["next_token"][0]["n_remain"] == -1
    assert (await api.post("/slots/0?action=save", {})).status == 501


async def test_templates_are_applied(api) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    prompt = (await api.post("/apply-template", body)).json()["prompt"]
    assert prompt.endswith("<|im_start|>assistant\n")
    body["add_generation_prompt"] = False
    assert not (await api.post("/apply-template", body)).json()["prompt"].endswith("assistant\n")
    assert (
        error(await api.post("/apply-template", {"messages": 1}))["type"] == "invalid_request_error"
    )


async def test_tokens_in_its_words(api) -> None:
    got = (await api.post("/tokenize", {"content": "aé"})).json()
    assert got == {"tokens": [97, 0xC3, 0xA9]}
    got = (await api.post("/tokenize", {"content": "aé", "with_pieces": True})).json()
    assert got["tokens"][:2] == [{"id": 97, "piece": "a"}, {"id": 0xC3, "piece": [0xC3]}]
    assert (await api.post("/detokenize", {"tokens": [97, 0xC3, 0xA9]})).json()["content"] == "aé"
    for body in ({"prompt": "a", "with_pieces": True}, {"content": "a", "prompt": "a"}):
        assert (await api.post("/tokenize", body)).status == 400


async def test_adapters_have_no_scales(api) -> None:
    assert (await api.get("/lora-adapters")).json() == []
    assert (await api.post("/lora-adapters", [])).status == 405


async def test_other_paths_of_the_same(api) -> None:
    assert (await api.get("/models")).json()["data"][0]["id"] == "tiny"
    assert (await api.get("/v1/health")).status == 200
    body = {"messages": [{"role": "user", "content": "hi"}]}
    assert (await api.post("/chat/completions", body)).json()["object"] == "chat.completion"


# ---- what it adds to conversations

HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("text", ["x" * 300, "x" * 100_000])
async def test_a_conversation_that_is_too_long(api, text: str) -> None:
    body = {"messages": [{"role": "user", "content": text}]}
    answer = await api.post("/chat/completions", body)
    told = answer.json()["error"]
    assert (answer.status, told["type"]) == (400, "exceed_context_size_error")
    assert told["code"] == "context_length_exceeded"
    assert (told["n_prompt_tokens"] > 256, told["n_ctx"]) == (True, 256)
    assert (await api.post("/v1/chat/completions", body)).error()["type"] == "invalid_request_error"


async def test_times_and_progress_of_a_conversation(api) -> None:
    body = {
        **{"messages": HI, "stream": True, "stream_options": {"include_usage": True}},
        **{"timings_per_token": True, "return_progress": True},
    }
    first, begin, end, *pieces, usage = (await api.post("/chat/completions", body)).events()
    assert first["choices"][0]["delta"]["content"] is None
    assert "timings" not in first
    progress = [event["prompt_progress"] for event in (begin, end)]
    assert progress[0]["processed"] == progress[0]["cache"]
    assert progress[1]["processed"] == progress[1]["total"] > progress[0]["processed"]
    assert all(event["timings"]["predicted_n"] > 0 for event in pieces)
    assert usage["timings"] == pieces[-1]["timings"]
    del body["timings_per_token"]
    rest = (await api.post("/v1/chat/completions", body)).events()
    assert rest[0]["choices"][0]["delta"]["content"] == ""
    assert all("timings" not in event for event in rest)
    assert sum("prompt_progress" in event for event in rest) == 2


async def test_times_of_a_conversation_in_one_piece(api) -> None:
    body = {"messages": HI, "timings_per_token": True, "id_slot": 1}
    whole = (await api.post("/v1/chat/completions", body)).json()
    assert whole["timings"]["predicted_n"] == whole["usage"]["completion_tokens"]
    assert "timings" not in (await api.post("/v1/chat/completions", {"messages": HI})).json()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_verbose_answer_shows_its_prompt(api, stream: bool) -> None:
    for verbose in (True, False):
        body = {"messages": HI, "verbose": verbose, "stream": stream}
        answer = await api.post("/chat/completions", body)
        first = answer.events()[0] if stream else answer.json()
        assert ("__verbose" in first) is verbose
        if verbose:
            prompt = (await api.post("/apply-template", {"messages": HI})).json()["prompt"]
            assert first["__verbose"] == {"prompt": prompt}


@pytest.mark.parametrize("path", ["/chat/completions", "/v1/chat/completions"])
async def test_tokens_of_a_conversation_are_counted(api, path: str) -> None:
    counted = (await api.post(f"{path}/input_tokens", {"messages": HI})).json()
    usage = (await api.post(path, {"messages": HI})).json()["usage"]
    assert counted == {
        "object": "response.input_tokens",
        "input_tokens": usage["prompt_tokens"],
    }


async def test_a_grammar_of_a_conversation(api) -> None:
    await api.post("/chat/completions", {"messages": HI, "grammar": 'root ::= "a"{5,5}'})
    assert api.endpoint.requests[0].grammar is not None
    answer = await api.post("/chat/completions", {"messages": HI, "grammar": "root ::= (a"})
    assert (answer.status, answer.json()["error"]["param"]) == (400, "grammar")
