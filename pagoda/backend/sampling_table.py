# SPDX-License-Identifier: Apache-2.0
"""Parameters of sampling of the requests of all slots, as arrays that backends read.

A request's rules are written when it takes its slot; from step to step only what depends on what was said is.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from pagoda.backend.sampling import SamplingRow, check_logits, share_of

_SEEDS = 2**64
COLUMNS: Mapping[str, str] = MappingProxyType(
    {
        "greedy": "b",
        "scale": "f",  # `SamplingRules.scale`, and so on; 0 for greedy sampling
        "lowest_power": "f",
        "top_k": "q",  # 0 for all
        "top_p": "Q",
        "typical_p": "Q",
        "seed": "Q",  # modulo 2^64
        "position": "Q",
        "logprobs": "q",  # of so many likeliest tokens; -1 for none, not even the token's own
        "masked": "b",  # only tokens of the slot's row of `SamplingTable.masks` may be sampled
        "stops": "Q",
        "num_stops": "q",  # 0 unless stops are held back at the position
        "bias_ids": "Q",
        "biases": "Q",
        "num_biases": "q",
        "seen": "Q",
        "counts": "Q",
        "num_seen": "q",
        "repetition": "f",
        "frequency": "f",
        "presence": "f",
    }
)
"""Typecodes (see `array`) of the columns, which are named after what they hold of a `SamplingRow`."""
LISTS = ("stops", "bias_ids", "biases", "seen", "counts")
"""Columns of addresses of a row's arrays in host memory."""
_OF_ALL_LOGITS = ("masked", "num_stops", "num_biases", "num_seen")
"""Columns that are not 0 where logits are changed, any of them, before a token is chosen."""


class SamplingTable:
    """One element of each column for every slot; the memory stays where it is."""

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        self.num_slots = num_slots
        self.vocab_size = vocab_size
        num_words = -(-vocab_size // 32)
        self.columns: dict[str, array[Any]] = {
            name: array(typecode, [0]) * num_slots for name, typecode in COLUMNS.items()
        }
        self.masks = torch.empty((num_slots, num_words), dtype=torch.int32)
        """[slots, ceil(vocab / 32)] int32: bit `i % 32` of word `i // 32` is set if token `i` may be sampled."""
        self._mask_bytes = 4 * num_words
        self._mask_memory = memoryview(
            (ctypes.c_char * self.masks.nbytes).from_address(self.masks.data_ptr())
        ).cast("B")
        """`masks` as bytes, which are written without a tensor of each."""
        self._positions = self.columns["position"]
        self._rows: list[SamplingRow | None] = [None] * num_slots

    def put(self, slot: int, row: SamplingRow) -> None:
        """Writes all of a slot. `row.seen` and `row.counts` may grow, and `seen_more` says so.
        Raises ValueError: the mask of allowed tokens is not of this vocabulary."""
        rules, sampling = row.rules, row.rules.sampling
        self.allow(slot, row.allowed)
        values = {
            "greedy": sampling.greedy,
            "scale": 0.0 if sampling.greedy else rules.scale,
            "lowest_power": rules.lowest_power,
            "top_k": max(sampling.top_k, 0),
            "top_p": share_of(sampling.top_p),
            "typical_p": share_of(sampling.typical_p),
            "seed": (sampling.seed or 0) % _SEEDS,
            "position": row.position,
            "logprobs": -1 if sampling.logprobs is None else sampling.logprobs,
            "stops": _address(rules.stops),
            "bias_ids": _address(rules.bias_ids),
            "biases": _address(rules.biases),
            "num_biases": len(rules.bias_ids),
            "repetition": sampling.repetition_penalty,
            "frequency": sampling.frequency_penalty,
            "presence": sampling.presence_penalty,
        }
        for name, value in values.items():
            self.columns[name][slot] = value
        self._rows[slot] = row
        self.hold_back_stops(slot, held=row.holds_back_stops)
        self.seen_more(slot)

    def row(self, slot: int) -> SamplingRow:
        """All of a slot as it is now. Raises IndexError: nothing was put there."""
        row = self._rows[slot]
        if row is None:
            raise IndexError(f"Slot {slot} has no parameters of sampling.")
        return SamplingRow(
            rules=row.rules,
            position=self.position(slot),
            allowed=self.masks[slot] if self.columns["masked"][slot] else None,
            holds_back_stops=self.columns["num_stops"][slot] > 0,
            seen=row.seen,
            counts=row.counts,
        )

    def position(self, slot: int) -> int:
        """Number of tokens that the slot has sampled."""
        return int(self._positions[slot])

    def advance(self, slots: Iterable[int]) -> None:
        """Counts a further token of each slot."""
        positions = self._positions
        for slot in slots:
            positions[slot] += 1

    def allow(self, slot: int, mask: Tensor | None) -> None:
        """Sets the mask of a slot's next tokens [ceil(vocab / 32)] int32; None allows all.
        Raises ValueError: it is of another vocabulary."""
        if mask is not None:
            num_words = self.masks.shape[1]
            if mask.dtype != torch.int32 or mask.shape != (num_words,):
                raise ValueError(f"A mask of allowed tokens must be {num_words} words of int32.")
            self.masks[slot] = mask
        self.columns["masked"][slot] = mask is not None

    def allow_bytes(self, slot: int, mask: bytes, among: Tensor | None) -> None:
        """Sets the mask of a slot's next token to its words in little-endian bytes, and to those `among` others.
        Raises ValueError: it is of another vocabulary."""
        if len(mask) != self._mask_bytes:
            raise ValueError(
                f"A mask of tokens has {len(mask) / 4:g} words instead of {self._mask_bytes // 4}."
            )
        begin = slot * self._mask_bytes
        self._mask_memory[begin : begin + self._mask_bytes] = mask
        if among is not None:
            self.masks[slot] &= among
        self.columns["masked"][slot] = 1

    def hold_back_stops(self, slot: int, *, held: bool) -> None:
        row = self._rows[slot]
        self.columns["num_stops"][slot] = len(row.rules.stops) if held and row is not None else 0

    def seen_more(self, slot: int) -> None:
        """The arrays of tokens that penalties are for have grown."""
        row = self._rows[slot]
        if row is not None:
            self.columns["seen"][slot] = _address(row.seen)
            self.columns["counts"][slot] = _address(row.counts)
            self.columns["num_seen"][slot] = len(row.seen)

    def num_candidates(self, slot: int) -> int:
        """Number of a row's highest logits that decide what the slot says next; 0 if all do.

        It is one more than `top_k`, so that they tell whether there are others that equal the k-th.
        """
        columns = self.columns
        if columns["logprobs"][slot] >= 0 or any(columns[name][slot] for name in _OF_ALL_LOGITS):
            return 0
        if columns["greedy"][slot]:
            return 1
        top_k = int(columns["top_k"][slot])
        return top_k + 1 if top_k else 0

    def most_reported(self, slots: Sequence[int]) -> int:
        """The most likeliest tokens that any of the slots reports; 0 if none does."""
        wanted = self.columns["logprobs"]
        most = max((wanted[slot] for slot in slots), default=0)
        return min(max(0, int(most)), self.vocab_size)

    def check(self, logits: Tensor, slots: Sequence[int]) -> None:
        """Raises ValueError unless logits are [slots, vocab] of this vocabulary."""
        check_logits(logits, slots)
        if logits.shape[1] != self.vocab_size:
            raise ValueError(
                f"Logits are of {logits.shape[1]} tokens, the parameters of {self.vocab_size}."
            )


def _address(values: array[Any]) -> int:
    return values.buffer_info()[0]
