# SPDX-License-Identifier: Apache-2.0
"""The results of `LLM` and `AsyncLLM`, with the names of vLLM."""

from __future__ import annotations

from dataclasses import dataclass

from pagoda.messages.frontend import TokenLogprobs
from pagoda.text.text_generator import TextDelta, TextRequest
from pagoda.text.tokenizers.tokenizer import Tokenizer


@dataclass(frozen=True)
class Logprob:
    """The log-probability of one token at one position, of the model's own distribution."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(frozen=True)
class CompletionOutput:
    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    """The sum over the sampled tokens, where log-probabilities were asked for."""
    logprobs: list[dict[int, Logprob]] | None = None
    """Log-probabilities by token id, for each position: the sampled token first, then the most likely tokens."""
    finish_reason: str | None = None
    """`stop`, `length`, `abort` or `error`; None while it grows."""
    stop_reason: int | str | None = None
    error: str | None = None


@dataclass(frozen=True)
class RequestOutput:
    request_id: str
    prompt: str | None
    """The text of the prompt; None if it was given as token ids."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """Log-probabilities by token id, for each token of the prompt: the token first, then the most likely tokens.
    None for the first token, which nothing is in front of."""


@dataclass(frozen=True)
class BeamSearchSequence:
    tokens: list[int]
    """Prompt and answer."""
    text: str
    """The answer."""
    cum_logprob: float
    score: float
    """`cum_logprob` by the length penalty."""
    finish_reason: str


@dataclass(frozen=True)
class BeamSearchOutput:
    sequences: list[BeamSearchSequence]
    """The best first."""


@dataclass(frozen=True)
class EmbeddingOutput:
    embedding: list[float]
    num_prompt_tokens: int


class GrowingAnswer:
    def __init__(self, request: TextRequest, tokenizer: Tokenizer) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[dict[int, Logprob]] = []
        self._cumulative = 0.0
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self._last: TextDelta | None = None
        self._output: CompletionOutput | None = None
        """The answer so far; None after `add`."""
        self.num_cached_tokens = 0

    def add(self, delta: TextDelta) -> None:
        self._text.append(delta.text)
        self._token_ids += delta.token_ids
        self._last = delta
        self._output = None
        self.num_cached_tokens = max(self.num_cached_tokens, delta.num_cached_tokens)
        if delta.prompt_logprobs is not None:
            pairs = zip(self._request.prompt_token_ids[1:], delta.prompt_logprobs, strict=True)
            self.prompt_logprobs = [None, *(self._position(*pair) for pair in pairs)]
        for token_id, entry in zip(delta.token_ids, delta.logprobs or (), strict=False):
            self._logprobs.append(self._position(token_id, entry))
            self._cumulative += entry.logprob

    @property
    def finished(self) -> bool:
        return self._last is not None and self._last.finish_reason is not None

    def output(self) -> CompletionOutput:
        if self._output is not None:
            return self._output
        asked = self._request.sampling.logprobs is not None
        last = self._last
        self._text = ["".join(self._text)]
        self._output = CompletionOutput(
            index=self._request.index,
            text=self._text[0],
            token_ids=list(self._token_ids),
            cumulative_logprob=self._cumulative if asked else None,
            logprobs=list(self._logprobs) if asked else None,
            finish_reason=str(last.finish_reason) if last and last.finish_reason else None,
            stop_reason=last.stop_reason if last else None,
            error=last.error if last else None,
        )
        return self._output

    def _position(self, token_id: int, entry: TokenLogprobs) -> dict[int, Logprob]:
        position = {token_id: Logprob(entry.logprob, entry.rank, self._spell(token_id))}
        top = zip(entry.top_token_ids, entry.top_logprobs, strict=True)
        for rank, (other, logprob) in enumerate(top, start=1):
            position.setdefault(other, Logprob(logprob, rank, self._spell(other)))
        return position

    def _spell(self, token_id: int) -> str:
        return self._tokenizer.token_bytes(token_id).decode("utf-8", errors="replace")


def request_output(
    request_id: str, answers: list[GrowingAnswer], first: TextRequest
) -> RequestOutput:
    """The answers of one prompt so far; `first` is any of its requests."""
    return RequestOutput(
        request_id=request_id,
        prompt=first.prompt,
        prompt_token_ids=[*first.prompt_token_ids],
        outputs=[answer.output() for answer in answers],
        finished=all(answer.finished for answer in answers),
        num_cached_tokens=answers[0].num_cached_tokens,
        prompt_logprobs=answers[0].prompt_logprobs,
    )
