# SPDX-License-Identifier: Apache-2.0
"""Checks of what a call brings: each argument's dtype, shape, range and meaning."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pagoda.plugins.pypto.contract import CACHES, STEPS, WEIGHTS, Argument, Contract, ProgramName
from pagoda_pypto_device.compute import Tokens
from pagoda_pypto_device.memory import (
    ChipMemory,
    ContractError,
    DeviceTensor,
    SharedMemory,
    StackedDeviceTensor,
)

_TO_HOST = ("topk_values", "topk_indices")


@dataclass(frozen=True)
class Arguments:
    """What a call brought, by meaning, in the memory where it lies."""

    sizes: Mapping[str, int]
    held: Mapping[str, list[Tensor]]
    """One tensor, or one for each chip."""
    handles: Mapping[str, Any]

    def one(self, meaning: str) -> Tensor:
        return self.held[meaning][0]


def check_arguments(
    contract: Contract,
    name: ProgramName,
    given: Sequence[Any],
    chips: Sequence[ChipMemory],
    shared: SharedMemory,
) -> Arguments:
    """What a call brings. Raises ContractError: an argument is not of its dtype, shape or place."""
    program = contract.programs[name]
    if len(given) != len(program.args):
        raise ContractError(f"{name} takes {len(program.args)} arguments, not {len(given)}")
    by_meaning = dict(zip((arg.meaning for arg in program.args), given, strict=True))
    sizes = _sizes(contract, name, by_meaning, len(chips))
    shared.look()
    held = {}
    for arg, value in zip(program.args, given, strict=True):
        what = f"{name}.{arg.name}"
        if arg.meaning in WEIGHTS or arg.meaning in CACHES:
            shards = value.shards if isinstance(value, StackedDeviceTensor) else (value,)
            if len(shards) != len(chips):
                raise ContractError(f"{what} lies on {len(shards)} chips of {len(chips)}")
            tensors = [
                _on_chip(chip, shard, what) for chip, shard in zip(chips, shards, strict=True)
            ]
        elif arg.meaning in STEPS or arg.meaning in _TO_HOST:
            tensors = [_on_host(shared, value, what)]
        else:
            tensors = [_on_chip(chips[0], value, what)]
        _check_shape(arg, tensors, sizes, len(chips), what)
        held[arg.meaning] = tensors
    return Arguments(sizes, held, by_meaning)


def _sizes(
    contract: Contract, name: ProgramName, given: Mapping[str, Any], chips: int
) -> dict[str, int]:
    """Sizes of the call, as the arguments that say them have them."""
    limits = contract.limits
    if name == "topk_select":
        return contract.environment(batch=limits.window, tokens=1, pages=1)
    batch, tokens = len(given["seq_lens"]), given["slot_mapping"].numel()
    keys = given["keys"]
    rows = (keys.shards[0] if isinstance(keys, StackedDeviceTensor) else keys).shape[0]
    sizes = contract.sizes
    per_page = sizes["L"] * limits.page * (sizes["KVH"] // chips)
    if rows % per_page:
        raise ContractError(f"a pool of {rows} rows is of no whole pages")
    if batch % limits.window or not 0 < batch <= limits.max_batch:
        raise ContractError(f"{name} has {batch} rows, no multiple of {limits.window} in range")
    if not 0 < tokens <= limits.prefill_tokens:
        raise ContractError(f"{name} has {tokens} tokens, not 1 to {limits.prefill_tokens}")
    return contract.environment(batch=batch, tokens=tokens, pages=rows // per_page)


def _on_chip(chip: ChipMemory, value: Any, what: str) -> Tensor:
    if not isinstance(value, DeviceTensor):
        raise ContractError(f"{what} is {type(value).__name__}, not memory of a chip")
    return chip.tensor(value, what)


def _on_host(shared: SharedMemory, value: Any, what: str) -> Tensor:
    if not isinstance(value, Tensor) or value.device.type != "cpu" or not value.is_contiguous():
        raise ContractError(f"{what} is no contiguous tensor of the host")
    if not value.is_shared():
        raise ContractError(f"{what} is not shared")
    shared.check(value.data_ptr(), value.nbytes, what)
    return value


def _check_shape(
    arg: Argument, tensors: Sequence[Tensor], sizes: Mapping[str, int], chips: int, what: str
) -> None:
    wanted = arg.dims(sizes, chips)
    for tensor in tensors:
        if tuple(tensor.shape) != wanted:
            raise ContractError(f"{what} is {list(tensor.shape)}, not {list(wanted)}")
        if tensor.dtype != arg.torch_dtype:
            raise ContractError(f"{what} is {tensor.dtype}, not {arg.dtype}")


def poison(arguments: Arguments, meanings: Sequence[str]) -> None:
    """Makes results NaN, or no token, until the program has run."""
    for meaning in meanings:
        tensor = arguments.one(meaning)
        tensor.fill_(math.nan if tensor.is_floating_point() else -1)


def prefill_tokens(contract: Contract, arguments: Arguments) -> Tokens:
    """The tokens of a prefill. Raises ContractError: they do not fit together."""
    lens, counts = arguments.one("seq_lens").long(), arguments.one("chunk_lens").long()
    total, active = len(arguments.one("tokens")), int((counts > 0).sum())
    if int(counts.sum()) != total or bool((counts < 0).any()):
        raise ContractError(f"chunk_lens {counts.tolist()} are not those of {total} tokens")
    if bool((counts[:active] == 0).any()):
        raise ContractError("rows without tokens are not the last ones")
    if bool((arguments.one("seq_lens")[active:] != 0).any()):
        raise ContractError("rows without tokens have seq_lens")
    offsets = counts.cumsum(0) - counts
    if not torch.equal(arguments.one("chunk_offsets")[:active].long(), offsets[:active]):
        raise ContractError("chunk_offsets are not where chunks begin")
    if bool((arguments.one("chunk_offsets")[active:] != total).any()):
        raise ContractError("chunk_offsets of rows without tokens are not behind all chunks")
    tables = _tables(contract, "prefill", arguments, active)
    return _checked(
        contract,
        Tokens(
            arguments.one("tokens").long(),
            counts[:active],
            lens[:active],
            tables,
            arguments.one("slot_mapping").long(),
        ),
    )


def decode_tokens(contract: Contract, arguments: Arguments) -> tuple[Tokens, int]:
    """The tokens of a decode, and how many rows there are until only the first one comes again."""
    ids, lens = arguments.one("tokens"), arguments.one("seq_lens")
    slots, rows = arguments.one("slot_mapping"), len(arguments.one("seq_lens"))
    flat = arguments.one("block_table").view(rows, -1)
    together = torch.cat((ids, lens[:, None], slots[:, None], flat), dim=1)
    same = (together == together[:1]).all(1)
    others = (~same).nonzero().flatten()
    active = 1 if not len(others) else int(others[-1]) + 1
    if bool((ids[:, 1:] != 0).any()):
        raise ContractError("token_ids have more than one column")
    tables = _tables(contract, "decode", arguments, active)
    tokens = Tokens(
        ids[:active, 0].long(),
        torch.ones(active, dtype=torch.int64),
        lens[:active].long(),
        tables,
        slots[:active].long(),
    )
    return _checked(contract, tokens), active


def _tables(contract: Contract, name: ProgramName, arguments: Arguments, active: int) -> Tensor:
    """Block tables of rows with tokens, 0 behind their sequences."""
    flat, page = arguments.one("block_table").long(), contract.limits.page
    table = flat.view(len(arguments.one("seq_lens")), contract.max_blocks)
    fill = contract.programs[name].argument("block_table").fill
    ends = arguments.one("seq_lens").long()
    behind = torch.arange(contract.max_blocks) * page >= ends[:, None]
    if name == "prefill" and bool((table[active:] != fill).any()):
        raise ContractError("rows without tokens have a block table")
    if bool((table[:active][behind[:active]] != fill).any()):
        raise ContractError(f"block tables are not filled with {fill} behind sequences")
    used = table[:active][~behind[:active]]
    if bool(((used < 0) | (used >= arguments.sizes["PAGES"])).any()):
        raise ContractError(
            f"a block table names a page that is not among {arguments.sizes['PAGES']}"
        )
    return table[:active].masked_fill(behind[:active], 0)


def _checked(contract: Contract, tokens: Tokens) -> Tokens:
    """The tokens. Raises ContractError: ids, lengths or slots are out of range or do not fit tables."""
    ids, lens = tokens.ids, tokens.context_lens
    if bool(((ids < 0) | (ids >= contract.sizes["REAL_V"])).any()):
        raise ContractError("a token id is not in the vocabulary")
    if bool(((lens < tokens.query_lens) | (lens > contract.limits.max_seq)).any()):
        raise ContractError(f"seq_lens {lens.tolist()} are shorter than chunks, or too long")
    if bool((tokens.slots == -1).all()):
        return tokens  # a warm-up, whose K and V go nowhere
    page = contract.limits.page
    sequence_ids = torch.repeat_interleave(tokens.query_lens)
    begins = (tokens.query_lens.cumsum(0) - tokens.query_lens)[sequence_ids]
    firsts = (lens - tokens.query_lens)[sequence_ids]
    positions = firsts + torch.arange(len(ids)) - begins
    expected = tokens.tables[sequence_ids, positions // page] * page + positions % page
    if not torch.equal(tokens.slots, expected):
        raise ContractError("slot_mapping is not where block tables put tokens")
    if len(tokens.slots.unique()) < len(tokens.slots):
        raise ContractError("two tokens of a call go to one slot")
    return tokens


def selection(contract: Contract, arguments: Arguments) -> tuple[int, int]:
    """Rows and k of a selection. Raises ContractError: they are out of range."""
    rows, k = arguments.one("control").tolist()
    limits = contract.limits
    if not 1 <= rows <= limits.window or not 1 <= k <= limits.topk:
        raise ContractError(f"a selection of {k} of {rows} rows")
    return rows, k
