# SPDX-License-Identifier: Apache-2.0
"""No body, however it is made, gives the event loop more than bounded work in a turn; every route has its bodies.

The bodies are at the limits of their APIs: most texts, most messages, the longest lists. What a turn of the loop
does is counted, so a quiet machine is not needed.
"""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from loop_watch import watched_loop

from pagoda.api.adapters import LoadLoraAdapter, UnloadLoraAdapter
from pagoda.api.bodies.body import LARGE_BODY_BYTES
from pagoda.api.monitoring.profile import StartBody
from pagoda.api.openai.bodies import ChatRequest, CompletionRequest, FimRequest
from pagoda.api.openai.stored_chats import MetadataBody
from pagoda.api.routes import ROUTES
from pagoda.api.tokenization import DetokenizeRequest, TokenizeRequest
from pagoda.concurrency.async_utils import LONG_TEXT_CHARS
from pagoda.plugins.anthropic.bodies import CountTokensRequest, MessagesRequest
from pagoda.plugins.batches.handlers import CreateBatch
from pagoda.plugins.llamacpp.bodies import CompletionBody, InfillBody
from pagoda.plugins.llamacpp.embedding import EmbeddingBody
from pagoda.plugins.llamacpp.server import TemplateBody
from pagoda.plugins.ollama.bodies import ChatBody
from pagoda.plugins.ollama.bodies import GenerateBody as OllamaGenerateBody
from pagoda.plugins.ollama.embeddings import EmbedBody, EmbeddingsBody
from pagoda.plugins.ollama.models import ShowBody
from pagoda.plugins.responses.bodies import InputTokensRequest, ResponsesRequest
from pagoda.plugins.responses.conversations.routes import ConversationBody
from pagoda.plugins.router.routes import RoleBody
from pagoda.plugins.scoring.classify import ClassifyRequest, PoolingRequest
from pagoda.plugins.scoring.embeddings import EmbeddingRequest
from pagoda.plugins.scoring.generative import GenerativeScoringRequest
from pagoda.plugins.scoring.rerank import RerankRequest, ScoreRequest
from pagoda.plugins.sglang.bodies import GenerateBody
from pagoda.plugins.vllm.server import ChatBatchRequest
from pagoda.plugins.vllm.tokens import TokensBody

MOST_OPERATIONS = 50_000
"""Operations of one turn; some milliseconds."""
WORDS = "word " * 100
LONG = "word " * 20_000
IDS = [7] * 30_000
BIAS = {str(i % 512): 1.0 for i in range(512)}


def _turns(count: int, text: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i in range(count)]


def _tools(count: int) -> list[dict[str, Any]]:
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(200)}}
    return [
        {"type": "function", "function": {"name": f"f{i}", "parameters": schema}}
        for i in range(count)
    ]


def _chats() -> list[dict[str, Any]]:
    return [
        {"messages": _turns(8191, "a"), "store": True},
        {"messages": _turns(801, WORDS)},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 1024}] * 15},
        {"messages": _turns(1, LONG), "max_tokens": 1},
        {"messages": _turns(1, "a"), "tools": _tools(128)},
        {"messages": _turns(1, "a"), "logit_bias": BIAS, "stop": ["x" * 1024] * 16},
        {"messages": _turns(1, "a"), "n": 128, "logprobs": True, "top_logprobs": 20},
    ]


def _items(count: int, text: str) -> list[dict[str, Any]]:
    return [{"type": "message", **turn} for turn in _turns(count, text)]


def _embeddings() -> list[dict[str, Any]]:
    return [
        {"input": [WORDS] * 300},
        {"input": ["a"] * 700, "encoding_format": "float"},
        {"input": [[7] * 20] * 500},
        {"input": LONG},
    ]


def _completions(prompt: str) -> list[dict[str, Any]]:
    return [
        {prompt: [WORDS] * 200},
        {prompt: ["a"] * 700},
        {prompt: LONG},
    ]


SCHEMA = {"type": "object", "properties": {f"p{i}": {"enum": ["x"] * 20} for i in range(1000)}}

