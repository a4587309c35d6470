# SPDX-License-Identifier: Apache-2.0
"""The bodies of llama.cpp's completions and what they mean in OpenAI's words."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from pagoda.api.bodies.body import Timeout
from pagoda.api.bodies.fields import MAX_TOKEN_IDS, windowed_penalty
from pagoda.api.bodies.ignored_fields import Ignored
from pagoda.errors import refuse
from pagoda.messages.sampling_params import (
    DRAWS,
    MAX_STOP_STRINGS,
    MAX_TOKEN_LIST,
    DrawFields,
    TokenId,
)
from pagoda.text.text_generator import TextGenerator

MAX_RESPONSE_FIELDS = 64
MAX_EXTRA_FILES = 256

Bias = list[int | str | float | bool]
PromptObject = dict[str, Any]
"""`prompt_string`, and `multimodal_data`, which is refused."""
Prompt = (
    str
    | PromptObject
    | Annotated[
        list[
            TokenId
            | str
            | PromptObject
            | Annotated[list[TokenId | str], Meta(max_length=MAX_TOKEN_IDS)]
        ],
        Meta(max_length=MAX_TOKEN_IDS),
    ]
)


class SamplingFields(DrawFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields that completion and infill have in common."""

    model: str | None = None
    timeout: Timeout | None = None
    stream: bool | None = None
    n_predict: int | None = None
    max_tokens: int | None = None
    """OpenAI's name of `n_predict`."""
    seed: int | None = None
    stop: Annotated[list[str], Meta(max_length=MAX_STOP_STRINGS)] | str | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: (
        Annotated[list[Bias], Meta(max_length=MAX_TOKEN_LIST)] | dict[str, float | bool] | None
    ) = None
    ignore_eos: bool | None = None
    n_probs: int | None = None
    n_cmpl: int | None = None
    n: int | None = None
    """OpenAI's name of `n_cmpl`."""
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    return_tokens: bool | None = None
    timings_per_token: bool | None = None
    return_progress: bool | None = None
    response_fields: Annotated[list[str], Meta(max_length=MAX_RESPONSE_FIELDS)] | None = None

    # Settings of an engine, which do not change an answer.
    cache_prompt: bool | None = None
    id_slot: int | None = None
    n_cache_reuse: int | None = None
    n_keep: int | None = None
    n_discard: int | None = None
    backend_sampling: bool | None = None
    sse_ping_interval: int | None = None
    min_keep: int | None = None
    samplers: Annotated[Any, ([],)] = None

    # Parameters of samplers that are off.
    dynatemp_exponent: float | None = None
    xtc_threshold: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: list[str] | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    adaptive_decay: float | None = None

    # Not supported, but for the values that change nothing.
    dynatemp_range: Annotated[Any, (0, 0.0)] = None
    xtc_probability: Annotated[Any, (0, 0.0)] = None
    top_n_sigma: Annotated[Any, (-1, -1.0, 0, 0.0)] = None
    dry_multiplier: Annotated[Any, (0, 0.0)] = None
    mirostat: Annotated[Any, (0, 0.0)] = None
    adaptive_target: Annotated[Any, (-1, -1.0)] = None
    post_sampling_probs: Annotated[Any, (False,)] = None
    n_indent: Annotated[Any, (0, 0.0)] = None
    t_max_predict_ms: Annotated[Any, (0, -1)] = None
    lora: Annotated[Any, ([],)] = None
    grammar_lazy: Annotated[Any, (False,)] = None


