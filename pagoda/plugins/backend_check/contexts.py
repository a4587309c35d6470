# SPDX-License-Identifier: Apache-2.0
"""Checks of contexts whose segments lie on several ranks: what these find together has the bits of one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pagoda.backend.base import Backend, StepInput, TokenBatch
from pagoda.backend.operations import GraphBuilder
from pagoda.plugins.backend_check.graphs import RANKS, on_ranks
from pagoda.plugins.backend_check.subject import (
    Check,
    LackingError,
    Subject,
    ensure_same,
    random_tensor,
)

_LENGTHS = (300, 150)
"""Tokens of the sequences; the first segment of each is on the rank of its number."""
_SEGMENT, _BLOCK = 128, 16
_HEADS, _KV_HEADS, _HEAD_DIM = 4, 2, 32
_WIDTH = (_HEADS + 2 * _KV_HEADS) * _HEAD_DIM


def _blocks(rank: int | None) -> Tensor:
    """Block tables [2, 19] as a rank sees them; None has all blocks itself."""
    tables, counts = torch.zeros(2, -(-max(_LENGTHS) // _BLOCK), dtype=torch.int64), [0, 0]
    for sequence, length in enumerate(_LENGTHS):
        for index in range(-(-length // _BLOCK)):
            owner = (sequence + index * _BLOCK // _SEGMENT) % RANKS
            place = counts[0] if rank is None else counts[owner]
            counts[0 if rank is None else owner] += 1
            here = rank is None or owner == rank
            tables[sequence, index] = place if here else -1 - owner
    return tables


def _batch(rank: int | None) -> TokenBatch:
    lens = torch.tensor(_LENGTHS)
    positions = torch.cat([torch.arange(length) for length in _LENGTHS])
    sequences = torch.arange(2).repeat_interleave(lens)
    tables = (_blocks(rank),)
    return TokenBatch(
        torch.zeros_like(positions), positions, sequences, lens, lens, tables, segment=_SEGMENT
    )


def _attended(backend: Backend[Any, Any], rank: int | None) -> Tensor:
    """Attention of prompts, of which half is computed on each rank in front of it and behind it."""
    batch = _batch(rank)
    num_blocks = int(batch.block_tables[0].max()) + 1
    cache = backend.allocate_kv_cache(num_blocks, _BLOCK, _KV_HEADS, _HEAD_DIM, torch.float32)
    ops = GraphBuilder(backend.group, context=None if rank is None else backend.group)
    qkv, metadata = ops.scale(ops.own_rows(ops.input("qkv", _WIDTH)), 0.5), ops.metadata()
    queries = ops.rotate_and_cache(
        ops.share_rows(qkv), metadata, None, cache, None, num_heads=_HEADS, head_dim=_HEAD_DIM
    )
    out = ops.attention(
        queries, metadata, cache, head_dim=_HEAD_DIM, scale=0.3, window=200, softcap=20.0
    )
    ops.result("out", ops.share_rows(ops.scale(ops.own_rows(out), 2.0)))
    tensors = {"qkv": random_tensor(sum(_LENGTHS), _WIDTH), "positions": batch.positions}
    planned = backend.attention_metadata(batch, _HEADS, cache)
    step: StepInput[Any] = StepInput(tensors, {0: planned})
    return backend.compile(ops.build())(step, ["out"])[0].cpu()


def _spread(subject: Subject) -> str:
    if not subject.backend.capabilities.context_parallel:
        raise LackingError("capabilities.context_parallel is False")
    expected = _attended(subject.backend, None)
    for own in on_ranks(subject, _attended):
        ensure_same(own, expected, "attention over a context on several ranks")
    return f"{RANKS} ranks with the bits of one, in a window with a soft cap"


_SPREAD = Check("context_attention, own_rows, share_rows", _spread)
EXPLICIT = dict.fromkeys(("context_attention", "own_rows", "share_rows"), _SPREAD)
