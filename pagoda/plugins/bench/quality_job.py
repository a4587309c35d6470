# SPDX-License-Identifier: Apache-2.0
"""Closeness of a model to a reference: the process `python -m pagoda.plugins.bench.quality_job`, a job.

A text is cut into windows; each is computed like a prompt, from an empty context, by both models, and every
position but the last predicts the token behind it. Logits of all positions are compared over the whole vocabulary.
A row's result does not depend on the batch or on chunks, so these are the logits that decoding would have seen.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec

from pagoda.errors import ConfigError
from pagoda.messages.frontend import Work
from pagoda.messages.jobs import Closeness, QualityConfig, QualityResult
from pagoda.messages.kv_groups import KVGroup
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.worker import SlotStart
from pagoda.messages.worker_config import WorkerConfig
from pagoda.worker import job

if TYPE_CHECKING:
    from torch import Tensor

    from pagoda.model.decoder import Decoder
    from pagoda.worker.input_batch import InputBatch

TOKENS_AT_ONCE = 512
ROWS_AT_ONCE = 32
"""Rows of logits that are compared together, so that float64 copies of large vocabularies stay small."""
_TOP = 20
_LEAST_REST = 1e-9
"""Less probability than this on all other tokens counts as none."""
_KV_SHARE = 0.9
"""Share of free memory that the KV cache of one window may take."""


class Scorer:
    """A loaded model that computes logits of all positions of one window after the other."""

    def __init__(self, config: WorkerConfig, context_len: int) -> None:
        """Raises what `plan_worker` and `load_runner` raise."""
        from pagoda.telemetry.tracer import Tracer
        from pagoda.worker.loading import load_runner, plan_worker

        config = msgspec.structs.replace(
            config, max_num_seqs=1, max_model_len=context_len, memory_utilization=_KV_SHARE
        )
        loaded = load_runner(plan_worker(config, keeps_all=True), Tracer("quality"))
        self.ready = loaded.ready
        self._model: Decoder[Any, Any] = loaded.runner.model
        self._batch: InputBatch = loaded.runner.batch
        self._block_ids = _block_ids(loaded.ready.kv_groups, context_len)

    def hidden_states(self, window: Sequence[int]) -> Iterator[Tensor]:
        """Hidden states [n, hidden] of the window's tokens, chunk by chunk."""
        start = SlotStart(0, list(window), len(window), 0, self._block_ids, Work(SamplingParams()))
        self._batch.start(start)
        done = 0
        while done < len(window):
            count = min(TOKENS_AT_ONCE, len(window) - done)
            tokens = self._batch.prepare([0], [count])
            self._batch.read(tokens)
            yield self._model.forward(self._model.plan(tokens.batch), None)
            done += count
        self._batch.free(0)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._model.logits(hidden)


def _block_ids(groups: Sequence[KVGroup], num_tokens: int) -> list[list[int]]:
    """Blocks of one sequence by group; a state takes one alone, in which it moves on."""
    tables: list[list[int]] = []
    used = 0
    for group in groups:
        count = group.num_blocks_for(num_tokens)
        if group.keeps_all:
            tables.append(list(range(used, used + count)))
            used += count
        else:
            tables.append([used] * count)
            used += 1
    return tables


