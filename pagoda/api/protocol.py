"""The bodies of requests: the fields of OpenAI's API and those that vLLM adds.

A field works, or it is refused unless its value changes nothing. Unknown fields are refused by name. A field that
is null counts as left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, TypeVar, cast, get_type_hints

import msgspec
from msgspec import Meta

from pagoda.errors import InvalidRequestError, refuse
from pagoda.frontend.conversation import MAX_TOOLS, Messages
from pagoda.messages.sampling_params import (
    MAX_ALLOWED_TOKENS,
    MAX_LOGPROBS,
    MAX_STOP_STRINGS,
    MAX_TOKEN_LIST,
    SamplingParams,
    TokenId,
)

MAX_SEQUENCES_PER_BODY = 1024
"""Most answers that one body may ask for: prompts times `n`."""
DEFAULT_COMPLETION_TOKENS = 16
MAX_TOKEN_IDS = 2**20
"""Most token ids in one list; longer than the context of any model."""
MAX_SESSION_CHARS = 256
"""Names of sessions are cut to this length."""

T = TypeVar("T")

TokenIds = Annotated[list[TokenId], Meta(max_length=MAX_TOKEN_IDS)]
Tools = Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`stream_options`: what a stream tells besides tokens."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


TransferId = Annotated[str, Meta(pattern=r"^[^\x00-\x1f\x7f-\x9f\ud800-\udfff]{1,256}\Z")]
HostName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?\Z")]
BlockId = Annotated[int, Meta(ge=0, lt=2**31)]


class KVTransferParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`kv_transfer_params`, as vLLM and ATOM spell them. Every field is checked, also without an effect here."""

    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None
    remote_engine_id: TransferId | None = None
    remote_block_ids: Annotated[list[BlockId], Meta(max_length=MAX_TOKEN_IDS)] | None = None
    remote_host: HostName | None = None
    remote_port: Annotated[int, Meta(ge=1, le=65535)] | None = None
    tp_size: Annotated[int, Meta(ge=1, le=2**16)] | None = None
    dp_rank: Annotated[int, Meta(ge=0, le=2**16)] | None = None
    transfer_id: TransferId | None = None


class GenerationFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields that completions and chat completions have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    seed: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[TokenId, float], Meta(max_length=MAX_TOKEN_LIST)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_ALLOWED_TOKENS)] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | Annotated[list[str], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_TOKEN_LIST)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    n: int | None = None
    return_token_ids: bool | None = None
    priority: Annotated[int, Meta(ge=-(2**31) + 1, le=2**31 - 1)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    add_special_tokens: bool | None = None
    kv_transfer_params: KVTransferParams | None = None

    # No effect on the answer, by OpenAI's definition, as the bound; the first two may name the request's session.
    prompt_cache_key: str | None = None
    user: str | None = None
    metadata: Annotated[dict[str, str], Meta(max_length=16)] | None = None

    best_of: Any = None
    """Only `n` itself is allowed."""

    # Not supported yet: refused but for null and the values beside them, which change nothing.
    store: Annotated[Any, (False,)] = None
    service_tier: Annotated[Any, ("auto", "default")] = None
    bad_words: Annotated[Any, ([],)] = None
    prompt_logprobs: Annotated[Any, ()] = None
    response_format: Annotated[Any, ({"type": "text"},)] = None
    structured_outputs: Annotated[Any, ()] = None
    guided_json: Annotated[Any, ()] = None
    guided_regex: Annotated[Any, ()] = None
    guided_choice: Annotated[Any, ()] = None
    guided_grammar: Annotated[Any, ()] = None


class CompletionRequest(GenerationFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    prompt: str | Annotated[list[str | TokenId | TokenIds], Meta(max_length=MAX_TOKEN_IDS)]
    echo: bool | None = None
    logprobs: int | None = None
    suffix: Annotated[Any, ("",)] = None


class ChatRequest(GenerationFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Tools | None = None
    tool_choice: Annotated[Any, ("auto", "none")] = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    include_reasoning: bool | None = None
    reasoning_effort: Annotated[Any, ()] = None
    functions: Annotated[Any, ([],)] = None
    function_call: Annotated[Any, ("none", "auto")] = None
    modalities: Annotated[Any, (["text"],)] = None


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /tokenize`: a text, or a conversation as the model would see it."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tokens: TokenIds
    model: str | None = None


_MAX_QUOTED_CHARS = 256
_PLACE = re.compile(r" - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`$")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*)`$", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<name>.*)`$")


@cache
def _neutral_values(kind: type[GenerationFields]) -> dict[str, tuple[object, ...]]:
    """The fields that are not supported yet, with the values (besides null) that change nothing."""
    hints = get_type_hints(kind, include_extras=True)
    notes = {name: getattr(hint, "__metadata__", (None,))[0] for name, hint in hints.items()}
    return {name: note for name, note in notes.items() if isinstance(note, tuple)}


@cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def parse_body(body: bytes, kind: type[T]) -> T:
    """Decodes and checks a JSON body.
    Raises InvalidRequestError: the body is not JSON, or not such a body; names the field."""
    try:
        parsed: T = _decoder(cast(Any, kind)).decode(body)
    except msgspec.ValidationError as error:
        raise _invalid_field(str(error)) from None
    except RecursionError:
        raise InvalidRequestError("the body is nested too deeply.", kind="invalid_json") from None
    except UnicodeDecodeError:
        raise InvalidRequestError("the body is not valid UTF-8.", kind="invalid_json") from None
    except ValueError as error:
        message = f"the body is not valid JSON: {error}."
        raise InvalidRequestError(message, kind="invalid_json") from None
    if isinstance(parsed, GenerationFields):
        _check_neutral(parsed)
    _check_duplicates(body)
    return parsed


_NOT_BRACES = bytes(byte for byte in range(256) if byte not in b"{}")


def _check_duplicates(body: bytes) -> None:
    """Refuses a key that is given twice in one object. `body` is valid JSON; it is searched for quotes only.

    Decoders keep the last of two values, other programs the first: a proxy before the server would see another
    request than the server.
    """
    # Behind these, every quote begins or ends a string. Raw control characters are in no JSON string.
    has_escapes = b"\\" in body
    if has_escapes:
        body = body.replace(rb"\\", b"\x01").replace(rb"\"", b"\x02")
    pieces = body.split(b'"')  # outside, string, outside, string, ..., outside
    open_objects: list[set[bytes]] = []
    for index in range(0, len(pieces) - 1, 2):
        for brace in pieces[index].translate(None, _NOT_BRACES):
            if brace == 0x7B:
                open_objects.append(set())
            else:
                open_objects.pop()
        if not pieces[index + 2].lstrip().startswith(b":"):
            continue
        key = pieces[index + 1]
        if has_escapes and not key.isalnum():  # "\\u0061" is "a"
            escaped = key.replace(b"\x01", rb"\\").replace(b"\x02", rb"\"")
            key = msgspec.json.decode(b'"%b"' % escaped, type=str).encode()
        if key in open_objects[-1]:
            message = f"{key.decode()!r} is given twice in one object."
            raise InvalidRequestError(message, param=key.decode(), kind="duplicate_field")
        open_objects[-1].add(key)


def _invalid_field(message: str) -> InvalidRequestError:
    place = _PLACE.search(message)
    path = place["path"] if place else ""
    reason = message[: place.start()] if place else message
    for pattern, rule, kind in (
        (_UNKNOWN, "is not a known field", "unknown_field"),
        (_MISSING, "is missing", "missing_field"),
    ):
        found = pattern.match(reason)
        if found:
            name = found["name"][:_MAX_QUOTED_CHARS]
            param = f"{path}.{name}" if path else name
            return InvalidRequestError(f"{param} {rule}.", param=param, kind=kind)
    reason = reason.replace("`", "")
    return InvalidRequestError(
        f"{path or 'the body'}: {reason[:1].lower()}{reason[1:]}.", param=path or None
    )


def _check_neutral(body: GenerationFields) -> None:
    for name, neutral in _neutral_values(type(body)).items():
        value = getattr(body, name)
        if value is not None and not any(
            type(value) is type(same) and value == same for same in neutral
        ):
            hint = f" other than {neutral[0]!r}" if neutral else ""
            message = f"{name}{hint} is not supported yet."
            raise InvalidRequestError(message, param=name, kind="not_supported")
    if body.best_of is not None and body.best_of != (body.n or 1):
        refuse("best_of", "other than n is not supported", "not_supported")
    if body.stream_options is not None and not body.stream:
        refuse("stream_options", "is only for requests with stream: true")


_SAMPLING_FIELDS = tuple(
    field.name
    for field in msgspec.structs.fields(SamplingParams)
    if field.name in GenerationFields.__struct_fields__
)


def sampling_params(
    body: GenerationFields, defaults: Mapping[str, float], overrides: Mapping[str, Any]
) -> SamplingParams:
    """The sampling that a body asks for, unchecked. The body and `SamplingParams` name their fields alike.

    `defaults` are the model's own values for fields that the body leaves open; `overrides` replace the body's.
    """
    given = {name: getattr(body, name) for name in _SAMPLING_FIELDS}
    given = {name: value for name, value in given.items() if value is not None}
    return SamplingParams(**{**defaults, **given, **overrides})


def session_of(body: GenerationFields, header: str | None) -> str | None:
    """The name of the session: the header `X-Session-ID`, else `prompt_cache_key`, else `user`; None without."""
    session = header or body.prompt_cache_key or body.user
    if not session:
        return None
    # A header may hold any bytes; those that are not UTF-8 come as lone surrogates.
    return session[:MAX_SESSION_CHARS].encode("utf-8", "backslashreplace").decode()


def prompts_of(body: CompletionRequest) -> list[str | list[int]]:
    """The prompts of a body: a string, token ids, or a list of either.
    Raises InvalidRequestError: the list is empty, mixed, or too long."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        refuse("prompt", "is an empty list")
    if all(isinstance(item, int) for item in prompt):
        return [prompt]  # type: ignore[list-item]
    if not (all(isinstance(i, str) for i in prompt) or all(isinstance(i, list) for i in prompt)):
        kinds = "a string, token ids, a list of strings or a list of lists of token ids"
        refuse("prompt", f"must be {kinds}")
    total = len(prompt) * (body.n or 1)
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
    """`max_completion_tokens`, or its older name. Raises InvalidRequestError: both are given and differ."""
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        refuse("max_completion_tokens", "and max_tokens are both given and differ")
    return old if new is None else new
