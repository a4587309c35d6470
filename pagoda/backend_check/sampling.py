"""Checks of sampling and scoring: the tokens and log-probabilities of the reference, in every bit."""

from __future__ import annotations

import random
from array import array
from typing import Any

import torch
from torch import Tensor

from pagoda.backend.sampling import SamplingRow, SamplingRules
from pagoda.backend_check.subject import Check, Subject, ensure, random_tensor
from pagoda.messages.sampling_params import SamplingParams

VOCABULARIES = (1, 31, 130, 1000, 8193)
_BATCHES = 12
_SHAPES = ("flat", "normal", "peaked", "tied", "constant", "huge", "nan", "inf")


def _logits(shape: str, vocab: int, seed: int) -> Tensor:
    normal = random_tensor(vocab, seed=seed)
    shapes = {
        "flat": normal * 0.01,
        "normal": normal,
        "peaked": normal * 7,
        "tied": (normal * 3).round(),
        "constant": normal * 0 - 2.5,
        "huge": normal * 1e37,
    }
    if shape in shapes:
        return shapes[shape]
    normal[seed % vocab] = float(shape)
    return normal


def _allowed(vocab: int, rng: random.Random) -> Tensor:
    """The bits of a few tokens, in words of 32."""
    words = [0] * -(-vocab // 32)
    for token in rng.sample(range(vocab), min(vocab, 5)):
        words[token // 32] |= 1 << token % 32
    return torch.tensor([word - 2**32 * (word >> 31) for word in words], dtype=torch.int32)


def _row(vocab: int, rng: random.Random) -> SamplingRow:
    def one(*choices: Any) -> Any:
        return rng.choice(choices)

    sampling = SamplingParams(
        temperature=one(0.0, 0.3, 1.0, 1.0, 2.5),
        top_k=one(0, 0, 1, 5, 300),
        top_p=one(1.0, 0.95, 0.1),
        typical_p=one(1.0, 1.0, 0.3),
        min_p=one(0.0, 0.0, 0.05),
        repetition_penalty=one(1.0, 1.3),
        presence_penalty=one(0.0, 0.7),
        frequency_penalty=one(0.0, -0.4),
        logprobs=one(None, 0, 1, 20),
        seed=rng.randrange(2**64),
    )
    seen = rng.sample(range(vocab), min(vocab, one(0, 3, 40)))
    stops = array("q", one((), (), (rng.randrange(vocab),)))
    allowed = one(None, None, _allowed(vocab, rng))
    bias = one((), (), (rng.randrange(vocab),))
    rules = SamplingRules(sampling, allowed, stops, array("q", bias), array("f", [4.0] * len(bias)))
    counts = array("f", [float(one(0, 1, 7)) for _ in seen])
    return SamplingRow(rules, one(0, 1, 2**33), allowed, len(stops) > 0, array("q", seen), counts)


def _sample(subject: Subject) -> str:
    rng, counted = random.Random(1), 0
    for vocab in VOCABULARIES:
        for batch in range(_BATCHES):
            shapes = [rng.choice(_SHAPES) for _ in range(rng.randint(1, 6))]
            logits = torch.stack([_logits(s, vocab, batch + i) for i, s in enumerate(shapes)])
            rows = [_row(vocab, rng) for _ in shapes]
            own = subject.backend.sample(logits.to(subject.backend.device, copy=True), rows)
            expected = subject.reference.sample(logits.clone(), rows)
            for found, wanted, row in zip(own, expected, rows, strict=True):
                ensure(
                    found == wanted,
                    f"sample of {vocab} tokens gives {found}, not {wanted}, for {row.rules.sampling}",
                )
            counted += len(rows)
    return f"{counted} rows, every token and log-probability"


def _score(subject: Subject) -> str:
    for vocab in VOCABULARIES:
        logits = torch.stack([_logits(s, vocab, 3) for s in ("normal", "tied", "peaked")])
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
