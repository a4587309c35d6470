# SPDX-License-Identifier: Apache-2.0
"""Checks of layers that keep a state of all tokens so far, in blocks whose memory would else hold K and V."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pagoda.backend.base import Backend, KVCache, StateCache
from pagoda.backend.graph import Value
from pagoda.backend.operations import GraphBuilder
from pagoda.backend.state_layers import (
    Columns,
    gated_delta,
    gated_head_norm,
    rms_norm_groups,
    selective_scan,
    short_conv,
)
from pagoda.plugins.backend_check.attention import Kind, Share, spoil, token_batch
from pagoda.plugins.backend_check.subject import (
    ROWS,
    Check,
    Record,
    Subject,
    check_rows,
    ensure,
    ensure_close,
    ensure_same,
    outputs,
    random_tensor,
)

_PLACES = Kind()
"""Sequences and their blocks."""
_BLOCK = _PLACES.block_size
LENGTHS = (75, 1, 40)
"""Tokens of the sequences."""
_CHANNELS, _WIDTH = 130, 4
_KEY_HEADS, _HEADS, _KEY_DIM, _VALUE_DIM = 2, 6, 24, 40
TOLERANCE = 1e-4
RecordState = Callable[[GraphBuilder, Mapping[str, Value], Value, StateCache], Value]


@dataclass(frozen=True)
class _Case:
    units: int
    floats: int
    offset: int
    widths: Sequence[int]
    """Elements of a row of each input."""
    vectors: Callable[[torch.device], RecordState]
    """Makes a recorder whose weights lie on a device."""


def _conv(*, gated: bool, silu: bool) -> Callable[[torch.device], RecordState]:
    def on(device: torch.device) -> RecordState:
        weight = random_tensor(_WIDTH, _CHANNELS, seed=2).to(device)
        bias = random_tensor(_CHANNELS, seed=3).to(device) if silu else None

        def record(
            ops: GraphBuilder, inputs: Mapping[str, Value], metadata: Value, cache: StateCache
        ) -> Value:
            return short_conv(
                ops, inputs["x0"], metadata, cache, weight, bias, gated=gated, silu=silu
            )

        return record

    return on


def _delta(channels: int, key_heads: int) -> Callable[[torch.device], RecordState]:
    """A delta rule whose states forget by heads, or by so many channels of each."""

    def on(device: torch.device) -> RecordState:
        decay = -random_tensor(_HEADS, seed=6).abs().to(device)
        dt_bias = random_tensor(_HEADS * channels, seed=7).to(device)

        def record(
            ops: GraphBuilder, inputs: Mapping[str, Value], metadata: Value, cache: StateCache
        ) -> Value:
            heads = {"key_heads": key_heads, "key_dim": _KEY_DIM}
            return gated_delta(
                ops, inputs["x0"], inputs["x1"], metadata, cache, decay, dt_bias, **heads
            )

        return record

    return on


def _scan(
    heads: int, head_dim: int, state_dim: int, groups: int
) -> Callable[[torch.device], RecordState]:
    by_element = head_dim == 1

    def on(device: torch.device) -> RecordState:
        shape = (state_dim, heads) if by_element else (heads,)
        decay = -random_tensor(*shape, seed=6).abs().to(device)
        dt_bias, skip = (random_tensor(heads, seed=seed).to(device) for seed in (7, 8))

        def record(
            ops: GraphBuilder, inputs: Mapping[str, Value], metadata: Value, cache: StateCache
        ) -> Value:
            x, keys = inputs["x0"], groups * state_dim
            b, c = (Columns(x, x.width - count * keys) for count in (2, 1))
            return selective_scan(
                *(ops, x, b, c, inputs["x1"], metadata, cache, decay, dt_bias, skip),
                groups=groups,
                head_dim=head_dim,
                by_element=by_element,
                dt_limit=(0.1, 2.0),
            )

        return record

    return on


_BY_CHANNELS = "by channels"
_CASES = {
    "short_conv": {
        "plain": _Case(_CHANNELS, _WIDTH - 1, 0, [_CHANNELS], _conv(gated=False, silu=False)),
        "gated": _Case(_CHANNELS, _WIDTH - 1, 8, [3 * _CHANNELS], _conv(gated=True, silu=False)),
        "with bias and SiLU": _Case(
            _CHANNELS, _WIDTH - 1, 0, [_CHANNELS], _conv(gated=False, silu=True)
        ),
    },
    "gated_delta": {
        "": _Case(
            _HEADS,
            _KEY_DIM * _VALUE_DIM,
            12,
            [2 * _KEY_HEADS * _KEY_DIM + _HEADS * _VALUE_DIM, 2 * _HEADS],
            _delta(1, _KEY_HEADS),
        ),
        _BY_CHANNELS: _Case(
            _HEADS,
            _KEY_DIM * _VALUE_DIM,
            0,
            [_HEADS * (2 * _KEY_DIM + _VALUE_DIM), _HEADS * (1 + _KEY_DIM)],
            _delta(_KEY_DIM, _HEADS),
        ),
    },
    "selective_scan": {
        "of heads": _Case(6, 10 * 40, 12, [6 * 40 + 4 * 10, 6], _scan(6, 40, 10, 2)),
        "of channels": _Case(70, 6, 0, [70 + 2 * 6, 70], _scan(70, 1, 6, 1)),
    },
}


def _cache(backend: Backend[Any, Any], case: _Case) -> StateCache:
    """Blocks that nobody has written to."""
    room = (case.units + 1) // 2 * case.floats + case.offset
    shape = (_PLACES.num_blocks, _BLOCK, -(-room // (_BLOCK * 64)), 64)
    kv: KVCache = backend.allocate_kv_cache(*shape, torch.float32, torch.float32)
    spoil(backend, kv)
    return StateCache(kv, _BLOCK, case.units, case.floats, case.offset)


def _step(
    backend: Backend[Any, Any],
    case: _Case,
    cache: StateCache,
    shares: Sequence[Share],
    broken: int | None = None,
    draft_lens: Sequence[int] = (),
) -> list[Tensor]:
    """Rows of each share's tokens in one step; those of the sequence `broken` are NaN."""
    batch = token_batch(_PLACES, shares)
    if draft_lens:
        batch = replace(batch, draft_lens=torch.tensor(draft_lens))
    metadata = backend.attention_metadata(batch, 1, cache)
    recorded = case.vectors(backend.device)
    tensors = {}
    for place, width in enumerate(case.widths):
        rows = [random_tensor(n, width, seed=10 * place + i) for i, n in enumerate(LENGTHS)]
        if broken is not None:
            rows[broken].fill_(torch.nan)
        tensors[f"x{place}"] = torch.cat([rows[i][done : done + n] for i, done, n in shares])

    def record(ops: GraphBuilder, metadata: Value, **inputs: Value) -> Value:
        return recorded(ops, inputs, metadata, cache)

    (out,) = outputs(backend, record, tensors, metadata)
    return list(torch.split(out, [n for _, _, n in shares]))


