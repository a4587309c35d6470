# SPDX-License-Identifier: Apache-2.0
"""Ollama's API."""

from __future__ import annotations

import json
import re
from functools import partial
from typing import Any

import pytest

from pagoda.checkpoints.card import read_card
from pagoda.checkpoints.resolve import resolve_model
from pagoda.text.model_text import ModelText, synthetic_model_text
from pagoda.text.templates.chat_template import ChatTemplate
from pagoda.version import __version__

THINKS = (
    "{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ tools }}<tool_call></think>"
)
_base = synthetic_model_text()
THINKING = ModelText(_base.tokenizer, ChatTemplate(THINKS, special_tokens={}), _base.eos_token_ids)
HI = [{"role": "user", "content": "hi"}]


def lines(answer: Any) -> list[Any]:
    assert answer.status == 200
    assert answer.headers["Content-Type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.body.splitlines()]


async def test_chat_streams_lines(api) -> None:
    got = lines(await api.post("/api/chat", {"model": "tiny:latest", "messages": HI}))
    assert [line["message"]["content"] for line in got] == ["o", "k", ""]
    assert [line["done"] for line in got] == [False, False, True]
    last = got[-1]
    assert (last["done_reason"], last["model"], last["eval_count"]) == ("stop", "tiny:latest", 3)
    assert last["prompt_eval_count"] == len(api.endpoint.requests[0].prompt_token_ids)
    assert all(last[name] >= 0 for name in ("total_duration", "eval_duration", "load_duration"))


async def test_chat_in_one_piece(api) -> None:
    answer = await api.post("/api/chat", {"model": "tiny", "messages": HI, "stream": False})
    assert answer.json()["message"] == {"role": "assistant", "content": "ok"}
    assert answer.json()["done"] is True


async def test_options_are_sampling(api) -> None:
    options = {"num_predict": 1, "seed": 7, "temperature": 0, "top_k": 3, "repeat_penalty": 1.5}
    body = {"model": "tiny", "messages": HI, "stream": False, "options": {**options, "num_ctx": 64}}
    answer = await api.post("/api/chat", {**body, "keep_alive": "5m"})
    assert answer.json()["done_reason"] == "length"
    sampling = api.endpoint.requests[0].work.sampling
    assert (sampling.max_tokens, sampling.seed, sampling.temperature) == (1, 7, 0.0)
    assert (sampling.top_k, sampling.repetition_penalty) == (3, 1.5)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"temperature": -1}, "options.temperature"),
        ({"mirostat": 1}, "options.mirostat"),
        ({"num_predict": -3}, "options.num_predict"),
        ({"stop": [1]}, "options.stop"),
        ({"unheard": 1}, "options.unheard"),
    ],
)
async def test_what_is_refused_is_named(api, options: dict[str, Any], word: str) -> None:
    answer = await api.post("/api/chat", {"model": "tiny", "messages": HI, "options": options})
    assert answer.status == 400
    assert list(answer.json()) == ["error"]
    assert answer.json()["error"].startswith(word)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"template": "x"}, "template"),
        ({"images": ["aGk="]}, "images"),
        ({"context": [1]}, "context"),
        ({"raw": True, "system": "x"}, "system"),
        ({"format": "xml"}, "format"),
        ({"think": True}, "think"),
        ({"think": "hard"}, "think"),
    ],
)
async def test_generate_refuses_by_name(api, fields: dict[str, Any], word: str) -> None:
    answer = await api.post("/api/generate", {"model": "tiny", "prompt": "hi", **fields})
    assert (answer.status, answer.json()["error"].split(" ")[0]) == (400, word)


async def test_images_in_messages_are_refused(api) -> None:
    turn = {"role": "user", "content": "hi", "images": ["aGk="]}
    answer = await api.post("/api/chat", {"model": "tiny", "messages": [turn]})
    assert (answer.status, "messages[0].images" in answer.json()["error"]) == (400, True)


async def test_generate_takes_the_template_or_not(api) -> None:
    body = {"model": "tiny", "prompt": "hi", "stream": False}
    answer = (await api.post("/api/generate", {**body, "system": "be"})).json()
    assert (answer["response"], answer["done"]) == ("ok", True)
    answer = (await api.post("/api/generate", {**body, "raw": True})).json()
    assert answer["response"] == "ok"
    templated, raw = (request.prompt_token_ids for request in api.endpoint.requests)
    assert bytes(raw) == b"hi"
    assert len(templated) > len(raw)
    assert api.endpoint.requests[1].work.sampling.max_tokens == 254


async def test_nothing_to_answer_loads_the_model(api) -> None:
    for path in ("/api/chat", "/api/generate"):
        assert (await api.post(path, {"model": "tiny"})).json()["done_reason"] == "load"
        refused = await api.post(path, {"model": "tiny", "keep_alive": 0})
        assert (refused.status, "keep_alive" in refused.json()["error"]) == (400, True)


