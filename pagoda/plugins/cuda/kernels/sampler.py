# SPDX-License-Identifier: Apache-2.0
"""Rows of a sampling table packed for the device, the launches that sample or score, and their results."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pagoda.backend.sampling import WEIGHT_BITS, SampledRows, SampleOutcome, ScoredRows
from pagoda.backend.sampling_table import COLUMNS, SamplingTable
from pagoda.plugins.cuda.kernels import sampling as kernels
from pagoda.plugins.cuda.kernels.numbers import UNFUSED, blocks, power_of_two

_DTYPES = {"b": torch.int8, "f": torch.int32, "q": torch.int64, "Q": torch.int64}
"""Dtypes that columns are read as, by typecode: floats as their bits."""
_BLOCK, _EDITS = 4096, 256


@dataclass(frozen=True)
class PackedRows:
    """Parameters of some slots of a table, as they are now."""

    numbers: Tensor
    """[r, columns of `sampling.PACKED`] int64."""
    masks: Tensor | None
    """[r, words] int32; None where no row has one."""
    stops: Tensor
    """[k, 3] int64: row, token, 0."""
    biases: Tensor
    """[k, 3] int64: row, token, bits of a float32."""
    penalties: Tensor
    """[k, 3] int64: row, token, bits of how often it was said, as a float32."""
    most_reported: int
    """Likeliest tokens that any row reports; -1 if no row reports anything."""

    @property
    def changes_logits(self) -> bool:
        edited = len(self.stops) + len(self.biases) + len(self.penalties)
        return self.masks is not None or edited > 0

    def to(self, device: torch.device) -> PackedRows:
        """A copy on the device, made behind what the current stream has to do."""

        def copied(part: Tensor) -> Tensor:
            return part.to(device, non_blocking=True)

        return replace(
            self,
            numbers=copied(self.numbers),
            masks=None if self.masks is None else copied(self.masks),
            stops=copied(self.stops),
            biases=copied(self.biases),
            penalties=copied(self.penalties),
        )


@dataclass(frozen=True)
class Found:
    """Results of rows on the device, in one tensor."""

    columns: Tensor
    """[r, `sampling.FIXED` + 2 most] int64; see `sampling`."""
    most: int

    @classmethod
    def new(cls, rows: int, most: int, device: torch.device) -> Found:
        shape = (rows, kernels.FIXED + 2 * most)
        return cls(torch.empty(shape, dtype=torch.int64, device=device), most)

    @property
    def token_ids(self) -> Tensor:
        """[r] int64 on the device, -1 where none was drawn."""
        return self.columns[:, kernels.TOKEN]

    def sampled(self) -> SampledRows:
        """Results in host memory; waits for the device."""
        columns = self.columns.cpu()
        return SampledRows(
            columns[:, kernels.OUTCOME],
            columns[:, kernels.TOKEN],
            columns[:, kernels.RANK],
            columns[:, kernels.FIXED : kernels.FIXED + self.most],
            self._logprobs(columns),
        )

    def scored(self) -> ScoredRows:
        """Reports in host memory; waits for the device."""
        found = self.sampled()
        finite = not bool((found.outcomes == SampleOutcome.NOT_FINITE).any())
        return ScoredRows(finite, found.ranks, found.top_token_ids, found.logprobs)

    def _logprobs(self, columns: Tensor) -> Tensor:
        """[r, 1 + most] float32, by the arithmetic of `reference.sampling.token_logprobs`."""
        values = torch.cat(
            (columns[:, kernels.VALUE, None], columns[:, kernels.FIXED + self.most :]), 1
        )
        highest = _floats(columns[:, kernels.HIGHEST, None]).double()
        totals = columns[:, kernels.TOTAL].tolist()
        logarithms = [
            math.log(math.ldexp(float(total), -WEIGHT_BITS)) if total > 0 else math.nan
            for total in totals
        ]
        of_rows = torch.tensor(logarithms, dtype=torch.float64)[:, None]
        return ((_floats(values).double() - highest) - of_rows).float()


def _floats(bits: Tensor) -> Tensor:
    """Numbers float32 of their bits, in int64."""
    return bits.int().view(torch.float32)


def pack_rows(table: SamplingTable, slots: Sequence[int]) -> PackedRows:
    """The parameters of slots of a table, in host memory.

    Raises IndexError: the table has no such slot.
    """
    chosen = torch.tensor(slots, dtype=torch.int64)
    rows = [table.row(slot) for slot in slots]
    packed = {name: _column(table, name)[chosen].long() for name in kernels.PACKED}
    masked = packed["masked"] > 0
    packed["num_stops"] = ((packed["num_stops"] > 0) | masked).long()
    held = [(i, row.rules.stops) for i, row in enumerate(rows) if row.holds_back_stops]
    reported = packed["logprobs"]
    return PackedRows(
        numbers=torch.stack(list(packed.values()), dim=1),
        masks=table.masks[chosen] if bool(masked.any()) else None,
        stops=_edits([(i, stops, None) for i, stops in held]),
        biases=_edits([(i, row.rules.bias_ids, row.rules.biases) for i, row in enumerate(rows)]),
        penalties=_edits([(i, row.seen, row.counts) for i, row in enumerate(rows)]),
        most_reported=min(int(reported.max()), table.vocab_size) if len(slots) else -1,
    )


def _column(table: SamplingTable, name: str) -> Tensor:
    return torch.frombuffer(table.columns[name], dtype=_DTYPES[COLUMNS[name]])


def _edits(parts: Sequence[tuple[int, array[int], array[float] | None]]) -> Tensor:
    """Edits [k, 3] int64 of rows, each of tokens and numbers, or of tokens alone."""
    made = []
    for row, tokens, numbers in parts:
        if not len(tokens):
            continue
        edits = torch.zeros((len(tokens), 3), dtype=torch.int64)
        edits[:, 0] = row
        # Copied at once: arrays that are looked into cannot grow.
        edits[:, 1] = torch.tensor(tokens, dtype=torch.int64)
        if numbers is not None:
            edits[:, 2] = torch.tensor(numbers, dtype=torch.float32).view(torch.int32)
        made.append(edits)
    return torch.cat(made) if made else torch.empty((0, 3), dtype=torch.int64)


def sample(logits: Tensor, packed: PackedRows, changed: Tensor | None, found: Found) -> None:
    """Samples a token of each row of logits [r, vocab] float32, which stay as they are.

    `packed` lies on the device; `changed` [r, vocab] float32 is scratch, needed where rules change logits. `found`
    has room for `packed.most_reported` tokens.
    """
    rows, vocab = logits.shape
    if not rows:
        return
    block, width = min(_BLOCK, power_of_two(64, vocab)), found.columns.shape[1]
    ruled = logits
    if packed.changes_logits:
        if changed is None:
            raise ValueError("Rules that change logits need scratch for them.")
        words = 0 if packed.masks is None else packed.masks.shape[1]
        masks = packed.numbers if packed.masks is None else packed.masks
        kernels.mask[(rows, blocks(vocab, block))](
            logits, masks, packed.numbers, changed, vocab, words, block=block
        )
        edits = {"stops": packed.stops, "biases": packed.biases, "penalties": packed.penalties}
        for kind, own in edits.items():
            if len(own):
                kernels.edit[(blocks(len(own), _EDITS),)](
                    changed,
                    packed.numbers,
                    own,
                    len(own),
                    vocab,
                    kind=kind,
                    block=_EDITS,
                    **UNFUSED,
                )
        ruled = changed
    kernels.draw[(rows,)](
        logits,
        ruled,
        packed.numbers,
        found.columns,
        vocab,
        width,
        block=block,
        num_warps=8,
        **UNFUSED,
    )
    if packed.most_reported >= 0:
        _report(logits, found)


def score(logits: Tensor, token_ids: Tensor, found: Found) -> None:
    """Reports on a token [r] int64 of each row of logits [r, vocab] float32, and on the `found.most` likeliest."""
    if len(logits):
        found.columns[:, kernels.OUTCOME] = 0
        found.columns[:, kernels.TOKEN] = token_ids
        _report(logits, found)


def _report(logits: Tensor, found: Found) -> None:
    vocab = logits.shape[1]
    block = min(_BLOCK, power_of_two(64, vocab))
    kernels.report[(len(logits),)](
        logits,
        found.columns,
        vocab,
        found.columns.shape[1],
        most=found.most,
        block=block,
        num_warps=8,
        **UNFUSED,
    )
