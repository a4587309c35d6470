# SPDX-License-Identifier: Apache-2.0
"""The bodies of Ollama's API and what they mean in OpenAI's words."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from pagoda.api.bodies.body import Timeout
from pagoda.api.bodies.fields import MAX_TOKEN_IDS, windowed_penalty
from pagoda.api.bodies.ignored_fields import Hint, Ignored
from pagoda.errors import refuse
from pagoda.messages.sampling_params import DRAWS, MAX_STOP_STRINGS, DrawFields
from pagoda.text.model_text import ModelText
from pagoda.text.templates.conversation import MAX_MESSAGES, MAX_PARTS, MAX_TOOLS

Strings = Annotated[list[str], Meta(max_length=MAX_STOP_STRINGS)]
Anything = Annotated[list[Any], Meta(max_length=MAX_PARTS)]


class Options(DrawFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`options`: sampling, and settings of Ollama's own engine."""

    num_predict: int | None = None
    num_ctx: int | None = None
    seed: int | None = None
    stop: Strings | str | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    # Settings of an engine, which do not change an answer.
    num_batch: int | None = None
    num_gpu: int | None = None
    main_gpu: int | None = None
    num_thread: int | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None
    low_vram: bool | None = None
    numa: bool | None = None
    num_keep: int | None = None
    f16_kv: bool | None = None
    vocab_only: Annotated[Any, (False,)] = None
    embedding_only: Annotated[Any, (False,)] = None
    logits_all: bool | None = None
    penalize_newline: Annotated[Any, (True,)] = None
    mirostat: Annotated[Any, (0, 0.0)] = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    tfs_z: Annotated[Any, (1, 1.0)] = None


class FunctionCall(msgspec.Struct, frozen=True):
    name: str
    arguments: dict[str, Any] = {}


class ToolCall(msgspec.Struct, frozen=True):
    function: FunctionCall
    id: str | None = None


class Message(msgspec.Struct, frozen=True):
    """A message; fields that are not known are skipped, as clients send back what they got."""

    role: str
    content: str | None = None
    thinking: str | None = None
    images: Anything | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=MAX_PARTS)] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class GenerateFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields that chat and generate have in common."""

    model: str
    timeout: Timeout | None = None
    stream: bool | None = None
    """A stream is the default."""
    format: str | dict[str, Any] | None = None
    """`json`, or a JSON schema."""
    think: bool | str | None = None
    keep_alive: str | float | None = None
    """Time for which the model stays loaded, which is always."""
    options: Options | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    truncate: bool | None = None
    shift: bool | None = None
    """Shortening, like `truncate`, of prompts that do not fit; such prompts are refused here."""

    # OpenAI's fields, which the AI SDK's provider sends beside `options`; they have no effect with Ollama either.
    temperature: Annotated[Any, Hint()] = None
    top_p: Annotated[Any, Hint()] = None
    max_output_tokens: Annotated[Any, Hint()] = None
    tool_choice: Annotated[Any, Hint(("auto",))] = None


class ChatBody(GenerateFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /api/chat`."""

    messages: Annotated[list[Message], Meta(max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)] | None = None


class GenerateBody(GenerateFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /api/generate`."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    template: str | None = None
    context: Annotated[list[int], Meta(max_length=MAX_TOKEN_IDS)] | None = None
    raw: bool | None = None
    images: Anything | None = None


NAMES = {
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    "response_format": "format",
    "reasoning_effort": "think",
    **{
        name: f"options.{name}"
        for name in Options.__struct_fields__
        if name not in ("num_predict", "repeat_penalty")
    },
}
"""Names in Ollama's API of fields of OpenAI's that have another name or place there."""

_SAME = ("seed", *DRAWS, "stop", "presence_penalty", "frequency_penalty")
_EFFORTS = ("low", "medium", "high")


def common_fields(
    body: GenerateFields, text: ModelText, max_model_len: int, ignored: Ignored
) -> dict[str, Any]:
    """Fields of OpenAI's bodies for what chat and generate have in common; None where nothing is asked for.
    Raises InvalidRequestError: a value is not as it must be; names the field."""
    options = body.options or Options()
    check_options(options, max_model_len, ignored)
    fields: dict[str, Any] = {name: getattr(options, name) for name in _SAME}
    if options.num_predict is not None and options.num_predict >= 0:
        fields["max_tokens"] = options.num_predict
    elif options.num_predict is not None and options.num_predict < -2:
        refuse("options.num_predict", f"must be at least -2, got {options.num_predict}")
    fields["repetition_penalty"] = windowed_penalty(
        options.repeat_penalty,
        options.repeat_last_n,
        max_model_len,
        ignored,
        "options.repeat_last_n",
    )
    if fields["seed"] is not None and fields["seed"] < 0:
        fields["seed"] = None
    fields["response_format"] = _response_format(body.format)
    return {**fields, **_thinking(body.think, text)}


def check_options(options: Options, max_model_len: int, ignored: Ignored) -> None:
    """Notes a context that is longer than the server's: what does not fit is refused when it comes.
    Raises InvalidRequestError: an option has a value that is not served; names the option."""
    for name, neutral in (("vocab_only", False), ("embedding_only", False), ("mirostat", 0)):
        value = getattr(options, name)
        if value is not None and value != neutral:
            refuse(f"options.{name}", f"other than {neutral} is not supported", "not_supported")
    if options.penalize_newline not in (None, True):
        refuse("options.penalize_newline", "other than true is not supported", "not_supported")
    if options.tfs_z not in (None, 1):
        refuse("options.tfs_z", "other than 1 is not supported", "not_supported")
    if options.num_ctx is not None and options.num_ctx > max_model_len:
        ignored.note("options.num_ctx")


def _response_format(value: str | dict[str, Any] | None) -> dict[str, Any] | None:
    if value is None or value == "":
        return None
    if value == "json":
        return {"type": "json_object"}
    if isinstance(value, str):
        refuse("format", "must be 'json' or a JSON schema")
    return {"type": "json_schema", "json_schema": {"name": "format", "schema": value}}


def _thinking(think: bool | str | None, text: ModelText) -> dict[str, Any]:
    """The switch of the template, or the effort, for `think`."""
    template = text.chat_template
    if think is None:
        return {}
    if isinstance(think, str):
        if think not in _EFFORTS:
            refuse("think", f"must be true, false or one of {', '.join(_EFFORTS)}")
        return {"reasoning_effort": think}
    if template is not None and "enable_thinking" in template.switches:
        return {"chat_template_kwargs": {"enable_thinking": think}}
    thinks = text.formats.reasoning is not None
    if think and not thinks:
        refuse("think", "is not possible: this model does not support thinking")
    if thinks and not think:
        refuse("think", "cannot be false: this model always thinks", "not_supported")
    return {}


def chat_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """The messages in OpenAI's form. Raises InvalidRequestError: a message has images."""
    return [_chat_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _chat_message(message: Message, where: str) -> dict[str, Any]:
    if message.images:
        refuse(f"{where}.images", "are not supported: this server reads text only", "not_supported")
    turn: dict[str, Any] = {"role": message.role, "content": message.content or ""}
    if message.thinking:
        turn["reasoning_content"] = message.thinking
    if message.tool_name is not None:
        turn["name"] = message.tool_name
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        turn["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    return turn


def _tool_call(call: ToolCall) -> dict[str, Any]:
    arguments = msgspec.json.encode(call.function.arguments).decode()
    function = {"name": call.function.name, "arguments": arguments}
    turn: dict[str, Any] = {"type": "function", "function": function}
    return turn if call.id is None else {"id": call.id, **turn}
