# SPDX-License-Identifier: Apache-2.0
"""The bodies of the Responses API. https://platform.openai.com/docs/api-reference/responses"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from pagoda.api.bodies.fields import GenerationFields
from pagoda.api.bodies.ignored_fields import Hint
from pagoda.api.bodies.items import Item
from pagoda.errors import refuse
from pagoda.messages.sampling_params import ALL_LOGPROBS
from pagoda.text.templates.conversation import MAX_MESSAGES, MAX_TOOLS

Include = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
"""Values of `include`. Only the first has an effect: reasoning is sent in clear, so none of it is encrypted, and
the others are about items that Pagoda never makes."""
LOGPROBS: Include = "message.output_text.logprobs"

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Reasoning(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`reasoning`: the effort of the model, and whether its reasoning comes as a summary."""

    effort: Effort | None = None
    summary: Annotated[Any, Hint(("auto", "detailed"))] = None
    """Reasoning is sent whole and never shortened."""
    generate_summary: Annotated[Any, Hint(("auto", "detailed"))] = None
    """The older name of `summary`."""
    context: Literal["auto"] | None = None
    mode: Annotated[Any, Hint(("standard",))] = None


class TextConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`text`: the format of the answer."""

    format: dict[str, Any] | None = None
    verbosity: Annotated[Any, Hint(("medium",))] = None
    """Answers are as long as the model makes them."""


class ConversationName(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`conversation` as an object."""

    id: str


Tools = Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)]
Input = str | Annotated[list[Item], Meta(max_length=MAX_MESSAGES)]


class ResponsesRequest(GenerationFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of a new response. Fields of sampling that OpenAI lacks are those of chat completions."""

    input: Input
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    include: list[Include] | None = None
    top_logprobs: Annotated[int, Meta(ge=ALL_LOGPROBS, lt=2**31)] | None = None
    previous_response_id: str | None = None
    conversation: str | ConversationName | None = None
    store: bool | None = None
    background: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool | None = None
    enable_response_messages: bool | None = None
    """vLLM's: the prompt and the answer as the model saw and wrote them."""

    # No effect on the answer: built-in tools, which the second is about, are left out.
    prompt_cache_options: dict[str, Any] | None = None
    max_tool_calls: int | None = None

    # Not supported: refused but for null and the values beside them.
    prompt: Annotated[Any, ()] = None
    context_management: list[dict[str, Any]] | None = None
    background_options: Annotated[Any, Hint(({"completion_window": "soonest"},))] = None
    access_programs: Annotated[Any, ()] = None
    image: Annotated[Any, ()] = None

    # Fields of chat completions that have no place in a response.
    max_tokens: Annotated[Any, ()] = None
    n: Annotated[Any, (1, 1.0)] = None
    best_of: Annotated[Any, (1, 1.0)] = None
    prompt_logprobs: Annotated[Any, ()] = None
    return_tokens_as_token_ids: Annotated[Any, (False,)] = None
    return_token_ids: Annotated[Any, (False,)] = None

    @property
    def conversation_id(self) -> str | None:
        return _conversation_id(self.conversation)

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    @property
    def is_stored(self) -> bool:
        return self.store is not False

    @property
    def summary(self) -> str | None:
        """The kind of summary in which reasoning is sent; None for reasoning as it is."""
        reasoning = self.reasoning
        return None if reasoning is None else reasoning.summary or reasoning.generate_summary


class InputTokensRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body that asks how many tokens an input has."""

    model: str | None = None
    input: Input | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["auto", "disabled"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    conversation: str | ConversationName | None = None
    personality: Annotated[Any, ()] = None

    @property
    def conversation_id(self) -> str | None:
        return _conversation_id(self.conversation)


def _conversation_id(given: str | ConversationName | None) -> str | None:
    return given.id if isinstance(given, ConversationName) else given


def check_body(body: ResponsesRequest) -> None:
    """Raises InvalidRequestError: two fields do not go together, or a value is not served; names the field."""
    if body.conversation is not None and body.previous_response_id is not None:
        refuse("previous_response_id", "and conversation exclude each other")
    if body.background and not body.is_stored:
        refuse("background", "can only be used when `store` is true")
    options = body.stream_options
    if options is not None and not body.stream:
        refuse("stream_options", "is only for requests with stream: true")
    for name in ("include_obfuscation", "continuous_usage_stats"):
        if options is not None and getattr(options, name):
            refuse(f"stream_options.{name}", "other than false is not supported", "not_supported")
