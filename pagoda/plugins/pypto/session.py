# SPDX-License-Identifier: Apache-2.0
"""A decoder on its chips: programs, weights, and calls under way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from pagoda.backend.base import DeviceLostError
from pagoda.plugins.pypto.contract import Contract, ProgramName
from pagoda.plugins.pypto.device import Device, Submitted, shared_tensor, view_of
from pagoda.plugins.pypto.library import KernelLibrary
from pagoda.plugins.pypto.pattern import FoundDecoder
from pagoda.plugins.pypto.pool import PageBuffers, Pool
from pagoda.plugins.pypto.staging import stage
from pagoda.plugins.pypto.steps import CallBuffers, StepPlaces

NUM_CALLS = 2
"""Calls whose results are kept: one that runs, and the one before it."""


class Call:
    """A step that was submitted, and where its results are."""

    def __init__(self, buffers: CallBuffers, places: StepPlaces, submitted: Submitted) -> None:
        self.buffers, self.places, self.submitted = buffers, places, submitted


class Session:
    """The worker of one decoder. Weights were staged before it was opened, and lie on the chips from then on."""

    def __init__(
        self,
        library: KernelLibrary,
        contract: Contract,
        chips: Sequence[int],
        found: FoundDecoder,
    ) -> None:
        """Compiles the programs, stages weights, opens the worker and uploads them.

        Raises UnsupportedError: the programs do not run on so many chips. Raises DeviceLostError: the chips fail.
        """
        self.contract, self.linears = contract, found.linears
        topology = contract.topology(len(chips))
        programs: dict[ProgramName, object] = {
            name: library.compile(contract.name, name, chips, topology)
            for name in contract.programs
        }
        staged = stage(found, contract, len(chips))
        keys = contract.programs["decode"].argument("keys").torch_dtype
        sizes = contract.sizes
        self._pages = PageBuffers(
            (contract.limits.page, sizes["KVH"], sizes["D"]), keys, len(chips)
        )
        self._turns = [CallBuffers(contract) for _ in range(NUM_CALLS)]
        self._scoring = CallBuffers(contract)
        self._row = shared_tensor((sizes["REAL_V"],), torch.float32)
        self.device = Device(library, list(programs.values()), chips)
        self._programs = programs
        try:
            self._weights = _uploaded(self.device, staged)
            for buffers in (*self._turns, self._scoring):
                buffers.allocate(self.device)
        except DeviceLostError:
            with suppress(DeviceLostError):  # what went wrong first is said
                self.device.close()
            raise
        self._pool: Pool | None = None
        self._calls: list[Call | None] = [None] * NUM_CALLS
        self._next = 0

    # ---- caches

    def open_pool(self, pages: int) -> Pool:
        """A pool of so many pages, in place of the one before."""
        if self._pool is not None:
            self._wait_for_all()
            self._pool.free()
        layers = self.contract.sizes["L"]
        self._pool = Pool(self.device, self._pages, layers=layers, pages=pages)
        return self._pool

    # ---- steps

    def begin(
        self, pool: Pool, places: StepPlaces, token_ids: Tensor, *, warm_up: bool = False
    ) -> int:
        """Submits a step and gives the number of its call, whose results stay until the call after the next.

        Raises DeviceLostError: a call before it has failed, or this one cannot be submitted.
        """
        turn, self._next = self._next, (self._next + 1) % NUM_CALLS
        before = self._calls[turn]
        if before is not None:
            before.submitted.wait()
        buffers = self._turns[turn]
        try:
            if not warm_up:
                pool.clear(places.fresh)
            self._calls[turn] = self._submit(buffers, pool, places, token_ids, warm_up=warm_up)
        except DeviceLostError:
            self._wait_for_all()  # what went wrong first is said
            raise
        return turn

    @property
    def latest(self) -> Call:
        """The call that was submitted last."""
        return self.call((self._next - 1) % NUM_CALLS)

    def call(self, number: int) -> Call:
        """The call of a number."""
        call = self._calls[number]
        if call is None:
            raise RuntimeError(f"There was no call {number}.")
        return call

    def score(self, pool: Pool, places: StepPlaces, token_ids: Tensor) -> Tensor:
        """Logits [rows, vocab] float32 of tokens whose K and V are in the pool, in host memory.

        They are computed once more, each as the last of its sequence, and write what is there already.
        """
        return self.logits(
            self._submit(self._scoring, pool, places, token_ids, warm_up=False),
            list(range(len(token_ids))),
        )

    def _submit(
        self,
        buffers: CallBuffers,
        pool: Pool,
        places: StepPlaces,
        token_ids: Tensor,
        *,
        warm_up: bool,
    ) -> Call:
        sizes = buffers.write(token_ids, places, warm_up=warm_up)
        sizes["PAGES"] = pool.pages
        others = self._weights | pool.arguments
        args = buffers.arguments(
            places.program, sizes, others, lambda tensor, rows: view_of(tensor, 0, rows)
        )
        submitted = self.device.submit(self._programs[places.program], args)
        return Call(buffers, places, submitted)

    def _wait_for_all(self) -> None:
        for call in self._calls:
            if call is not None:
                call.submitted.wait()

    # ---- results

    def logits(self, call: Call, sequences: Sequence[int]) -> Tensor:
        """Logits [rows, vocab] float32 of some sequences of a call, in host memory."""
        call.submitted.wait()
        out = torch.empty((len(sequences), len(self._row)))
        for row, sequence in zip(out, sequences, strict=True):
            address = view_of(call.buffers.logits, sequence, 1).data_ptr
            self.device.download(self._row, address)
            row.copy_(self._row)
        return out

    def highest(self, call: Call, k: int) -> tuple[Tensor, Tensor]:
        """The `k` highest logits of each sequence of a call, highest first, which a chip chooses.

        Values [sequences, k] float32, and their tokens [sequences, k] int32.
        """
        window, active = self.contract.limits.window, len(call.places.query_lens)
        values = torch.empty(active, k)
        tokens = torch.empty((active, k), dtype=torch.int32)
        for first in range(0, active, window):
            rows = slice(first, min(first + window, active))
            count = rows.stop - first
            best, chosen = self._select(call, first, count, k)
            values[rows], tokens[rows] = best[:count, :k], chosen[:count, :k]
        return values, tokens

    def _select(self, call: Call, first: int, rows: int, k: int) -> tuple[Tensor, Tensor]:
        """The candidates of some rows of a call's logits, chosen behind it."""
        name: ProgramName = "topk_select"
        buffers = call.buffers
        window = self.contract.limits.window
        sizes: Mapping[str, int] = self.contract.environment(batch=window, tokens=1, pages=1)
        buffers.host(name, "control", sizes).copy_(torch.tensor([rows, k]))
        args = buffers.arguments(
            name, sizes, {}, lambda tensor, count: view_of(tensor, first, count)
        )
        try:
            selected = self.device.submit(self._programs[name], args)
        finally:
            call.submitted.wait()  # what goes wrong first is said first
        selected.wait()
        values = buffers.host(name, "topk_values", sizes)
        return values, buffers.host(name, "topk_indices", sizes)


def _uploaded(device: Device, staged: Mapping[str, Sequence[Tensor]]) -> dict[str, object]:
    """Weights on the chips by meaning, from memory that each chip's part lies in."""
    return {
        meaning: device.stacked(
            [
                device.allocate(part.shape, part.dtype, chip, init=part)
                for chip, part in enumerate(parts)
            ]
        )
        for meaning, parts in staged.items()
    }
