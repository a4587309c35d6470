# SPDX-License-Identifier: Apache-2.0
"""Inputs of a step on their way from host memory to where its launches read it."""

from __future__ import annotations

import torch
from torch import Tensor

from pagoda.backend.base import FutureTokens, StepInput
from pagoda.plugins.cuda.runtime import Runtime, Work
from pagoda.plugins.cuda.schedule import Bound, Rows
from pagoda.plugins.cuda.slot_mapping import SlotMapping
from pagoda.plugins.cuda.staging import Pinned, PinnedPool

_PADDING = {"adapters": -1}
"""Numbers in rows that fill up a step; of other inputs 0."""


def deliver_step(
    runtime: Runtime, pool: PinnedPool, bound: Bound, rows: Rows, step: StepInput[SlotMapping]
) -> tuple[Work, list[Pinned]]:
    """Work that copies a step's inputs, and the pinned memory that it reads."""
    packed = pool.take(bound.parcel.num_bytes)
    *views, valid = bound.parcel.views(packed.memory)
    valid.fill_(rows.num_tokens)
    targets = dict(zip(bound.names, bound.parcel.views(bound.packed), strict=False))
    there: list[tuple[Tensor, Tensor]] = []
    for name, view in zip(bound.names, views, strict=True):
        given = step.tensors[name]
        count = len(given)
        held = runtime.held(given)
        if held is None:
            view[:count] = given.reshape(count, *view.shape[1:])
        else:
            there.append((targets[name][:count], held.reshape(count, *view.shape[1:])))
        view[count:] = _PADDING.get(name, 0)
    copies = [(bound.packed, packed.memory)]
    copies += [(own, step.metadata[group].packed.memory) for group, own in bound.places.items()]
    future_tokens = [
        _FutureTokensCopy(pool, targets["token_ids"], rows_of) for rows_of in step.future_tokens
    ]

    def deliver() -> None:
        for target, source in copies:
            target.copy_(source, non_blocking=True)
        for target, source in there:
            target.copy_(source)
        for tokens in future_tokens:
            tokens.put()

    pinned = [packed, *(tokens.places for tokens in future_tokens)]
    return deliver, pinned + [step.metadata[group].packed for group in bound.places]


class _FutureTokensCopy:
    """Tokens that the step before has left on the device."""

    def __init__(self, pool: PinnedPool, token_ids: Tensor, future_tokens: FutureTokens) -> None:
        self._token_ids, self._source = token_ids, future_tokens.token_ids
        self.places = pool.take(16 * len(future_tokens.rows))
        """Rows of the step, then elements of the tokens that become theirs."""
        self._memory = self.places.memory
        numbers = torch.tensor([*future_tokens.rows, *future_tokens.places])
        self._memory.view(torch.int64).copy_(numbers)

    def put(self) -> None:
        indices = self._memory.to(self._token_ids.device, non_blocking=True).view(torch.int64)
        rows, sources = indices.view(2, -1)
        self._token_ids.index_copy_(0, rows, self._source.index_select(0, sources))
