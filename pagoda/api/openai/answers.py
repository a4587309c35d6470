# SPDX-License-Identifier: Apache-2.0
"""The types of answers in one piece, for `/openapi.json` and the clients that are generated from it.

Answers are put together as dicts; further fields may stand beside these. The names are those of OpenAI's API
(https://platform.openai.com/docs/api-reference), and of vLLM for what it adds.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None


class FunctionCall(msgspec.Struct, frozen=True):
    name: str
    arguments: str
    """JSON text."""


class ToolCall(msgspec.Struct, frozen=True):
    id: str
    type: Literal["function"]
    function: FunctionCall


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None
    function_call: FunctionCall | None = None


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: dict[str, Any] | None
    finish_reason: str
    stop_reason: int | str | None = None


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    service_tier: str | None = None


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: str
    stop_reason: int | str | None = None


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage
    service_tier: str | None = None


class Vector(msgspec.Struct, frozen=True):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str
    """Base64 text of little-endian float32 with `encoding_format: base64`."""


class Embeddings(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Vector]
    usage: Usage


class Score(msgspec.Struct, frozen=True):
    object: Literal["score"]
    index: int
    score: float


class Scores(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: Usage


class Model(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int


class ModelList(msgspec.Struct, frozen=True):
    object: Literal["list"]
    data: list[Model]
