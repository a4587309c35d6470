# SPDX-License-Identifier: Apache-2.0
"""Checks of sampling and scoring: the tokens and log-probabilities of the reference, in every bit."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pagoda.backend.base import Backend
from pagoda.backend.sampling import (
    SampledRow,
    SampledRows,
    SampleOutcome,
    SamplingRow,
    SamplingRules,
)
from pagoda.backend.sampling_table import SamplingTable
from pagoda.messages.sampling_params import DRAWS, RANGES, SamplingParams
from pagoda.plugins.backend_check.subject import Check, Subject, ensure, random_tensor

VOCABULARIES = (1, 31, 130, 1000, 8193)
_BATCHES = 8
_SLOTS = 9
KINDS = ("flat", "normal", "peaked", "tied", "constant", "huge", "zeros", "nan", "inf", "-inf")
"""Shapes of distributions."""


def row_of(
    vocab: int,
    *,
    position: int = 0,
    seen: tuple[int, ...] = (),
    counts: tuple[int, ...] = (),
    allowed: Tensor | None = None,
    stops: tuple[int, ...] = (),
    **params: Any,
) -> SamplingRow:
    sampling = SamplingParams(**{"seed": 0} | params)
    bias = {token: value for token, value in (sampling.logit_bias or {}).items() if token < vocab}
    rules = SamplingRules(
        sampling, allowed, array("q", stops), array("q", bias), array("f", bias.values())
    )
    return SamplingRow(
        rules, position, rules.allowed, bool(stops), array("q", seen), array("f", counts)
    )


def table_of(vocab: int, rows: Sequence[SamplingRow]) -> SamplingTable:
    """A table whose first slots have these parameters."""
    table = SamplingTable(len(rows), vocab)
    for slot, row in enumerate(rows):
        table.put(slot, row)
    return table


def rows_of(found: SampledRows, table: SamplingTable, slots: Sequence[int]) -> list[SampledRow]:
    """The results row by row, without what a row does not have."""
    rows = []
    for i, slot in enumerate(slots):
        outcome, count = (
            SampleOutcome(int(found.outcomes[i])),
            table.row(slot).rules.sampling.logprobs,
        )
        if outcome is not SampleOutcome.DRAWN:
            rows.append(SampledRow(outcome))
            continue
        report = None if count is None else found.token_logprobs([i], [count])[0]
        rows.append(SampledRow(outcome, int(found.token_ids[i]), report))
    return rows


def sample_all(
    backend: Backend[Any, Any], logits: Tensor, rows: Sequence[SamplingRow]
) -> list[SampledRow]:
    """Results of a backend for logits [rows, vocab] with these parameters."""
    slots, table = range(len(rows)), table_of(logits.shape[1], rows)
    return rows_of(backend.sample(logits, table, slots), table, slots)


def mask(tokens: list[int], vocab: int) -> Tensor:
    """The bits of tokens, in words of 32."""
    words = [0] * -(-vocab // 32)
    for token in tokens:
        words[token // 32] |= 1 << token % 32
    return torch.tensor([word - 2**32 * (word >> 31) for word in words], dtype=torch.int32)


def logits_like(kind: str, vocab: int, seed: int) -> Tensor:
    """Logits [vocab] whose distribution has a certain shape."""
    normal = random_tensor(vocab, seed=seed)
    shapes = {
        "flat": normal * 0.01,
        "normal": normal,
        "peaked": normal * 7,
        "tied": (normal * 3).round(),
        "constant": normal * 0 - 2.5,
        "huge": normal * 1e37,
        "zeros": torch.where(normal > 0, 0.0, -0.0),
    }
    if kind in shapes:
        return shapes[kind]
    normal[seed % vocab] = float(kind)
    return normal


_OTHER_DRAWS = {
    name: (getattr(SamplingParams(), name),) * 2 + tuple(RANGES[name].within(0.9, 0.3, 1e-9))
    for name in DRAWS
    if name not in ("temperature", "top_p", "top_k", "min_p")
}
"""Values of parameters that need none of their own: the neutral one, and some over the range."""


def random_row(vocab: int, rng: random.Random) -> SamplingRow:
    def one(*choices: Any) -> Any:
        return rng.choice(choices)

    seen = rng.sample(range(vocab), min(vocab, rng.choice([0, 0, 3, 40])))
    tokens = rng.sample(range(vocab), min(vocab, rng.choice([1, 5, 300])))
    return row_of(
        vocab,
        position=rng.choice([0, 1, 2**33]),
        seen=tuple(seen),
        counts=tuple(rng.choice([0, 1, 7]) for _ in seen),
        allowed=one(None, None, mask(tokens, vocab)),
        stops=one((), (), (rng.randrange(vocab),)),
        temperature=one(0.0, 1e-5, 0.3, 1.0, 1.0, 2.5, 100.0),
        top_k=one(0, 0, -1, 1, 2, 5, 40, 300, vocab),
        top_p=one(1.0, 1.0, 0.95, 0.5, 0.1, 1e-30),
        min_p=one(0.0, 0.0, 0.05, 0.5, 1.0),
        repetition_penalty=one(1.0, 1.3, 0.01),
        presence_penalty=one(0.0, 0.7),
        frequency_penalty=one(0.0, -0.4),
        logit_bias=one(None, {3: 4.0, 5: -100.0}),
        logprobs=one(None, 0, 1, 20),
        seed=rng.randrange(-(2**63), 2**64),
        **{name: one(*values) for name, values in _OTHER_DRAWS.items()},
    )


def _sample(subject: Subject) -> str:
    rng, counted = random.Random(1), 0
    for vocab in VOCABULARIES:
        # One table for all batches, of which each takes slots in any order, as requests come and go.
        table = table_of(vocab, [random_row(vocab, rng) for _ in range(_SLOTS)])
        for batch in range(_BATCHES):
            slots = rng.sample(range(_SLOTS), rng.randint(1, 6))
            kinds = [rng.choice(KINDS) for _ in slots]
            logits = torch.stack(
                [logits_like(kind, vocab, batch + i) for i, kind in enumerate(kinds)]
            )
            counted += _compare(subject, logits, table, slots)
            for slot in slots:
                _go_on(table, slot, rng)
            counted += _compare(subject, logits, table, slots)
            table.put(slots[0], random_row(vocab, rng))
    return f"{counted} rows, every token and log-probability"


def _compare(subject: Subject, logits: Tensor, table: SamplingTable, slots: Sequence[int]) -> int:
    """Compares the rows of a step with the reference's; returns how many there are."""
    device, vocab = subject.backend.device, logits.shape[1]
    own = subject.backend.sample(logits.to(device, copy=True), table, slots)
    expected = subject.reference.sample(logits.clone(), table, slots)
    for slot, found, wanted in zip(
        slots, rows_of(own, table, slots), rows_of(expected, table, slots), strict=True
    ):
        ensure(
            found == wanted,
            f"sample of {vocab} tokens gives {found}, not {wanted}, for {table.row(slot).rules.sampling}",
        )
    return len(slots)