BODIES: dict[object, Callable[[], list[dict[str, Any]]]] = {
    CompletionRequest: lambda: [
        *_completions("prompt"),
        {"prompt": [[7] * 50] * 500, "logit_bias": BIAS},
        {"prompt": "a", "n": 128, "logprobs": 20, "echo": True},
        {"prompt": [WORDS] * 100, "echo": True, "logprobs": 5, "max_tokens": 0},
        {"prompt": "a", "guided_choice": ["x" * 20] * 5000},
        {"prompt": "a", "guided_json": SCHEMA},
        {"prompt": "a", "stop_token_ids": [7] * 1000, "allowed_token_ids": [7] * 16384},
    ],
    ChatBatchRequest: lambda: [
        {"messages": [_turns(3, WORDS)] * 200},
        {"messages": [_turns(1, "a")] * 500, "logit_bias": BIAS},
        {"messages": [_turns(1001, "a")] * 10},
    ],
    FimRequest: lambda: [{"prompt": LONG, "suffix": LONG}, {"prompt": "a", "stop": [WORDS] * 8}],
    ChatRequest: _chats,
    EmbeddingRequest: _embeddings,
    PoolingRequest: _embeddings,
    ClassifyRequest: _embeddings,
    GenerativeScoringRequest: lambda: [
        {"query": "a", "items": [WORDS] * 200, "label_token_ids": [1, 2]},
        {"query": WORDS, "items": ["a"] * 300, "label_token_ids": [1]},
        {"query": "a", "items": [[7] * 20] * 300, "label_token_ids": [1]},
    ],
    ScoreRequest: lambda: [
        {"text_1": WORDS, "text_2": [WORDS] * 300},
        {"text_1": ["a"] * 700, "text_2": ["a"] * 700},
    ],
    RerankRequest: lambda: [
        {"query": "a", "documents": [WORDS] * 300},
        {"query": WORDS * 20, "documents": ["a"] * 700},
        {"query": "a", "texts": [WORDS] * 300, "truncate": True, "return_text": True},
    ],
    MessagesRequest: lambda: [
        {"max_tokens": 1, "messages": _turns(8191, "a")},
        {"max_tokens": 1, "messages": _turns(801, WORDS)},
        {"max_tokens": 1, "system": LONG, "messages": _turns(1, "a")},
    ],
    CountTokensRequest: lambda: [
        {"messages": _turns(4001, "a")},
        {"messages": _turns(801, WORDS)},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 8000}]},
    ],
    ResponsesRequest: lambda: [
        {"input": _items(8001, "a"), "max_output_tokens": 1},
        {"input": _items(801, WORDS), "max_output_tokens": 1},
        {"input": LONG, "instructions": LONG},
        {"input": [{**item, "id": f"m{i}"} for i, item in enumerate(_items(4001, "a"))]},
        {"input": [{"type": "item_reference", "id": f"m{i}"} for i in range(4001)]},
    ],
    InputTokensRequest: lambda: [{"input": _items(8001, "a")}, {"input": LONG}],
    ConversationBody: lambda: [
        {"items": _items(8001, "a")},
        {"items": _items(801, WORDS)},
        {"metadata": {f"k{i}": "x" * 512 for i in range(16)}},
    ],
    MetadataBody: lambda: [{"metadata": {f"k{i}": "x" * 512 for i in range(16)}}],
    TokenizeRequest: lambda: [
        {"prompt": LONG, "return_token_strs": True},
        {"content": LONG, "with_pieces": True},
        {"messages": _turns(4001, "a")},
    ],
    DetokenizeRequest: lambda: [{"tokens": IDS}],
    ChatBody: lambda: [
        {"model": "tiny", "messages": _turns(8191, "a")},
        {"model": "tiny", "messages": _turns(801, WORDS)},
    ],
    OllamaGenerateBody: lambda: [
        {"model": "tiny", "prompt": LONG, "system": LONG},
        {"model": "tiny", "prompt": LONG, "raw": True},
    ],
    EmbedBody: lambda: [{"model": "tiny", "input": [WORDS] * 300}],
    EmbeddingsBody: lambda: [{"model": "tiny", "prompt": LONG}],
    CompletionBody: lambda: [
        *_completions("prompt"),
        {"prompt": ["a", 7] * 1000},
        {"prompt": "a", "logit_bias": [[WORDS, 1.0]] * 1000},
        {"prompt": "a", "logit_bias": [["a", 1.0]] * 1000},
        {"prompt": [[7] * 20] * 500, "logit_bias": [[i, 1.0] for i in range(512)]},
    ],
    InfillBody: lambda: [
        {"input_prefix": LONG, "input_suffix": LONG},
        {"input_prefix": "a", "input_suffix": "a", "input_extra": [{"text": WORDS}] * 64},
    ],
    EmbeddingBody: lambda: [{"content": [WORDS] * 300}, {"input": ["a", 7] * 500}],
    TemplateBody: lambda: [{"messages": _turns(8191, "a")}, {"messages": _turns(801, WORDS)}],
    TokensBody: lambda: [{"token_ids": IDS}],
    GenerateBody: lambda: [
        *_completions("text"),
        {"input_ids": [[7] * 20] * 500, "sampling_params": {"logit_bias": BIAS}},
        {"input_ids": [[7] * 20] * 500, "sampling_params": [{"n": 1}] * 500},
        {"text": [WORDS] * 20, "return_logprob": True, "logprob_start_len": 0},
    ],
    # No text of these bodies is worked on.
    LoadLoraAdapter: lambda: [{"lora_name": "a", "lora_path": LONG}],
    UnloadLoraAdapter: lambda: [{"lora_name": LONG}],
    ShowBody: lambda: [{"model": LONG}],
    RoleBody: lambda: [{"role": LONG}],
    StartBody: lambda: [{"level": LONG}],
    CreateBatch: lambda: [{"input_file_id": LONG, "endpoint": "", "completion_window": ""}],
}
"""Bodies by their type."""

