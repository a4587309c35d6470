# SPDX-License-Identifier: Apache-2.0
"""Sampling and scoring on the device: parameters of rows go there, tokens and reports come back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pagoda.backend.host import check_token_ids
from pagoda.backend.sampling import SampledRows, ScoredRows, check_logits
from pagoda.backend.sampling_table import SamplingTable
from pagoda.plugins.cuda.kernels import sampler as kernels
from pagoda.plugins.cuda.kernels.sampling import FIXED
from pagoda.plugins.cuda.lost import device_errors
from pagoda.plugins.cuda.pending_output import Copied, CopiedOutput
from pagoda.plugins.cuda.runtime import Runtime
from pagoda.plugins.cuda.staging import Parcel, PinnedPool


class DeviceSampler:
    def __init__(self, runtime: Runtime, pool: PinnedPool) -> None:
        self._runtime, self._pool = runtime, pool

    def launch(
        self, logits: Tensor, table: SamplingTable, slots: Sequence[int]
    ) -> CopiedOutput[SampledRows]:
        """Launches what `Backend.sample` does. Raises DeviceLostError: the device has failed."""
        table.check(logits, slots)
        with device_errors(self._runtime):
            return self._launched(logits, table, slots)

    def _launched(
        self, logits: Tensor, table: SamplingTable, slots: Sequence[int]
    ) -> CopiedOutput[SampledRows]:
        runtime, here = self._runtime, self._on_device(logits)
        packed = kernels.pack_rows(table, slots)
        masks = [] if packed.masks is None else [packed.masks]
        given = [packed.numbers, packed.stops, packed.biases, packed.penalties, *masks]
        parcel = Parcel([(tuple(each.shape), each.dtype) for each in given])
        pinned = self._pool.take(parcel.num_bytes)
        for view, each in zip(parcel.views(pinned.memory), given, strict=True):
            view.copy_(each)
        memory, there = pinned.memory, runtime.empty((parcel.num_bytes,), torch.uint8)
        numbers, stops, biases, penalties, *own_masks = parcel.views(there)
        on_device = replace(
            packed,
            numbers=numbers,
            stops=stops,
            biases=biases,
            penalties=penalties,
            masks=own_masks[0] if own_masks else None,
        )
        found = self._new_found(len(slots), max(0, packed.most_reported))
        shape = tuple(logits.shape)
        changed = runtime.empty(shape, torch.float32) if packed.changes_logits else None

        def work() -> None:
            there.copy_(memory, non_blocking=True)
            kernels.sample(here, on_device, changed, found)

        runtime.steps.run(work)
        pinned.used_until(runtime.steps.record())
        copied = Copied(runtime, self._pool, [found.columns])
        return CopiedOutput(
            copied, found.token_ids, lambda columns: kernels.Found(columns[0], found.most).sampled()
        )

    def score(self, logits: Tensor, token_ids: Tensor, num_top: int) -> ScoredRows:
        """See `Backend.score`. Raises DeviceLostError: the device has failed."""
        check_logits(logits, token_ids)
        check_token_ids(token_ids, logits.shape[1])
        with device_errors(self._runtime):
            here, ids = self._on_device(logits), self._runtime.upload(token_ids)
            found = self._new_found(len(ids), min(num_top, logits.shape[1]))
            self._runtime.steps.run(lambda: kernels.score(here, ids, found))
            copied = Copied(self._runtime, self._pool, [found.columns])
        return kernels.Found(copied.read()[0], found.most).scored()

    def _new_found(self, rows: int, most: int) -> kernels.Found:
        """Results of rows that report `most` likeliest tokens."""
        return kernels.Found(self._runtime.empty((rows, FIXED + 2 * most), torch.int64), most)

    def _on_device(self, values: Tensor) -> Tensor:
        held = self._runtime.held(values)
        return self._runtime.upload(values) if held is None else held.contiguous()