async def test_thinking_and_tools(serve_api) -> None:
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    api = await serve_api("<think>hm</think>well" + call, text=THINKING)
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    body = {"model": "tiny", "messages": HI, "tools": tools, "think": True}
    whole = (await api.post("/api/chat", {**body, "stream": False})).json()["message"]
    made = [{"function": {"name": "add", "arguments": {"a": 1}}}]
    assert whole == {"role": "assistant", "content": "well", "thinking": "hm", "tool_calls": made}
    streamed = [line["message"] for line in lines(await api.post("/api/chat", body))]
    assert "".join(message["content"] for message in streamed) == "well"
    assert "".join(message.get("thinking", "") for message in streamed) == "hm"
    assert [m["tool_calls"] for m in streamed if "tool_calls" in m] == [made]
    again = [*HI, whole, {"role": "tool", "tool_name": "add", "content": "2"}]
    answer = await api.post("/api/chat", {**body, "messages": again, "stream": False})
    assert answer.status == 200
    assert b"tool: 2" in bytes(i for i in api.endpoint.requests[-1].prompt_token_ids if i < 256)


async def test_a_call_that_is_cut_off_is_no_call(serve_api) -> None:
    api = await serve_api('<tool_call>{"name": "add", "arguments": {"a"', text=THINKING)
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    body = {"model": "tiny", "messages": HI, "tools": tools, "options": {"num_predict": 30}}
    got = lines(await api.post("/api/chat", body))
    assert not any("tool_calls" in line["message"] for line in got)


async def test_an_error_in_a_stream_is_a_line(serve_api) -> None:
    api = await serve_api("hello")
    api.endpoint.breaks_after = 2
    *_, last = lines(await api.post("/api/chat", {"model": "tiny", "messages": HI}))
    assert list(last) == ["error"]


async def test_logprobs_as_the_client_reads_them(api) -> None:
    body = {"model": "tiny", "messages": HI, "logprobs": True, "top_logprobs": 1, "stream": False}
    answer = (await api.post("/api/chat", body)).json()
    assert answer["logprobs"][0]["token"] == "o"


async def test_models(api) -> None:
    [listed] = (await api.get("/api/tags")).json()["models"]
    assert (listed["name"], listed["model"]) == ("tiny:latest", "tiny:latest")
    [loaded] = (await api.get("/api/ps")).json()["models"]
    assert loaded["context_length"] == 256
    shown = (await api.post("/api/show", {"model": "tiny:latest"})).json()
    assert "message.role" in shown["template"]
    assert shown["capabilities"] == ["completion", "tools"]
    assert shown["model_info"]["unknown.context_length"] == 256
    assert (await api.post("/api/show", {"name": "other"})).status == 404
    assert (await api.post("/api/show", {})).status == 400
    said = (await api.get("/api/version")).json()
    assert tuple(map(int, said["version"].split("."))) >= (0, 6, 4), "Copilot refuses older ones"
    assert said["pagoda"] == __version__


async def test_models_as_editors_read_them(serve_api) -> None:
    """Zed wants size, digest and details of every model, Copilot the architecture with its context; both read the
    abilities."""
    files = resolve_model(None)
    api = await serve_api(read_card=partial(read_card, files))
    for path in ("/api/tags", "/api/ps"):
        [listed] = (await api.get(path)).json()["models"]
        assert listed["size"] == (files.directory / "model.safetensors").stat().st_size
        assert re.fullmatch("[0-9a-f]{64}", listed["digest"])
        assert listed["modified_at"]
        details = listed["details"]
        assert details == {
            "parent_model": "",
            "format": "safetensors",
            "family": "qwen3",
            "families": ["qwen3"],
            "parameter_size": "3.39M",
            "quantization_level": "BF16",
        }
    assert listed["size_vram"] == listed["size"]
    shown = (await api.post("/api/show", {"model": "tiny"})).json()
    info = shown["model_info"]
    architecture = info["general.architecture"]
    assert (architecture, info[f"{architecture}.context_length"]) == ("qwen3", 256)
    assert (info["general.parameter_count"], info["qwen3.block_count"]) == (3394304, 4)
    assert shown["details"] == details
    assert shown["modelfile"]


async def test_models_are_the_operators(api) -> None:
    for path in ("/api/pull", "/api/push", "/api/create", "/api/copy"):
        answer = await api.post(path, {"model": "tiny"})
        assert (answer.status, path in answer.json()["error"]) == (501, True)
    answer = await api.request("DELETE", "/api/delete")
    assert answer.status == 501
    assert list((await api.get("/api/pull")).json()) == ["error"]
