# SPDX-License-Identifier: Apache-2.0
"""The fields that the bodies of several routes have in common, and what they mean.

The names are those of OpenAI's API, and of vLLM for what it adds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from pagoda.api.bodies.body import Timeout
from pagoda.api.bodies.ignored_fields import Ignored
from pagoda.api.bodies.neutral import NeutralFields
from pagoda.errors import InvalidRequestError, refuse
from pagoda.messages.sampling_params import (
    ALL_LOGPROBS,
    MAX_ALLOWED_TOKENS,
    MAX_SEQUENCES_PER_REQUEST,
    MAX_STOP_STRINGS,
    MAX_TOKEN_LIST,
    SamplingParams,
    TokenId,
)
from pagoda.text.beam_search import BeamSearchParams

MAX_TOKEN_IDS = 2**19
"""Most token ids in one list; decoding more would hold up other streams. Longer prompts come as text."""
MAX_SESSION_CHARS = 256
"""Names of sessions are cut to this length."""

TokenIds = Annotated[list[TokenId], Meta(max_length=MAX_TOKEN_IDS)]

Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=16),
]
"""Metadata that the server keeps, within the bounds that OpenAI has for it."""

_PLACES = re.compile(r"[.\[]")
"""Ends of the name of a field, and of places within it."""


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`stream_options`: what a stream tells besides tokens."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


_END = r"(?![\s\S])"
"""The end of a text in Python's and in ECMAScript's patterns: `$` is also in front of a last newline, and
`\\Z` only Python's, while clients read the pattern in /openapi.json."""
TransferId = Annotated[str, Meta(pattern=rf"^[^\x00-\x1f\x7f-\x9f\ud800-\udfff]{{1,512}}{_END}")]
_NAME = r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?"
_IPV6 = r"[0-9A-Fa-f]{0,4}:[0-9A-Fa-f]{0,4}:[0-9A-Fa-f:.]{0,36}(%[A-Za-z0-9_.-]{1,32})?"
HostName = Annotated[str, Meta(pattern=rf"^({_NAME}|{_IPV6}|\[{_IPV6}\]){_END}")]
"""A name, an IPv4 address, or an IPv6 address with brackets or without."""
Port = (
    Annotated[int, Meta(ge=1, le=65535)]
    | Annotated[str, Meta(pattern=rf"^[1-9][0-9]{{0,4}}{_END}")]
)
"""A port, also as text, as proxies take it out of a URL."""
BlockId = Annotated[int, Meta(ge=0, lt=2**31)]
_Size = Annotated[int, Meta(ge=1, le=2**16)]
_Rank = Annotated[int, Meta(ge=0, le=2**16)]


class KVTransferParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`kv_transfer_params`, as vLLM and ATOM spell them. Every field is checked, also without an effect here."""

    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None
    remote_engine_id: TransferId | None = None
    remote_block_ids: Annotated[list[BlockId], Meta(max_length=MAX_TOKEN_IDS)] | None = None
    remote_host: HostName | None = None
    remote_port: Port | None = None
    tp_size: _Size | None = None
    dp_rank: _Rank | None = None
    transfer_id: TransferId | None = None
    remote_handshake_port: Port | None = None
    """ATOM's. Where it is given, `remote_host` and `remote_port` are those of the server's API, and the place of
    the KV is read from `transfer_id`."""
    remote_dp_size: _Size | None = None
    remote_tp_size: _Size | None = None
    remote_dp_rank: _Rank | None = None
    first_token_id: TokenId | None = None


class GenerationFields(NeutralFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields that completions and chat completions have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: int | None = None
    random_seed: int | None = None
    """Mistral's name of `seed`."""
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
    return_tokens_as_token_ids: bool | None = None
    """Tokens of log-probabilities are written as `token_id:7`, which no two tokens share."""
    prompt_logprobs: Annotated[int, Meta(ge=ALL_LOGPROBS, lt=2**31)] | None = None
    priority: Annotated[int, Meta(ge=-(2**31) + 1, le=2**31 - 1)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    speculation: Literal["auto", "off"] | None = None
    """`off` says that nothing is drafted for the answer, which is the same either way."""
    id_slot: int | None = None
    """llama.cpp's place for a request; all requests share one cache here."""
    add_special_tokens: bool | None = None
    timeout: Timeout | None = None
    kv_transfer_params: KVTransferParams | None = None
    bootstrap_host: HostName | None = None
    bootstrap_port: Annotated[int, Meta(ge=1, le=65535)] | None = None
    bootstrap_room: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None

    # No effect on the answer, by OpenAI's definition, as the bound; the first two may name the request's session.
    prompt_cache_key: str | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_retention: str | None = None
    prediction: dict[str, Any] | None = None
    metadata: Annotated[dict[str, str], Meta(max_length=16)] | None = None

    # At most one constraint; see `pagoda.api.bodies.constraint_fields`.
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: str | None = None
    regex: Any = None
    ebnf: Any = None
    json_schema: Any = None
    grammar: Any = None

    best_of: int | None = None
    """Answers of which the `n` likeliest are given; of chats only `n` itself."""
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None

    # Not supported yet: refused but for null and the values beside them, which change nothing.
    bad_words: Annotated[Any, ([],)] = None


def check_fields(body: GenerationFields) -> None:
    """Raises InvalidRequestError: two fields of the body do not go together; names one."""
    if not body.use_beam_search:
        only = "is only for use_beam_search"
        if body.length_penalty not in (None, 1):
            refuse("length_penalty", f"other than 1 or 1.0 {only}", "not_supported")
        if body.early_stopping not in (None, False):
            refuse("early_stopping", f"other than False {only}", "not_supported")
    if body.best_of is not None and body.best_of < (body.n or 1):
        refuse("best_of", f"must be at least n ({body.n or 1}), got {body.best_of}")
    if body.best_of is not None and body.best_of > MAX_SEQUENCES_PER_REQUEST:
        refuse("best_of", f"must be at most {MAX_SEQUENCES_PER_REQUEST}, got {body.best_of}")
    if body.stream and body.best_of is not None and body.best_of > (body.n or 1):
        refuse("best_of", "other than n is not for streams")
    options = body.stream_options
    if options is not None and not body.stream:
        refuse("stream_options", "is only for requests with stream: true")
    if options is not None and options.include_obfuscation:
        refuse("stream_options.include_obfuscation", "other than false is not supported")


def beam_search_params(
    body: GenerationFields, max_tokens: int, vocab_size: int
) -> BeamSearchParams | None:
    """The beam search that a body asks for, with `best_of` or `n` beams; None if it asks for none.
    Raises InvalidRequestError: a field has a value with which there is no beam search; names the field."""
    if not body.use_beam_search:
        return None
    for name, neutral in _WITHOUT_BEAMS.items():
        value = getattr(body, name)
        if value is not None and value not in neutral:
            refuse(name, "does not go together with use_beam_search", "not_supported")
    with renamed({"beam_width": "n" if body.best_of is None else "best_of"}):
        return BeamSearchParams(
            beam_width=body.best_of or body.n or 1,
            max_tokens=max_tokens,
            length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
            early_stopping=body.early_stopping or False,
        ).checked(vocab_size)


_WITHOUT_BEAMS: dict[str, tuple[object, ...]] = {
    "stream": (False,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "allowed_token_ids": (),
    "stop": ([],),
    "prompt_logprobs": (),
    "kv_transfer_params": (),
}
"""Fields that change which tokens are likely, or how an answer is computed, and their values that do not."""


def windowed_penalty(
    penalty: float | None, window: int | None, context: int, ignored: Ignored, param: str
) -> float | None:
    """The repetition penalty of llama.cpp and Ollama, who look at the last `window` tokens, none of them with 0.
    Here it looks at all of prompt and answer; a window below the context is noted in `ignored` as `param`."""
    if penalty is not None and window == 0:
        return 1.0
    if penalty not in (None, 1) and window is not None and 0 < window < context:
        ignored.note(param)
    return penalty


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Lets errors about a field name it as the client does: `names` maps Pagoda's names to the client's.

    Names may be places within fields, such as `messages[3].content`; the longest name that fits is replaced.
    """
    try:
        yield
    except InvalidRequestError as error:
        param = error.param or ""
        cuts = [len(param), *(match.start() for match in _PLACES.finditer(param))]
        ours = next(
            (param[:cut] for cut in sorted(cuts, reverse=True) if param[:cut] in names), None
        )
        if ours is None:
            raise
        error.args = (str(error).replace(ours, names[ours]),)
        error.param = names[ours] + param[len(ours) :]
        raise


_SAMPLING_FIELDS = tuple(
    field.name
    for field in msgspec.structs.fields(SamplingParams)
    if field.name in GenerationFields.__struct_fields__ and field.name != "structured_outputs"
)
"""Fields that both have, but for the constraint, which `pagoda.api.bodies.constraint_fields` reads."""


def sampling_params(
    body: GenerationFields, defaults: Mapping[str, float], overrides: Mapping[str, Any]
) -> SamplingParams:
    """The sampling that a body asks for, unchecked. The body and `SamplingParams` name their fields alike.

    `defaults` are the model's own values for fields that the body leaves open; `overrides` replace the body's.
    """
    given = {name: getattr(body, name) for name in _SAMPLING_FIELDS}
    given = {name: value for name, value in given.items() if value is not None}
    if body.random_seed is not None:
        given.setdefault("seed", body.random_seed)
    return SamplingParams(**{**defaults, **given, **overrides})


def session_of(body: GenerationFields, header: str | None) -> str | None:
    """The name of the session: the header `X-Session-ID`, else `prompt_cache_key`, else `user`; None without."""
    session = header or body.prompt_cache_key or body.user
    if not session:
        return None
    # A header may hold any bytes; those that are not UTF-8 come as lone surrogates.
    return session[:MAX_SESSION_CHARS].encode("utf-8", "backslashreplace").decode()