def _state_check(operation: str) -> Callable[[Subject], str]:
    def run(subject: Subject) -> str:
        subject.needs(operation)
        lacks = subject.backend.capabilities.lacks_operations
        for words, case in _CASES[operation].items():
            if words == _BY_CHANNELS and "rms_norm_heads" in lacks:
                continue  # models of it need both
            _check_case(subject, case, f"{operation} {words}".strip())
        return (
            "at once, in pieces of 7 with and without drafts, and behind a snapshot; places of units, memory "
            "before states"
        )

    return run


def _check_case(subject: Subject, case: _Case, what: str) -> None:
    shares = [(i, 0, n) for i, n in enumerate(LENGTHS)]
    caches = [_cache(backend, case) for backend in subject.both]
    whole, expected = (
        _step(backend, case, cache, shares)
        for backend, cache in zip(subject.both, caches, strict=True)
    )
    for own, wanted in zip(whole, expected, strict=True):
        ensure_close(own, wanted, TOLERANCE, what)
    for half in caches[0].halves():
        before = half[:, : case.offset]
        ensure_same(before, torch.full_like(before, torch.nan), f"{what}: memory before its state")
    backend, cache = subject.backend, _cache(subject.backend, case)
    beside = _step(backend, case, cache, shares, broken=2)
    for own, wanted in zip(beside[:2], whole, strict=False):
        ensure_same(own, wanted, f"{what}, beside a sequence of NaN,")
    for num_drafts, words in ((0, "in pieces"), (5, "in pieces with drafts behind")):
        for done in range(0, max(LENGTHS), 7):
            lefts = {i: n - done for i, n in enumerate(LENGTHS) if n > done}
            pieces = [(i, done, min(7 + num_drafts, left)) for i, left in lefts.items()]
            draft_lens = [max(0, n - 7) for _, _, n in pieces] if num_drafts else ()
            found = _step(backend, case, cache, pieces, draft_lens=draft_lens)
            for (i, _, n), rows in zip(pieces, found, strict=True):
                ensure_same(rows, whole[i][done : done + n], f"{what}, {words},")
    blocks = _PLACES.blocks(0)
    for tensor in caches[0].memory.tensors.values():
        tensor[blocks[3:]] = torch.nan
    behind = [(0, 3 * _BLOCK, 27)]
    (again,) = _step(backend, case, caches[0], behind)
    ensure_same(again, whole[0][3 * _BLOCK :], f"{what}, behind a full block,")
    for unit in (0, (case.units - 1) // 2, (case.units + 1) // 2, case.units - 1):
        numbers = _unit(caches[0], blocks[2], unit)
        kept = numbers.clone()
        numbers.fill_(torch.nan)
        (spoiled,) = _step(backend, case, caches[0], behind)
        numbers.copy_(kept)
        _check_spoiled(spoiled, again, unit, case.units, what)


def _unit(cache: StateCache, block: int, unit: int) -> Tensor:
    """The numbers of a unit in a block, as ranks that hold other units look for them."""
    of_first, _ = cache.units_of_halves
    half, place = divmod(unit, of_first)
    begin = cache.offset + place * cache.floats
    return cache.halves()[half][block, begin : begin + cache.floats]


def _check_spoiled(spoiled: Tensor, sound: Tensor, unit: int, units: int, what: str) -> None:
    """Raises FailedError: a unit that became NaN is not the only one of which results did."""
    width = sound.shape[1] // units
    own = slice(unit * width, (unit + 1) * width)
    others = sound.clone()
    others[:, own] = spoiled[:, own]
    ensure(
        bool(spoiled[0, own].isnan().all()),
        f"{what}: unit {unit} of a state does not lie where its cache says",
    )
    ensure_same(spoiled, others, f"{what}: what other units than {unit} give, which was NaN,")


def _gated_head_norm(subject: Subject) -> str:
    subject.needs("gated_head_norm")
    tensors = {name: random_tensor(ROWS, 60, seed=i) for i, name in enumerate(("x", "gate"))}

    def for_backend(backend: Backend[Any, Any]) -> Record:
        weight = random_tensor(20, seed=3).to(backend.device)

        def record(ops: GraphBuilder, x: Value, gate: Value) -> Value:
            return gated_head_norm(ops, x, gate, weight, 1e-6)

        return record

    check_rows(subject, for_backend, tensors, 2e-5, "gated_head_norm")
    return "three heads of 20"


def _rms_norm_groups(subject: Subject) -> str:
    subject.needs("rms_norm_groups")

    def for_backend(backend: Backend[Any, Any]) -> Record:
        weight = random_tensor(60, seed=3).to(backend.device)
        return lambda ops, x: rms_norm_groups(ops, x, weight, 3, 1e-6)

    check_rows(subject, for_backend, {"x": random_tensor(ROWS, 60)}, 2e-5, "rms_norm_groups")
    return "three groups of 20"


EXPLICIT = {
    **{name: Check(name, _state_check(name)) for name in _CASES},
    "gated_head_norm": Check("gated_head_norm", _gated_head_norm),
    "rms_norm_groups": Check("rms_norm_groups", _rms_norm_groups),
}
"""Checks of operations of layers that keep a state."""