PATHS: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "/invocations": lambda: [*_chats(), *_completions("prompt")],
}
"""Bodies of routes that do not say their type."""
BODILESS = frozenset(
    {"/v1/responses/*", "/profile/stop", "/stop_profile", "/v1/batches/*", "/v1/files", "/ping"}
    | {"/v1/audio/transcriptions", "/v1/audio/translations"}
)
"""Routes that read no JSON."""


def _posts() -> Iterator[tuple[str, str, list[dict[str, Any]]]]:
    """Methods and paths of all routes with a body, and their bodies."""
    seen = set()
    for path, methods in ROUTES.items():
        for method, route in methods.items():
            if method in ("GET", "DELETE") or not route.is_offered or path in BODILESS:
                continue
            work = getattr(route.handler, "func", route.handler), path if "*" in path else ""
            if work in seen:  # several paths for one
                continue
            seen.add(work)
            assert route.body in BODIES or path in PATHS, f"{path} needs bodies at its limits here"
            yield method, path, BODIES[route.body]() if route.body else PATHS[path]()


def _send(
    port: int, method: str, path: str, body: bytes, headers: dict[str, str]
) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json", **headers})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


POSTS = list(_posts())


@pytest.mark.parametrize(
    ("method", "path", "bodies"),
    POSTS,
    ids=[path if method == "POST" else f"{method} {path}" for method, path, _ in POSTS],
)
async def test_no_body_takes_the_loop_for_long(
    serve_api: Any,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    path: str,
    bodies: list[dict[str, Any]],
) -> None:
    api = await serve_api(max_model_len=1 << 18)
    if path == "/v1/conversations/*":
        made = (await api.post("/v1/conversations", {})).json()
        path = f"/v1/conversations/{made['id']}/items"
    for body in bodies:
        text = json.dumps(body).encode()
        with monkeypatch.context() as patch, watched_loop(patch) as work:
            status, answer = await asyncio.to_thread(_send, api.port, method, path, text, {})
        told = f"{path} {text[:80]!r} {status} {answer[:200]!r}: {work}"
        assert status < 500 or status == 501, told
        assert work.longest <= MOST_OPERATIONS, told
        assert work.num_chars["parse_body"] <= 2 * LARGE_BODY_BYTES, told
        assert work.num_chars["encode"] + work.num_chars["encode_pair"] <= 3 * LONG_TEXT_CHARS, told
        assert work.num_chars["decode"] <= 3 * LONG_TEXT_CHARS, told
