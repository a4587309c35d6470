"""Log-probabilities in the two shapes of the OpenAI API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pagoda.frontend.tokenizer import Tokenizer
from pagoda.messages.frontend import TokenLogprobs

_FLOOR = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


def token_text(token: bytes) -> str:
    """A token as text; bytes that are no text by themselves are spelled out, as OpenAI does."""
    try:
        return token.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def chat_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], entries: Sequence[TokenLogprobs]
) -> dict[str, Any]:
    """`choices[].logprobs` of chat completions."""
    content = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        top = zip(entry.top_token_ids, entry.top_logprobs, strict=True)
        content.append(
            {
                **_chat_token(tokenizer, token_id, entry.logprob),
                "top_logprobs": [_chat_token(tokenizer, i, logprob) for i, logprob in top],
            }
        )
    return {"content": content}


def _chat_token(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    token = tokenizer.token_bytes(token_id)
    return {"token": token_text(token), "logprob": max(logprob, _FLOOR), "bytes": list(token)}


class CompletionLogprobs:
    """`choices[].logprobs` of completions; counts the offsets of the tokens in the text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._offset = 0

    def format(
        self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs]
    ) -> dict[str, list[Any]]:
        tokens, offsets, top_logprobs = [], [], []
        for token_id, entry in zip(token_ids, entries, strict=True):
            token = token_text(self._tokenizer.token_bytes(token_id))
            top = {token: max(entry.logprob, _FLOOR)}
            for i, logprob in zip(entry.top_token_ids, entry.top_logprobs, strict=True):
                top.setdefault(token_text(self._tokenizer.token_bytes(i)), max(logprob, _FLOOR))
            tokens.append(token)
            offsets.append(self._offset)
            top_logprobs.append(top)
            self._offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [max(entry.logprob, _FLOOR) for entry in entries],
            "top_logprobs": top_logprobs,
            "text_offset": offsets,
        }
