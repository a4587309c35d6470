# SPDX-License-Identifier: Apache-2.0
"""Requests of a load test: random tokens, ShareGPT, or a JSONL file.

A dataset is a list of `Sample`s, made before the clock starts.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from pagoda.cli.files import read_jsonl
from pagoda.errors import ConfigError
from pagoda.files import read_file

Endpoint = Literal["completions", "chat"]

_CHARACTERS_PER_TOKEN = 4
"""A rule of thumb for English, used where lengths are known as text only."""
_FLAG = "--dataset-path"
_FIRST_RANDOM_ID = 3
"""The lowest random token id: special tokens of older vocabularies lie below."""
_WORDS = ("river", "stone", "cloud", "seven", "green", "house", "table", "light", "paper", "north")

Messages = list[dict[str, object]]


@dataclass(frozen=True, slots=True)
class Sample:
    """One request to send: `fields` of its JSON body besides model, stream and sampling."""

    endpoint: Endpoint
    fields: Mapping[str, object]


@dataclass(frozen=True, kw_only=True)
class RandomLengths:
    """Lengths in tokens of made-up prompts and answers."""

    input_len: int
    output_len: int
    prefix_len: int = 0
    """Leading tokens that all prompts share, besides `input_len`."""
    range_ratio: float = 0.0
    """Lengths are uniform within this share around their value."""
    vocab_size: int = 256
    """Prompt token ids are below this."""


def random_samples(
    count: int, lengths: RandomLengths, endpoint: Endpoint, seed: int
) -> list[Sample]:
    """Prompts of random tokens: token ids for completions, as many words for chat."""
    samples = []
    for prompt, output_len in random_prompts(count, lengths, seed):
        fields: dict[str, object] = {"max_tokens": output_len}
        if endpoint == "completions":
            fields["prompt"] = prompt
        else:
            fields["messages"] = _user(" ".join(_WORDS[token % len(_WORDS)] for token in prompt))
        samples.append(Sample(endpoint, fields))
    return samples


def random_prompts(count: int, lengths: RandomLengths, seed: int) -> list[tuple[list[int], int]]:
    """Prompts of random token ids, each with the length of the answer to ask for."""
    rng = random.Random(seed)

    def spread(length: int) -> int:
        margin = int(length * lengths.range_ratio)
        return max(1, rng.randint(length - margin, length + margin))

    def draw(length: int) -> list[int]:
        return rng.choices(range(_FIRST_RANDOM_ID, lengths.vocab_size), k=length)

    prefix = draw(lengths.prefix_len)
    return [
        (prefix + draw(spread(lengths.input_len)), spread(lengths.output_len)) for _ in range(count)
    ]


class _Turn(msgspec.Struct):
    value: str


class _DatasetConversation(msgspec.Struct):
    conversations: list[_Turn]


def sharegpt_samples(
    path: Path, count: int, endpoint: Endpoint, output_len: int | None
) -> list[Sample]:
    """The first question of each conversation of a ShareGPT file.

    Answers may be `output_len` tokens long, by default about as long as the answer in the file.

    Raises ConfigError if the file is not in ShareGPT's format or holds no conversation of two turns.
    """
    try:
        conversations = msgspec.json.decode(read_file(path, _FLAG), type=list[_DatasetConversation])
    except msgspec.DecodeError as error:
        raise ConfigError(f"{_FLAG}: {path} is not ShareGPT JSON: {error}.") from error
    samples = []
    for turns in (it.conversations for it in conversations if len(it.conversations) >= 2):
        length = output_len or max(4, len(turns[1].value) // _CHARACTERS_PER_TOKEN)
        samples.append(_text_sample(endpoint, turns[0].value, length))
    return _repeat(samples, count, path)


class _DatasetLine(msgspec.Struct):
    body: dict[str, object] | None = None
    prompt: str | list[int] | None = None
    prompt_token_ids: list[int] | None = None
    messages: Messages | None = None
    max_tokens: int | None = None


def jsonl_samples(
    path: Path, count: int, endpoint: Endpoint, output_len: int | None
) -> list[Sample]:
    """One request a line: `prompt`, `prompt_token_ids` or `messages`, or an OpenAI batch line.

    Raises ConfigError, which names the line, if a line is not such a request.
    """
    samples = []
    for place, line in read_jsonl(path, _DatasetLine, _FLAG):
        sample = _line_sample(line, endpoint, output_len)
        if sample is None:
            raise ConfigError(f"{place} needs prompt, prompt_token_ids, messages or body.")
        samples.append(sample)
    return _repeat(samples, count, path)


def _line_sample(line: _DatasetLine, endpoint: Endpoint, output_len: int | None) -> Sample | None:
    if line.body is not None:
        left_out = {"model", "stream", "stream_options"}
        fields = {name: value for name, value in line.body.items() if name not in left_out}
        return Sample("chat" if "messages" in fields else "completions", fields)
    length = line.max_tokens or output_len
    limit: dict[str, object] = {} if length is None else {"max_tokens": length}
    if line.messages is not None:
        return Sample("chat", {"messages": line.messages, **limit})
    prompt = line.prompt_token_ids or line.prompt
    if isinstance(prompt, str):
        return _text_sample(endpoint, prompt, length)
    return None if prompt is None else Sample("completions", {"prompt": prompt, **limit})


def _text_sample(endpoint: Endpoint, text: str, output_len: int | None) -> Sample:
    limit: dict[str, object] = {} if output_len is None else {"max_tokens": output_len}
    if endpoint == "completions":
        return Sample("completions", {"prompt": text, **limit})
    return Sample("chat", {"messages": _user(text), **limit})


def _user(text: str) -> Messages:
    return [{"role": "user", "content": text}]


def _repeat(samples: Sequence[Sample], count: int, path: Path) -> list[Sample]:
    if not samples:
        raise ConfigError(f"{_FLAG}: {path} holds no request.")
    return [samples[index % len(samples)] for index in range(count)]
