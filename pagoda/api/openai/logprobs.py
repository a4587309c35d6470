# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities in the two shapes of the OpenAI API."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import msgspec

from pagoda.api.http.sse import encode_json
from pagoda.messages.frontend import TokenLogprobs
from pagoda.text.tokenizers.tokenizer import Tokenizer

_FLOOR = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


def token_text(token: bytes) -> str:
    """A token as text; bytes that are no text by themselves are spelled out, as OpenAI does."""
    try:
        return token.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


class TokenSpelling:
    """The strings that stand for tokens: their text, or their ids."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def text(self, token_id: int) -> str:
        if self._as_ids:
            return f"token_id:{token_id}"
        return token_text(self._tokenizer.token_bytes(token_id))

    def length(self, token_id: int) -> int:
        """Characters of the token's own text."""
        return len(token_text(self._tokenizer.token_bytes(token_id)))

    def chat_token(self, token_id: int, logprob: float) -> dict[str, Any]:
        token = self._tokenizer.token_bytes(token_id)
        text = self.text(token_id)
        return {"token": text, "logprob": max(logprob, _FLOOR), "bytes": list(token)}


def encoded_entry(value: object) -> msgspec.Raw:
    """JSON in the place of many small objects, which the collector of garbage would look at again and again."""
    return msgspec.Raw(encode_json(value))


def prompt_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], entries: Sequence[TokenLogprobs], num_top: int
) -> list[msgspec.Raw | None]:
    """`prompt_logprobs` as vLLM has them: None for the first of the prompt's tokens, for each other one an object
    by token id with the token itself and the `num_top` likeliest ones."""
    positions: list[msgspec.Raw | None] = [None]
    for token_id, entry in zip(token_ids[1:], entries, strict=True):
        top = list(zip(entry.top_token_ids, entry.top_logprobs, strict=True))[:num_top]
        ranked = [(token_id, entry.logprob, entry.rank)]
        ranked += [(i, logprob, rank) for rank, (i, logprob) in enumerate(top, 1) if i != token_id]
        position = {
            str(i): {
                "logprob": max(logprob, _FLOOR),
                "rank": rank,
                "decoded_token": tokenizer.token_bytes(i).decode("utf-8", errors="replace"),
            }
            for i, logprob, rank in ranked
        }
        positions.append(encoded_entry(position))
    return positions


def chat_entries(
    spelling: TokenSpelling, token_ids: Sequence[int], entries: Sequence[TokenLogprobs]
) -> Iterator[dict[str, Any]]:
    """The elements of `choices[].logprobs.content` of chat completions."""
    for token_id, entry in zip(token_ids, entries, strict=True):
        top = zip(entry.top_token_ids, entry.top_logprobs, strict=True)
        yield {
            **spelling.chat_token(token_id, entry.logprob),
            "top_logprobs": [spelling.chat_token(i, logprob) for i, logprob in top],
        }


def chat_logprobs(
    spelling: TokenSpelling, token_ids: Sequence[int], entries: Sequence[TokenLogprobs]
) -> dict[str, Any]:
    """`choices[].logprobs` of chat completions."""
    return {"content": list(map(encoded_entry, chat_entries(spelling, token_ids, entries)))}


class CompletionLogprobs:
    """`choices[].logprobs` of completions; counts the offsets of the tokens in the text."""

    def __init__(self, spelling: TokenSpelling, num_top: int) -> None:
        self._spelling = spelling
        self._num_top = num_top
        self._offset = 0

    def format(
        self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None]
    ) -> dict[str, list[Any]]:
        """The entry of the first token of a prompt, which nothing is in front of, is None."""
        tokens, offsets = [], []
        logprobs: list[float | None] = []
        top_logprobs: list[msgspec.Raw | None] = []
        for token_id, entry in zip(token_ids, entries, strict=True):
            token = self._spelling.text(token_id)
            tokens.append(token)
            offsets.append(self._offset)
            self._offset += self._spelling.length(token_id)
            if entry is None:
                logprobs.append(None)
                top_logprobs.append(None)
                continue
            top = {token: max(entry.logprob, _FLOOR)}
            likeliest = zip(entry.top_token_ids, entry.top_logprobs, strict=True)
            for i, logprob in islice(likeliest, self._num_top):
                top.setdefault(self._spelling.text(i), max(logprob, _FLOOR))
            logprobs.append(top[token])
            top_logprobs.append(encoded_entry(top))
        return {
            "tokens": tokens,
            "token_logprobs": logprobs,
            "top_logprobs": top_logprobs,
            "text_offset": offsets,
        }