class CompletionBody(SamplingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /completion`."""

    prompt: Prompt


class ExtraFile(msgspec.Struct, frozen=True):
    """A file of the project, as context."""

    text: str
    filename: str = "tmp"


class InfillBody(SamplingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /infill`."""

    input_prefix: str
    input_suffix: str
    input_extra: Annotated[list[ExtraFile], Meta(max_length=MAX_EXTRA_FILES)] | None = None
    prompt: str | None = None


NAMES = {
    "max_tokens": "n_predict",
    "repetition_penalty": "repeat_penalty",
    "logprobs": "n_probs",
    "n": "n_cmpl",
    "response_format": "json_schema",
    "structured_outputs": "grammar",
}
"""Names in llama.cpp's API of fields of OpenAI's that have another name there."""

_SAME = (
    *(*DRAWS, "stop", "ignore_eos", "presence_penalty", "frequency_penalty", "model", "stream"),
)


async def request_fields(
    body: SamplingFields, generator: TextGenerator, ignored: Ignored
) -> dict[str, Any]:
    """Fields of OpenAI's completions for a body, without its prompt and length.
    Raises InvalidRequestError: a value is not as it must be; names the field."""
    fields: dict[str, Any] = {name: getattr(body, name) for name in _SAME}
    if body.seed is not None and body.seed >= 0:  # -1 asks for any
        fields["seed"] = body.seed
    fields["repetition_penalty"] = windowed_penalty(
        body.repeat_penalty,
        body.repeat_last_n,
        generator.endpoint.limits.max_model_len,
        ignored,
        "repeat_last_n",
    )
    fields["logprobs"] = body.n_probs or None
    fields["n"] = body.n if body.n_cmpl is None else body.n_cmpl
    fields["logit_bias"] = await _logit_bias(body.logit_bias, generator)
    if body.grammar and body.json_schema is not None:
        refuse("grammar", "and json_schema exclude each other")
    if body.grammar:
        fields["structured_outputs"] = {"grammar": body.grammar}
    if body.json_schema is not None:
        named = {"name": "json_schema", "schema": body.json_schema}
        fields["response_format"] = {"type": "json_schema", "json_schema": named}
    return fields


def length_of(body: SamplingFields, room: int) -> int:
    """The most tokens of an answer, with `room` tokens left in the context; -1 and -2 ask for all.
    Raises InvalidRequestError: `n_predict` is below -2."""
    wanted = body.max_tokens if body.n_predict is None else body.n_predict
    if wanted is None or wanted in (-1, -2):
        return room
    if wanted < 0:
        refuse("n_predict", f"must be at least -2, got {wanted}")
    return min(wanted, room)


async def _logit_bias(
    bias: Sequence[Bias] | dict[str, float | bool] | None, generator: TextGenerator
) -> dict[int, float] | None:
    """Biases by token id; a text biases each of its tokens, and false forbids a token."""
    if not bias:
        return None
    pairs = [(key, value) for key, value in bias.items()] if isinstance(bias, dict) else bias
    found: dict[int, float] = {}
    for pair in pairs:
        if len(pair) != 2 or isinstance(pair[0], bool | float) or isinstance(pair[1], str):
            refuse("logit_bias", "takes pairs of a token id or a text and a number or false")
        token, value = pair
        if value is True:
            refuse("logit_bias", "takes a number or false, got true")
        amount = -100.0 if value is False else float(value)
        if isinstance(token, str) and not (isinstance(bias, dict) and token.isdigit()):
            ids = await generator.encode(token, add_special_tokens=False, param="logit_bias")
        else:
            ids = [int(token)]
        found.update(dict.fromkeys(ids, amount))
        if len(found) > MAX_TOKEN_LIST:
            refuse("logit_bias", f"takes at most {MAX_TOKEN_LIST} tokens")
    return found


async def prompts_of(prompt: Prompt, generator: TextGenerator) -> list[list[int]]:
    """The token ids of each prompt: one, or those of a list of prompts. A list that holds token ids is one prompt.
    Raises InvalidRequestError: a prompt is empty, malformed or too long."""
    if not isinstance(prompt, list):
        return [await _encoded([prompt], generator)]
    if not prompt:
        refuse("prompt", "is an empty list")
    if int in set(map(type, prompt)):
        return [await _encoded(prompt, generator)]
    return [
        await _encoded(item if isinstance(item, list) else [item], generator) for item in prompt
    ]


async def _encoded(parts: Sequence[Any], generator: TextGenerator) -> list[int]:
    """Token ids of texts and token ids in a row; a text at the beginning gets what the model expects there."""
    token_ids: list[int] = []
    is_first = True
    for kind, run in groupby(parts, type):
        if kind is int:
            token_ids += run
            is_first = False
            continue
        for part in run:
            text = part if isinstance(part, str) else _prompt_string(part)
            token_ids += await generator.encode(text, add_special_tokens=is_first)
            is_first = False
    return token_ids


def _prompt_string(part: object) -> str:
    if not isinstance(part, dict):
        refuse("prompt", "holds a list inside of token ids")
    if part.get("multimodal_data"):
        refuse("prompt", "has multimodal_data, but this server reads text only", "not_supported")
    text = part.get("prompt_string")
    if not isinstance(text, str) or part.keys() - {"prompt_string", "multimodal_data"}:
        refuse("prompt", "takes objects with a prompt_string, which is a text")
    return text
