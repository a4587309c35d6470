# SPDX-License-Identifier: Apache-2.0
"""The body of SGLang's `/generate`, and what it means in the words of completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from pagoda.api.bodies.body import Timeout
from pagoda.api.bodies.fields import MAX_TOKEN_IDS, TokenIds
from pagoda.api.openai.bodies import MAX_SEQUENCES_PER_BODY
from pagoda.errors import refuse
from pagoda.messages.sampling_params import TokenId
from pagoda.text.text_generator import TextGenerator
from pagoda.whole_numbers import whole_numbers

T = TypeVar("T")

DEFAULT_NEW_TOKENS = 128
"""`max_new_tokens` where nothing is asked for, as SGLang has it."""
_MAX_ID_CHARS = 256

_Text = Annotated[str, Meta(max_length=_MAX_ID_CHARS)]
_Many = Meta(max_length=MAX_SEQUENCES_PER_BODY)
_Start = Annotated[int, Meta(ge=-1, lt=2**31)]
_Count = Annotated[int, Meta(ge=0, lt=2**31)]


class GenerateBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /generate`: one prompt or several, as texts or token ids."""

    text: str | Annotated[list[str], _Many] | None = None
    input_ids: Annotated[list[TokenId | TokenIds], Meta(max_length=MAX_TOKEN_IDS)] | None = None
    sampling_params: dict[str, Any] | Annotated[list[dict[str, Any]], _Many] | None = None
    stream: bool | None = None
    rid: _Text | Annotated[list[_Text], _Many] | None = None
    """Ids by which the client knows its answers."""
    return_logprob: bool | Annotated[list[bool], _Many] | None = None
    logprob_start_len: _Start | Annotated[list[_Start], _Many] | None = None
    """First token of the prompt whose log-probability is wanted; -1 wants those of the answer alone."""
    top_logprobs_num: _Count | Annotated[list[_Count], _Many] | None = None
    return_text_in_logprobs: bool | None = None
    lora_path: str | None = None
    """Name of an adapter."""
    model: str | None = None
    timeout: Timeout | None = None
    priority: int | None = None
    cache_salt: str | None = None
    max_thinking_tokens: Annotated[Any, ()] = None
    bootstrap_host: Any = None
    bootstrap_port: Any = None
    bootstrap_room: Any = None

    # No effect on the answer.
    log_metrics: bool | None = None
    no_logs: bool | None = None
    conversation_id: str | None = None
    session_id: str | None = None
    routing_key: str | None = None
    custom_labels: dict[str, str] | None = None

    # Not supported, but for the values that change nothing.
    input_embeds: Annotated[Any, ()] = None
    image_data: Annotated[Any, ([],)] = None
    video_data: Annotated[Any, ([],)] = None
    audio_data: Annotated[Any, ([],)] = None
    modalities: Annotated[Any, ([],)] = None
    token_ids_logprob: Annotated[Any, ([],)] = None
    return_hidden_states: Annotated[Any, (False,)] = None
    return_routed_experts: Annotated[Any, (False,)] = None
    return_entropy: Annotated[Any, (False,)] = None
    return_bytes: Annotated[Any, (False,)] = None
    return_sampling_mask: Annotated[Any, (False,)] = None
    return_prompt_token_ids: Annotated[Any, (False,)] = None
    require_reasoning: Annotated[Any, (False,)] = None
    background: Annotated[Any, (False,)] = None
    session_params: Annotated[Any, ({},)] = None
    custom_logit_processor: Annotated[Any, ()] = None
    extra_key: Annotated[Any, ()] = None
    data_parallel_rank: Annotated[Any, ()] = None
    routed_dp_rank: Annotated[Any, ()] = None
    disagg_prefill_dp_rank: Annotated[Any, ()] = None
    bootstrap_pair_key: Annotated[Any, ()] = None
    decode_tp_size: Annotated[Any, ()] = None


NAMES = {
    "max_tokens": "sampling_params.max_new_tokens",
    "min_tokens": "sampling_params.min_new_tokens",
    "seed": "sampling_params.sampling_seed",
    "include_stop_str_in_output": "sampling_params.no_stop_trim",
    "logprobs": "top_logprobs_num",
    "prompt_logprobs": "top_logprobs_num",
    **{
        name: f"sampling_params.{name}"
        for name in (
            *("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty"),
            *("repetition_penalty", "stop", "stop_token_ids", "stop_regex", "ignore_eos"),
            *("json_schema", "regex", "ebnf", "structural_tag", "skip_special_tokens", "n"),
            *("spaces_between_special_tokens", "logit_bias", "custom_params"),
        )
    },
}
"""Names of SGLang for fields of completions."""

_COMPLETIONS_NAMES = {
    theirs.removeprefix("sampling_params."): ours
    for ours, theirs in NAMES.items()
    if theirs.startswith("sampling_params.")
}


