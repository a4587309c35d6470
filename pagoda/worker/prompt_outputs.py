# SPDX-License-Identifier: Apache-2.0
"""Reports on prompts: log-probabilities of their tokens, and their hidden states as one vector.

The hidden state of a token scores the token behind it, so a chunk of a prompt gives the log-probabilities of the
tokens behind its own. They are computed a few rows at a time: a row of logits is as long as the vocabulary.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pagoda.backend.sampling import ScoredRows
from pagoda.checkpoints.pooling_spec import HeadPooling, VectorKind
from pagoda.messages.audio import Alignment
from pagoda.messages.frontend import Pooling, PromptLogprobs
from pagoda.messages.worker import MIN_SAMPLED_ROWS, SlotStart
from pagoda.model.cross_encoder import CrossEncoder, crossing
from pagoda.model.decoder import Decoder
from pagoda.worker.alignment import places_of
from pagoda.worker.step_rows import SlotRows

_HEAD_POOLING: Mapping[HeadPooling, Pooling] = {
    "first": Pooling.FIRST,
    "last": Pooling.LAST,
    "mean": Pooling.MEAN,
    "late": Pooling.MEAN,
    "all": Pooling.ALL,
}
"""Tokens that heads look at, or whose mean they take; `late` ones take that of their scores."""
_OF_TOKENS: Mapping[Pooling, VectorKind] = {
    Pooling.ALL: "token_vectors",
    Pooling.WEIGHTS: "token_weights",
    Pooling.SPARSE: "masked",
}
"""Layers that hidden states of tokens go through."""
_BY_HEAD = (Pooling.SCORE, Pooling.SCORE_ALL)
ScoreRows = Callable[[Tensor, Tensor, int], ScoredRows]
"""`Backend.score`."""


@dataclass(frozen=True)
class PromptOutputs:
    """Results of a step for prompts, by slot; None where the model produced NaN or infinite values."""

    logprobs: dict[int, PromptLogprobs | None] = field(default_factory=dict)
    embeddings: dict[int, bytes | None] = field(default_factory=dict)
    sums: dict[int, Tensor] = field(default_factory=dict)
    """Hidden states of the step's tokens [hidden], added up, of slots that take their mean."""
    rows: dict[int, Tensor] = field(default_factory=dict)
    """Vectors of the step's tokens [n, d], of slots that take all of them."""

    def update(self, other: PromptOutputs) -> None:
        self.logprobs.update(other.logprobs)
        self.embeddings.update(other.embeddings)
        self.sums.update(other.sums)
        self.rows.update(other.rows)

    def forget(self, slot: int) -> None:
        for found in (self.logprobs, self.embeddings, self.sums, self.rows):
            found.pop(slot, None)


@dataclass(frozen=True)
class _Chunk:
    """Wanted rows of a step that belong to one slot."""

    slot: int
    scored: range
    """Positions of prompt tokens that the chunk gives log-probabilities of."""
    scoring: range
    """Rows of the tokens in front of these."""
    pooled: range
    """Rows of tokens that are pooled."""
    is_last: bool
    """The chunk ends the prompt."""

    def rows(self) -> Iterable[int]:
        return {*self.scoring, *self.pooled}


class _Prompt:
    def __init__(self, start: SlotStart) -> None:
        self.num_tokens = start.num_prompt_tokens
        self.num_top = start.work.sampling.prompt_logprobs
        self.num_scored = max(1, start.num_scored_tokens)
        if self.num_top is None:
            self.num_scored = self.num_tokens
        self.token_ids = torch.tensor(start.token_ids[: self.num_tokens])
        self.pooling = start.work.pooling
        self.alignment = start.work.alignment
        self.digest = b"" if start.work.encoder_input is None else start.work.encoder_input.digest
        self.keys = torch.zeros(0)
        """Keys [heads, positions, head_dim] of what is heard, of the heads of the alignment."""
        self.sum: Tensor | None = None
        """Hidden states of all tokens so far, added up in float64."""
        self.rows: list[Tensor] = []
        """Vectors of tokens so far [n, d], where all are wanted; of an alignment queries [n, heads, head_dim]."""


