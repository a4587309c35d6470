# SPDX-License-Identifier: Apache-2.0
"""Tokens from hidden states without logits in between: the part of decoders whose device chooses by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from pagoda.backend.sampling import SampledRows
from pagoda.backend.sampling_table import SamplingTable


@runtime_checkable
class SamplesRows(Protocol):
    """Part of a compiled decoder that knows best how much of a row of logits has to be read for its token.

    It computes on one rank, and its backend does not run ahead.
    """

    def sample(self, hidden: Tensor, table: SamplingTable, slots: Sequence[int]) -> SampledRows:
        """The next token of each of some slots of the table from its row of hidden states [slots, hidden].

        It is the one that `Backend.sample` gives of the row's logits. Raises ValueError: rows and slots do not
        fit each other; IndexError: the table has no such slot.
        """
