# SPDX-License-Identifier: Apache-2.0
"""The bodies of text and chat completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from pagoda.api.bodies.fields import MAX_TOKEN_IDS, GenerationFields, TokenIds
from pagoda.errors import refuse
from pagoda.messages.sampling_params import ALL_LOGPROBS, TokenId
from pagoda.text.templates.conversation import MAX_TOOLS, Messages

MAX_SEQUENCES_PER_BODY = 1024
"""Most answers that one body may ask for: prompts times `n`."""
DEFAULT_COMPLETION_TOKENS = 16

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Tools = Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)]


class CompletionRequest(GenerationFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    prompt: str | Annotated[list[str | TokenId | TokenIds], Meta(max_length=MAX_TOKEN_IDS)]
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None
    """The text behind the gap that the answer fills."""


class FimRequest(CompletionRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Mistral's body for filling in the middle. https://docs.mistral.ai/api/endpoint/fim"""

    prompt: str


class ChatRequest(GenerationFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    messages: Messages
    store: bool | None = None
    """True keeps the answer, but for streams; see `pagoda.api.openai.stored_chats`."""
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=ALL_LOGPROBS, lt=2**31)] | None = None
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    include_reasoning: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    stream_reasoning: bool | None = None
    """SGLang's: false streams reasoning in one piece, when it has ended."""
    thinking_token_budget: Annotated[int, Meta(ge=0)] | None = None
    """Tokens of reasoning, behind which it ends (vLLM)."""
    functions: Tools | None = None
    """OpenAI's name of tools before it had them, as is `function_call` of their choice."""
    function_call: str | dict[str, Any] | None = None
    modalities: Annotated[Any, (["text"],)] = None
    echo: Annotated[Any, (False,)] = None
    separate_reasoning: bool | None = None
    """False leaves reasoning where the model wrote it, in the content (SGLang)."""
    parse_tool_calls: Annotated[Any, (True,)] = None
    timings_per_token: bool | None = None
    """True tells the times of the answer so far, by llama.cpp's names, in every event and with the usage."""
    return_progress: bool | None = None
    """True begins a stream with two events about the prompt (llama.cpp)."""
    verbose: bool | None = None
    """True shows the text of the prompt (llama.cpp)."""


def prompts_of(body: CompletionRequest) -> list[str | list[int]]:
    """The prompts of a body: a string, token ids, or a list of either.
    Raises InvalidRequestError: the list is empty, mixed, or too long."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        refuse("prompt", "is an empty list")
    kinds_of_items = set(map(type, prompt))
    if kinds_of_items == {int}:
        return [prompt]  # type: ignore[list-item]
    if kinds_of_items not in ({str}, {list}):
        kinds = "a string, token ids, a list of strings or a list of lists of token ids"
        refuse("prompt", f"must be {kinds}")
    total = len(prompt) * (body.best_of or body.n or 1)
    if total > MAX_SEQUENCES_PER_BODY:
        rule = f"asks for {total} answers in one body; at most {MAX_SEQUENCES_PER_BODY} are served"
        refuse("prompt", rule)
    return prompt  # type: ignore[return-value]


def chat_logprobs_count(body: ChatRequest) -> int | None:
    """Number of most likely tokens per position that a chat body asks for; None without log-probabilities.
    Raises InvalidRequestError: `top_logprobs` is given without `logprobs`."""
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        refuse("top_logprobs", "needs logprobs: true")
    return None


def chat_max_tokens(body: ChatRequest) -> int | None:
    """`max_completion_tokens`, or its older name. Raises InvalidRequestError: both are given and differ, or one is
    less than 1."""
    old, new = body.max_tokens, body.max_completion_tokens
    for name, value in (("max_tokens", old), ("max_completion_tokens", new)):
        if value is not None and value < 1:
            refuse(name, f"must be at least 1, got {value}")
    if old is not None and new is not None and old != new:
        refuse("max_completion_tokens", "and max_tokens are both given and differ")
    return old if new is None else new