class PromptReader:
    """One rank's part in it. All ranks of the last stage compute logits together, the first reads them."""

    def __init__(
        self, score: ScoreRows, *, leads: bool = True, scored_as: HeadPooling = "last"
    ) -> None:
        """`scored_as`: tokens that a head which scores texts looks at, as `ClassifierSpec.pooling`."""
        self._score = score
        self._leads = leads
        self._scored_as = _HEAD_POOLING[scored_as]
        self._scores_tokens = scored_as in ("late", "all")
        self._prompts: dict[int, _Prompt] = {}
        self._without_answer: set[int] = set()

    def start(self, start: SlotStart) -> None:
        if start.work.sampling.max_tokens == 0:
            self._without_answer.add(start.slot)
        is_scored = start.num_scored_tokens < start.num_prompt_tokens
        if start.work.pooling is not None or (
            start.work.sampling.prompt_logprobs is not None and is_scored
        ):
            self._prompts[start.slot] = _Prompt(start)

    def free(self, slot: int) -> None:
        self._prompts.pop(slot, None)
        self._without_answer.discard(slot)

    def samples(self, slot: int) -> bool:
        """False for a request that ends with its prompt."""
        return slot not in self._without_answer

    @property
    def has_prompts(self) -> bool:
        """True if anything is to be reported of a prompt that is being computed."""
        return len(self._prompts) > 0

    def chunks(self, step: Iterable[SlotRows]) -> list[_Chunk]:
        """Rows of a step from which something of prompts is made."""
        wanted = []
        for part in step:
            slot, first, rows = part
            prompt = self._prompts.get(slot)
            if prompt is None:
                continue
            # The token behind the last one of the chunk is scored too.
            end = min(first + len(rows) + 1, prompt.num_tokens)
            scored = range(min(max(first + 1, prompt.num_scored), end), end)
            pooled = range(0)
            is_last = first + len(rows) == prompt.num_tokens
            pooling = self._rows_of(prompt)
            if pooling in (Pooling.MEAN, Pooling.PLACES) or pooling in _OF_TOKENS:
                pooled = rows
            elif pooling is Pooling.FIRST and first == 0:  # encoders take prompts whole
                pooled = rows[:1]
            elif pooling is Pooling.LAST and is_last:
                pooled = rows[-1:]
            if scored or pooled:
                scoring = part.of(range(scored.start - 1, scored.stop - 1))
                wanted.append(_Chunk(slot, scored, scoring, pooled, is_last))
        return wanted

    def needs(self, model: Decoder[Any, Any], chunks: list[_Chunk]) -> list[str]:
        """Results of the model that chunks are made of, besides hidden states."""
        found = (self._prompts[chunk.slot].alignment for chunk in chunks)
        if model.encoder is None:
            return []
        heads = {
            head for it in found if it is not None for head in model.encoder.own_heads(it.heads)
        }
        return [crossing(layer) for layer in sorted({layer for layer, _ in heads})]

    def read(
        self,
        model: Decoder[Any, Any],
        hidden: Tensor,
        places: dict[int, int],
        chunks: list[_Chunk],
        needed: Mapping[str, Tensor],
    ) -> PromptOutputs:
        """`hidden` [m, hidden] are normed hidden states; `places` says which of them is which row of the step.
        `needed` are the results that `needs` names, of all rows."""
        outputs = PromptOutputs()
        for chunk in chunks:
            prompt = self._prompts[chunk.slot]
            if chunk.scored:
                rows = [places[row] for row in chunk.scoring]
                outputs.logprobs[chunk.slot] = self._logprobs(model, hidden, rows, chunk, prompt)
            if prompt.alignment is not None and model.encoder is not None:
                self._align(model, model.encoder, needed, chunk, prompt, prompt.alignment, outputs)
            elif chunk.pooled:
                pooled = hidden[[places[row] for row in chunk.pooled]]
                self._pool(model, pooled, chunk, prompt, outputs)
        return outputs

    def _rows_of(self, prompt: _Prompt) -> Pooling | None:
        """Tokens whose hidden states are wanted, and what becomes of them."""
        return self._scored_as if prompt.pooling in _BY_HEAD else prompt.pooling

    def _logprobs(
        self,
        model: Decoder[Any, Any],
        hidden: Tensor,
        rows: list[int],
        chunk: _Chunk,
        prompt: _Prompt,
    ) -> PromptLogprobs | None:
        parts: list[ScoredRows] = []
        num_top = prompt.num_top or 0
        for begin in range(0, len(rows), MIN_SAMPLED_ROWS):
            some = rows[begin : begin + MIN_SAMPLED_ROWS]
            logits = model.logits(hidden[some])
            if self._leads:
                position = chunk.scored.start + begin
                token_ids = prompt.token_ids[position : position + len(some)]
                parts.append(self._score(logits, token_ids, num_top))
        if not all(part.finite for part in parts):
            return None
        ranks = [part.ranks for part in parts]
        top_ids = [part.top_token_ids for part in parts]
        logprobs = [part.logprobs for part in parts]
        return PromptLogprobs(
            chunk.scored.start,
            num_top,
            _int32_bytes(ranks),
            _int32_bytes(top_ids),
            b"".join(map(_bytes, logprobs)),
        )

    def _pool(
        self,
        model: Decoder[Any, Any],
        hidden: Tensor,
        chunk: _Chunk,
        prompt: _Prompt,
        outputs: PromptOutputs,
    ) -> None:
        """Pools hidden states of a chunk [n, hidden], which layers of the model's go through before or behind."""
        by_head, pooling = prompt.pooling in _BY_HEAD, self._rows_of(prompt)
        of_tokens = self._scores_tokens if by_head else pooling in _OF_TOKENS
        kind = "vectors" if pooling is None else _OF_TOKENS.get(pooling, "vectors")
        layers = model.scores if by_head else partial(model.through, kind)
        if pooling is Pooling.SPARSE:
            hidden = _highest(layers, hidden)
        elif of_tokens:
            hidden = layers(hidden)
        if pooling in (Pooling.ALL, Pooling.WEIGHTS):
            outputs.rows[chunk.slot] = hidden
            pooled = torch.cat([*prompt.rows, hidden])
        elif pooling is Pooling.MEAN:
            part = hidden.double().sum(0)
            outputs.sums[chunk.slot] = part
            total = part if prompt.sum is None else prompt.sum + part
            pooled = (total / prompt.num_tokens).float()
        else:
            pooled = hidden[0]
        if chunk.is_last:
            pooled = pooled if of_tokens else layers(pooled[None])[0]
            is_finite = bool(pooled.isfinite().all())
            outputs.embeddings[chunk.slot] = _bytes(pooled) if is_finite else None

    def _align(
        self,
        model: Decoder[Any, Any],
        encoder: CrossEncoder[Any],
        needed: Mapping[str, Tensor],
        chunk: _Chunk,
        prompt: _Prompt,
        alignment: Alignment,
        outputs: PromptOutputs,
    ) -> None:
        """Takes the queries of a chunk's tokens; once all are there, finds the tokens' places in the audio."""
        heads = encoder.own_heads(alignment.heads)
        if not prompt.rows:  # the audio was encoded in this step
            prompt.keys = encoder.keys(prompt.digest, heads)
        crossed = {layer: needed[crossing(layer)][[*chunk.pooled]] for layer, _ in heads}
        outputs.rows[chunk.slot] = encoder.queries(crossed, heads, len(chunk.pooled))
        if chunk.is_last:
            queries = torch.cat([*prompt.rows, outputs.rows[chunk.slot]])[alignment.first :]
            sizes = alignment.positions, len(alignment.heads)
            found = places_of(queries, prompt.keys, *sizes, model.backend.group.all_reduce)
            outputs.embeddings[chunk.slot] = _bytes(found)

    def advance(self, outputs: PromptOutputs) -> None:
        """Remembers what the step has given."""
        for slot, part in outputs.sums.items():
            prompt = self._prompts.get(slot)
            if prompt is not None:
                prompt.sum = part if prompt.sum is None else prompt.sum + part
        for slot, rows in outputs.rows.items():
            prompt = self._prompts.get(slot)
            if prompt is not None:
                prompt.rows.append(rows)


def _highest(layers: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    """log(1 + x) of the highest x above 0 that any hidden state [n, hidden] gives each token: [1, vocab]."""
    pieces = torch.split(hidden, MIN_SAMPLED_ROWS)
    parts = (layers(some).amax(0) for some in pieces)
    return torch.log1p(torch.stack([*parts]).amax(0, keepdim=True).clamp(min=0))


def _int32_bytes(parts: list[Tensor]) -> bytes:
    return b"".join(_bytes(part.to(torch.int32)) for part in parts)


def _bytes(values: Tensor) -> bytes:
    """The elements in order, as they lie in memory; torch needs numpy for that."""
    values = values.cpu().contiguous()
    return ctypes.string_at(values.data_ptr(), values.nbytes)