@dataclass
class Tally:
    """Figures of positions that were compared, one number for each position."""

    kl: list[float] = field(default_factory=list)
    kl_top: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    """Negative log-probability that the model gives to the token of the text."""
    reference_losses: list[float] = field(default_factory=list)
    same: list[bool] = field(default_factory=list)

    def add(self, logits: Tensor, reference: Tensor, targets: Tensor) -> None:
        """Compares logits [n, vocab] float32 of both models; `targets` [n] are the tokens of the text.

        Raises ConfigError: a logit is not finite.
        """
        given, wanted = logits.double().log_softmax(-1), reference.double().log_softmax(-1)
        kl = (wanted.exp() * (wanted - given)).sum(-1)
        if not bool(kl.isfinite().all()):
            raise ConfigError("a model gives logits that are not finite; take another --dtype.")
        self.kl += kl.tolist()
        self.kl_top += _kl_of_top(given, wanted).tolist()
        self.losses += (-given.gather(1, targets[:, None])[:, 0]).tolist()
        self.reference_losses += (-wanted.gather(1, targets[:, None])[:, 0]).tolist()
        self.same += (logits.argmax(-1) == reference.argmax(-1)).tolist()

    def extend(self, other: Tally) -> None:
        self.kl += other.kl
        self.kl_top += other.kl_top
        self.losses += other.losses
        self.reference_losses += other.reference_losses
        self.same += other.same

    def closeness(self) -> Closeness:
        count, ordered = len(self.kl), sorted(self.kl)
        return Closeness(
            positions=count,
            perplexity=math.exp(math.fsum(self.losses) / count),
            reference_perplexity=math.exp(math.fsum(self.reference_losses) / count),
            kl_mean=max(0.0, math.fsum(self.kl) / count),
            kl_p99=max(0.0, ordered[math.ceil(0.99 * count) - 1]),
            kl_max=max(0.0, ordered[-1]),
            kl_top20=max(0.0, math.fsum(self.kl_top) / count),
            same_top_token=sum(self.same) / count,
        )


def _kl_of_top(given: Tensor, wanted: Tensor) -> Tensor:
    """KL(reference || model) [n] over the model's `_TOP` most likely tokens and all others as one."""
    top, places = given.topk(min(_TOP, given.shape[-1]), dim=-1)
    wanted_top = wanted.gather(-1, places)
    kl = (wanted_top.exp() * (wanted_top - top)).sum(-1)
    rest, wanted_rest = 1 - top.exp().sum(-1), 1 - wanted_top.exp().sum(-1)
    counts = (rest > _LEAST_REST) & (wanted_rest > _LEAST_REST)
    return kl + (wanted_rest * (wanted_rest / rest).log()).where(counts, kl.new_zeros(()))


def windows(token_ids: Sequence[int], prefix: Sequence[int], length: int) -> Iterator[list[int]]:
    """Cuts a text into windows of at most `length` tokens that begin with the prefix."""
    step = length - len(prefix)
    for start in range(0, len(token_ids), step):
        yield [*prefix, *token_ids[start : start + step]]


def compare(config: QualityConfig, on_progress: job.OnProgress) -> QualityResult:
    """Loads both models and compares them on all texts.

    Raises ConfigError: a model cannot be loaded, their vocabularies differ, or logits are not finite.
    """
    import torch

    reference = Scorer(config.reference, config.context_len)
    model = Scorer(config.model, config.context_len)
    sizes = model.ready.vocab_size, reference.ready.vocab_size
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"{config.model.model} has a vocabulary of {sizes[0]} tokens and {config.reference.model} one of "
            f"{sizes[1]}; only models of one vocabulary compare."
        )
    total, done = sum(map(len, config.texts)), 0
    tallies = []
    with torch.inference_mode():
        for text in config.texts:
            tally = Tally()
            for window in windows(text, config.prefix, config.context_len):
                _compare_window(model, reference, window, tally)
                done += len(window) - len(config.prefix)
                on_progress(done, total)
            tallies.append(tally)
    overall = Tally()
    for tally in tallies:
        overall.extend(tally)
    return QualityResult(
        model=model.ready.summary,
        reference=reference.ready.summary,
        texts=[tally.closeness() for tally in tallies],
        overall=overall.closeness(),
    )


def _compare_window(model: Scorer, reference: Scorer, window: Sequence[int], tally: Tally) -> None:
    import torch

    targets = torch.tensor(window[1:])
    chunks = zip(model.hidden_states(window), reference.hidden_states(window), strict=True)
    start = 0
    for given, wanted in chunks:
        end = min(start + len(given), len(targets))
        edges = [*range(start, end, ROWS_AT_ONCE), end]
        for first, last in pairwise(edges):
            rows = slice(first - start, last - start)
            tally.add(
                model.logits(given[rows]), reference.logits(wanted[rows]), targets[first:last]
            )
        start += len(given)


if __name__ == "__main__":
    job.run(QualityConfig, compare)
