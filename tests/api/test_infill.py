# SPDX-License-Identifier: Apache-2.0
"""Fill in the middle: tokens of models for it, and the routes of OpenAI, Mistral and Ollama that ask for it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from infill_texts import QWEN_MARKS, fim_text

from pagoda.api.infill import marks_of

FIM = "/v1/fim/completions"


@pytest.mark.parametrize(
    ("marks", "form"),
    [
        (QWEN_MARKS, "{0}ab{1}yz{2}"),
        (("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), "{0}ab{1}yz{2}"),
        (("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"), "{0}ab{1}yz{2}"),
        (("▁<PRE>", "▁<SUF>", "▁<MID>"), "{0}ab{1}yz{2}"),
        (("[PREFIX]", "[SUFFIX]"), "{1}yz{0}ab"),
        (("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>"), "{1}yz{0}ab{2}"),
        (("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"), "{1}yz{0}ab{2}"),
    ],
)
async def test_a_gap_is_asked_for_with_the_tokens_of_the_model(
    serve_api, marks: tuple[str, ...], form: str
) -> None:
    text = fim_text(marks)
    api = await serve_api(text=text)
    answer = await api.complete(prompt="ab", suffix="yz")
    assert answer.choices()[0]["text"] == "ok"
    prompt = api.endpoint.requests[0].prompt_token_ids
    told = text.tokenizer.decode(prompt, skip_special_tokens=False)
    assert told == form.format(*marks)


async def test_what_fills_a_gap_ends_before_another_file(serve_api) -> None:
    text = fim_text((*QWEN_MARKS, "<|file_sep|>", "<|fim_pad|>", "<|endoftext|>"))
    api = await serve_api(text=text)
    await api.complete(prompt="ab", suffix="yz", stop_token_ids=[7])
    ends = marks_of(text.tokenizer).ends
    assert len(ends) == 3
    assert set(api.endpoint.requests[0].work.sampling.stop_token_ids) >= {7, *ends}


async def test_llama_cpps_gaps_end_there_too(serve_api) -> None:
    text = fim_text((*QWEN_MARKS, "<|file_sep|>"))
    api = await serve_api(text=text)
    await api.post("/infill", {"input_prefix": "ab", "input_suffix": "yz"})
    ends = [text.tokenizer.token_id("<|file_sep|>")]
    assert list(api.endpoint.requests[0].work.sampling.stop_token_ids) == ends


async def test_a_text_without_a_gap_is_continued(serve_api) -> None:
    api = await serve_api(text=fim_text())
    for path, body in (("/v1/completions", {"suffix": ""}), (FIM, {}), (FIM, {"suffix": None})):
        assert (await api.post(path, {"prompt": "ab", **body})).status == 200
        assert api.endpoint.requests[-1].prompt_token_ids == [*b"ab"]


async def test_mistrals_route_answers_with_messages(serve_api) -> None:
    api = await serve_api(text=fim_text())
    body: dict[str, Any] = {"model": "tiny", "prompt": "ab", "suffix": "yz", "random_seed": 7}
    whole = (await api.post(FIM, {**body, "max_tokens": 5.0})).json()
    [choice] = whole["choices"]
    assert whole["object"] == "chat.completion"
    assert choice["message"] == {"role": "assistant", "content": "ok"}
    assert choice["finish_reason"] == "stop"
    assert api.endpoint.requests[0].work.sampling.seed == 7
    events = (await api.post(FIM, {**body, "stream": True})).events()
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert "".join(event["choices"][0]["delta"]["content"] for event in events) == "ok"
    assert api.endpoint.requests[1].work.sampling.max_tokens > 200, "as long as the context allows"


async def test_messages_tell_no_probabilities_and_no_prompt(serve_api) -> None:
    api = await serve_api(text=fim_text())
    for name, value in (("logprobs", 0), ("echo", True), ("prompt_logprobs", 1)):
        answer = await api.post(FIM, {"prompt": "ab", name: value})
        assert (answer.status, answer.error()["param"]) == (400, name)


async def test_ollama_fills_gaps(serve_api) -> None:
    api = await serve_api(text=fim_text())
    body = {"model": "tiny", "prompt": "ab", "suffix": "yz", "stream": False}
    assert (await api.post("/api/generate", body)).json()["response"] == "ok"
    marks = [api.service.generator.text.tokenizer.token_id(mark) for mark in QWEN_MARKS]
    expected = [marks[0], *b"ab", marks[1], *b"yz", marks[2]]
    assert api.endpoint.requests[0].prompt_token_ids == expected
    shown = (await api.post("/api/show", {"model": "tiny"})).json()
    assert "insert" in shown["capabilities"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "ab", "suffix": "yz", "echo": True}, "echo"),
        ({"prompt": [1, 2], "suffix": "yz"}, "prompt"),
        ({"prompt": "ab", "suffix": 5}, "suffix"),
        ({"prompt": "ab", "suffix": "y" * 5000}, "suffix"),
    ],
)
async def test_what_goes_not_with_a_gap(serve_api, body: dict[str, Any], param: str) -> None:
    api = await serve_api(text=fim_text())
    assert (await api.post("/v1/completions", body)).error()["param"] == param


async def test_a_text_behind_many_gaps_is_bounded(serve_api) -> None:
    """A small body would else become a thousand times as many tokens."""
    api = await serve_api(text=fim_text(), max_model_len=4096)
    body = {"prompt": ["ab"] * 400, "suffix": "y" * 2000}
    error = (await api.post("/v1/completions", body)).error()
    assert (error["param"], "in all prompts together" in error["message"]) == ("suffix", True)
    few = await api.post("/v1/completions", {**body, "prompt": ["ab"] * 2})
    assert [choice["text"] for choice in few.choices()] == ["ok", "ok"]


async def test_a_model_without_such_tokens(api) -> None:
    for path in ("/v1/completions", FIM):
        error = (await api.post(path, {"prompt": "ab", "suffix": "yz"})).error()
        assert error["param"] == "suffix"
        assert "no tokens" in error["message"]
    body = {"model": "tiny", "prompt": "ab", "suffix": "yz"}
    answer = await api.post("/api/generate", body)
    assert json.loads(answer.body)["error"].startswith("suffix")
