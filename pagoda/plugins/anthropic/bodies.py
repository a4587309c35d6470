# SPDX-License-Identifier: Apache-2.0
"""The bodies of the Messages API. https://docs.anthropic.com/en/api/messages"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from pagoda.api.bodies.fields import GenerationFields
from pagoda.api.bodies.ignored_fields import Hint
from pagoda.messages.sampling_params import MAX_STOP_STRINGS
from pagoda.text.templates.conversation import MAX_MESSAGES, MAX_PARTS, MAX_TOOLS

Block = dict[str, Any]
"""A block of content, as Anthropic spells it."""
Blocks = str | Annotated[list[Block], Meta(max_length=MAX_PARTS)]


class InputMessage(msgspec.Struct, frozen=True):
    """One message. Unknown fields are ignored, as in chat completions."""

    role: Literal["user", "assistant", "system"]
    content: Blocks


class ToolDefinition(msgspec.Struct, frozen=True):
    """A tool of the client, or one that another server would run, which need not have a name."""

    name: str = ""
    type: str | None = None
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class ToolChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`tool_choice`: whether the answer may, must or must not call tools, and how many."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`thinking`: whether the model thinks before it answers."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Meta(ge=1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`output_config.format`: the schema of the answer."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`output_config`: the effort of the model, and the format of its answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class ContextManagement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`context_management`: edits of the conversation, of which those are served that change nothing."""

    edits: Annotated[list[dict[str, Any]], Meta(max_length=MAX_PARTS)] = []


class CountTokensRequest(GenerationFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body that asks how many tokens a prompt has. Fields of sampling that Anthropic lacks are those of chat
    completions."""

    messages: Annotated[list[InputMessage], Meta(max_length=MAX_MESSAGES)]
    system: Blocks | None = None
    tools: Annotated[list[ToolDefinition], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    stop_sequences: Annotated[list[str], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    # No effect on the answer, but that `metadata.user_id` may name the session: prompts are always cached.
    metadata: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None

    # Not supported: refused but for null and the values beside them.
    container: Annotated[Any, ()] = None

    # Without them an answer is as good: one tier and speed, one place; tools of servers are left out.
    service_tier: Annotated[Any, Hint(("auto", "standard_only"))] = None
    mcp_servers: Annotated[Any, Hint(([],))] = None
    diagnostics: Annotated[Any, Hint()] = None
    inference_geo: Annotated[Any, Hint(("global",))] = None
    speed: Annotated[Any, Hint(("standard",))] = None

    # Fields of chat completions that have no place in a message.
    stop: Annotated[Any, ([],)] = None
    stream_options: Annotated[Any, ({},)] = None
    n: Annotated[Any, (1, 1.0)] = None
    best_of: Annotated[Any, (1, 1.0)] = None
    prompt_logprobs: Annotated[Any, ()] = None
    return_token_ids: Annotated[Any, (False,)] = None
    return_tokens_as_token_ids: Annotated[Any, (False,)] = None


class MessagesRequest(CountTokensRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of a new message."""

    max_tokens: Annotated[int, Meta(ge=1)]