@dataclass(frozen=True)
class PromptRequest:
    """Wishes for one prompt."""

    token_ids: Sequence[int]
    sampling: dict[str, Any]
    """Fields of completions."""
    stream_interval: int
    rid: str
    """Id by which the client knows the answer; empty without one."""
    with_logprobs: bool
    start: int
    """First token of the prompt whose log-probability is wanted; -1 for none."""
    num_top: int
    with_text: bool


def asked_of(body: GenerateBody, prompts: Sequence[Sequence[int]]) -> list[PromptRequest]:
    """Wishes of a body for each of its prompts.
    Raises InvalidRequestError: fields do not fit each other; names one."""
    count = len(prompts)
    rids = body.rid or ""
    if isinstance(rids, str) and rids and count > 1:
        rids = [f"{body.rid}_{index}" for index in range(count)]
    starts = -1 if body.logprob_start_len is None else body.logprob_start_len
    columns = zip(
        prompts,
        _each("sampling_params", body.sampling_params or {}, count),
        _each("rid", rids, count),
        _each("return_logprob", body.return_logprob or False, count),
        _each("logprob_start_len", starts, count),
        _each("top_logprobs_num", body.top_logprobs_num or 0, count),
        strict=True,
    )
    found = []
    shared = (
        None if isinstance(body.sampling_params, list) else _sampling(body.sampling_params or {})
    )
    for prompt, given, rid, with_logprobs, start, num_top in columns:
        if num_top and not with_logprobs:
            refuse("top_logprobs_num", "needs return_logprob: true")
        if start >= len(prompt):
            refuse("logprob_start_len", f"must be below the {len(prompt)} tokens of the prompt")
        sampling, interval = _sampling(given) if shared is None else shared
        found.append(
            PromptRequest(
                prompt,
                sampling,
                interval,
                rid,
                with_logprobs,
                start if with_logprobs else -1,
                num_top,
                bool(body.return_text_in_logprobs),
            )
        )
    return found


def is_list(body: GenerateBody) -> bool:
    """True if a body has a list of prompts, so that the answer is a list, too."""
    ids = body.input_ids
    return isinstance(body.text, list) or bool(ids and isinstance(ids[0], list))


async def prompts_of(body: GenerateBody, generator: TextGenerator) -> list[list[int]]:
    """The token ids of all prompts of a body.
    Raises InvalidRequestError: they are malformed, or do not fit the model; names the field."""
    if (body.text is None) == (body.input_ids is None):
        refuse("text", "or input_ids must be given, and not both")
    if body.text is None:
        ids: Any = body.input_ids
        prompts = ids if is_list(body) else [ids]
        if len(prompts) > MAX_SEQUENCES_PER_BODY:
            rule = f"has {len(prompts)} prompts; at most {MAX_SEQUENCES_PER_BODY} are served"
            refuse("input_ids", rule)
        kind = list if is_list(body) else int
        if set(map(type, ids)) - {kind}:
            refuse("input_ids", "must be token ids, or a list of lists of token ids")
    else:
        texts = body.text if isinstance(body.text, list) else [body.text]
        prompts = [
            await generator.encode(text, add_special_tokens=True, param="text") for text in texts
        ]
    param = "input_ids" if body.text is None else "text"
    context = generator.endpoint.limits.max_model_len
    for prompt in prompts:
        if not prompt:
            refuse(param, "is empty")
        if generator.room(prompt) < 1:
            refuse(
                param,
                f"has {len(prompt)} tokens; the maximum context length of prompt and answer is {context} tokens",
            )
    if not prompts:
        refuse(param, "is an empty list")
    return prompts


def _each(name: str, value: T | list[T], count: int) -> list[T]:
    """A value for each prompt, out of one for all or a list."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        refuse(name, f"has {len(value)} values for {count} prompts")
    return value


def _sampling(given: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """The fields of completions for `sampling_params`, and the tokens between two events of a stream."""
    fields: dict[str, Any] = {"max_tokens": DEFAULT_NEW_TOKENS}
    interval = 1
    for name, written in given.items():
        value = whole_numbers(written)
        if value is None:
            continue
        if name == "stream_interval":
            if type(value) is not int or not 1 <= value < 2**31:
                refuse("sampling_params.stream_interval", "must be a positive integer")
            interval = value
        elif name in _COMPLETIONS_NAMES:
            fields[_COMPLETIONS_NAMES[name]] = value
        else:
            refuse(f"sampling_params.{name[:64]}", "is not a known field", "unknown_field")
    bias = fields.get("logit_bias")
    if isinstance(bias, dict):
        fields["logit_bias"] = {
            int(key) if key.isascii() and key.isdigit() and len(key) < 12 else key: value
            for key, value in bias.items()
        }
    if type(fields["max_tokens"]) is not int or fields["max_tokens"] < 0:
        refuse("sampling_params.max_new_tokens", "must be a whole number of at least 0")
    return fields, interval