def _go_on(table: SamplingTable, slot: int, rng: random.Random) -> None:
    """Changes what a further token changes: the position, masks, stops, and tokens to penalise."""
    row, vocab = table.row(slot), table.vocab_size
    table.advance([slot])
    table.allow(slot, rng.choice([None, row.rules.allowed, mask([rng.randrange(vocab)], vocab)]))
    table.hold_back_stops(slot, held=False)
    if len(row.seen) < vocab:
        row.seen.append(min(set(range(vocab)).difference(row.seen)))
        row.counts.append(1)
    row.counts[0] += 1
    table.seen_more(slot)


def _score(subject: Subject) -> str:
    for vocab in VOCABULARIES:
        logits = torch.stack([logits_like(kind, vocab, 3) for kind in ("normal", "tied", "peaked")])
        ids = torch.tensor([0, vocab - 1, vocab // 2])
        own = subject.backend.score(logits.to(subject.backend.device), ids, 5)
        expected = subject.reference.score(logits, ids, 5)
        for field in ("ranks", "top_token_ids", "logprobs"):
            same = torch.equal(getattr(own, field).cpu(), getattr(expected, field))
            ensure(same, f"score of {vocab} tokens has other {field}")
        logits[1, 0] = torch.nan
        spoiled = subject.backend.score(logits.to(subject.backend.device), ids, 5)
        ensure(not spoiled.finite, "score calls logits finite of which one is NaN")
    return f"vocabularies of {', '.join(map(str, VOCABULARIES))}"


FURTHER = (Check("sample", _sample), Check("score", _score))
