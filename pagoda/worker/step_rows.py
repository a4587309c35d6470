# SPDX-License-Identifier: Apache-2.0
"""Rows of a step, one for each token that it computes, and what is wanted of them.

The hidden state of a row says what follows its token. A slot's next token is sampled from its last row, or, with
*k* drafts, one from each of its last 1 + *k*; prompts are scored and pooled from any of their rows. The decoder
gives the hidden states of all rows that somebody wants together.
"""

from __future__ import annotations

from typing import NamedTuple


class SlotRows(NamedTuple):
    """Rows of tokens of one slot, one behind the other."""

    slot: int
    position: int
    """Position of the first token in its sequence."""
    rows: range
    """Rows of the step."""

    def of(self, positions: range) -> range:
        """The rows of tokens at these positions."""
        offset = self.rows.start - self.position
        return range(positions.start + offset, positions.stop + offset)


class Draft(NamedTuple):
    """Tokens that may follow those of a slot."""

    token_ids: list[int]
    table_rows: range
    """Rows of the sampling table by which the token behind each is sampled; they lie behind the slots' own."""
