# SPDX-License-Identifier: Apache-2.0
"""Steps as calls of programs: where tokens lie in the pool, and what the host writes for a call."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pagoda.backend.base import TokenBatch
from pagoda.plugins.pypto.contract import STEPS, Contract, ProgramName
from pagoda.plugins.pypto.device import Device, shared_tensor
from pagoda.plugins.pypto.library import DeviceTensor

_ON_CHIP = ("logits", "sampled", "next_hidden")
"""Results that stay on the first chip until they are asked for."""
_TO_HOST = ("topk_values", "topk_indices")


@dataclass(frozen=True)
class StepPlaces:
    """The places of a step's tokens, made before their ids are known."""

    program: ProgramName
    """`decode` where each sequence computes one token, else `prefill`."""
    query_lens: Tensor
    """[s] int32, tokens of each sequence in this step."""
    context_lens: Tensor
    """[s] int32, tokens of each sequence behind it."""
    tables: Tensor
    """[s, b] int32, pages of each sequence; entries behind its last token are any."""
    slots: Tensor
    """[n] int32, of each token: page times tokens of a page, plus its place there."""
    fresh: list[int]
    """Pages whose first token is computed in this step."""
    last_rows: Mapping[int, int]
    """Sequences by the row of their last token."""

    def rows(self, chosen: list[int], sequences: Tensor, positions: Tensor) -> StepPlaces:
        """Some tokens by themselves, as sequences that end with them."""
        of_rows = sequences[chosen]
        return StepPlaces(
            "decode",
            torch.ones(len(chosen), dtype=torch.int32),
            (positions[chosen] + 1).int(),
            self.tables[of_rows],
            self.slots[chosen],
            [],
            {row: row for row in range(len(chosen))},
        )


def plan_step(batch: TokenBatch, group: int, page: int) -> StepPlaces:
    """The places of a step's tokens."""
    tables = batch.block_tables[group].int()
    pages = tables[batch.sequence_ids, batch.positions // page]
    offsets = (batch.positions % page).int()
    ends = batch.query_lens.cumsum(0) - 1
    single = len(batch.positions) == len(batch.query_lens)
    return StepPlaces(
        "decode" if single else "prefill",
        batch.query_lens.int(),
        batch.context_lens.int(),
        tables,
        pages * page + offsets,
        pages[offsets == 0].tolist(),
        {row: sequence for sequence, row in enumerate(ends.tolist())},
    )


class CallBuffers:
    """Memory for the arguments of one call under way; two of them take turns.

    What the host writes and reads was shared before the worker was opened; results of programs lie on a chip.
    """

    def __init__(self, contract: Contract) -> None:
        self._contract = contract
        limits = contract.limits
        most = contract.environment(batch=limits.max_batch, tokens=limits.prefill_tokens, pages=1)
        self._host: dict[tuple[str, str], Tensor] = {
            (name, arg.meaning): shared_tensor(arg.dims(most), arg.torch_dtype)
            for name, program in contract.programs.items()
            for arg in program.args
            if arg.meaning in STEPS or arg.meaning in _TO_HOST
        }
        self._on_chip: dict[str, DeviceTensor] = {}

    def allocate(self, device: Device) -> None:
        """Takes memory of the first chip for results."""
        limits, decode = self._contract.limits, self._contract.programs["decode"]
        most = self._contract.environment(batch=limits.max_batch, tokens=1, pages=1)
        for meaning in _ON_CHIP:
            argument = decode.argument(meaning)
            self._on_chip[meaning] = device.allocate(argument.dims(most), argument.torch_dtype)

    @property
    def logits(self) -> DeviceTensor:
        """[max_batch, padded vocabulary] float32."""
        return self._on_chip["logits"]

    def host(self, program: ProgramName, meaning: str, sizes: Mapping[str, int]) -> Tensor:
        """The part of an argument in host memory that a call of these sizes has."""
        shape = self._contract.programs[program].argument(meaning).dims(sizes)
        return self._host[program, meaning].view(-1)[: math.prod(shape)].view(shape)

    def arguments(
        self,
        program: ProgramName,
        sizes: Mapping[str, int],
        others: Mapping[str, object],
        view: Callable[[DeviceTensor, int], DeviceTensor],
    ) -> list[object]:
        """Arguments of a call in order; `others` are weights and pool by meaning, `view` takes some rows."""
        found: list[object] = []
        for arg in self._contract.programs[program].args:
            if arg.meaning in others:
                found.append(others[arg.meaning])
            elif arg.meaning in self._on_chip:
                found.append(view(self._on_chip[arg.meaning], arg.dims(sizes)[0]))
            else:
                found.append(self.host(program, arg.meaning, sizes))
        return found

    def write(self, token_ids: Tensor, places: StepPlaces, *, warm_up: bool) -> dict[str, int]:
        """Writes what the host says in a call, and gives its sizes.

        Rows without a sequence have no tokens in a prefill, and are the first one again in a decode. With
        `warm_up`, tokens are computed and their K and V go nowhere.
        """
        limits, active = self._contract.limits, len(places.query_lens)
        sizes = self._contract.environment(
            batch=-(-active // limits.window) * limits.window, tokens=len(token_ids), pages=1
        )
        name = places.program

        def put(meaning: str, values: Tensor, *, rest: int | None = None) -> None:
            """Writes rows of sequences; those without one have the value `rest`, or are as the first is."""
            into = self.host(name, meaning, sizes)
            into[:active] = values
            into[active:] = values[:1] if rest is None else rest

        slots = torch.full_like(places.slots, -1) if warm_up else places.slots
        if name == "prefill":
            self.host(name, "tokens", sizes).copy_(token_ids)
            self.host(name, "slot_mapping", sizes).copy_(slots)
            put("seq_lens", places.context_lens, rest=0)
            put("chunk_lens", places.query_lens, rest=0)
            offsets = places.query_lens.cumsum(0) - places.query_lens
            put("chunk_offsets", offsets.int(), rest=len(token_ids))
        else:
            self.host(name, "tokens", sizes).zero_()
            put("tokens", _first_column(token_ids, self.host(name, "tokens", sizes)))
            put("slot_mapping", slots)
            put("seq_lens", places.context_lens)
        self._write_tables(name, places, sizes)
        return sizes

    def _write_tables(
        self, name: ProgramName, places: StepPlaces, sizes: Mapping[str, int]
    ) -> None:
        """Writes pages as far as sequences reach, and the contract's filling behind them."""
        page, blocks = self._contract.limits.page, self._contract.max_blocks
        argument = self._contract.programs[name].argument("block_table")
        into = self.host(name, "block_table", sizes).view(-1, blocks)
        active, width = places.tables.shape
        width = min(width, blocks)
        reached = torch.arange(width) * page < places.context_lens[:, None]
        into.fill_(argument.fill)
        into[:active, :width] = places.tables[:, :width].masked_fill(~reached, argument.fill)
        if name == "decode":
            into[active:] = into[:1]


def _first_column(token_ids: Tensor, like: Tensor) -> Tensor:
    """Token ids in the first column of rows that are as wide as others."""
    wide = torch.zeros((len(token_ids), like.shape[1]), dtype=torch.int32)
    wide[:, 0] = token_ids
    return wide
