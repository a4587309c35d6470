# SPDX-License-Identifier: Apache-2.0
"""Layers with a state: formulas in PyTorch on all backends, with the same bits in pieces and from snapshots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from cpu_cases import random_tensor
from torch import Tensor

from pagoda.backend.base import KVCache, StateCache
from pagoda.backend.graph import Value
from pagoda.backend.operations import GraphBuilder
from pagoda.backend.single import compute
from pagoda.backend.state_layers import (
    Columns,
    gated_delta,
    gated_head_norm,
    rms_norm_groups,
    selective_scan,
    short_conv,
)
from pagoda.parallel.collectives import Alone
from pagoda.plugins.backend_check.subject import batch_of_spans

LENGTHS = (75, 1, 40)
BLOCK = 16
BLOCKS = [list(range(10 * i, 10 * i + 10)) for i in range(len(LENGTHS))]
CHANNELS, WIDTH = 131, 4
KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM = 2, 6, 24, 40
Share = tuple[int, int, int]
"""Sequence, tokens before, tokens now."""
Record = Callable[[GraphBuilder, dict[str, Value], Value, StateCache], Value]


def _states(units: int, floats: int, offset: int = 0) -> StateCache:
    """States beside others; memory is NaN where nobody wrote."""
    room = (units + 1) // 2 * floats + 2 * offset
    keys, values = (torch.full((30, 1, room), torch.nan) for _ in range(2))
    return StateCache(KVCache(keys, values), BLOCK, units, floats, offset)


def _run(
    ops: Any,
    cache: StateCache,
    inputs: dict[str, Tensor],
    shares: Sequence[Share],
    record: Record,
    draft_lens: Sequence[int] | None = None,
) -> list[Tensor]:
    """Rows of each share in one step; `inputs` are of all tokens of all sequences."""
    starts = [sum(LENGTHS[:i]) for i in range(len(LENGTHS))]
    rows = [row for i, done, n in shares for row in range(starts[i] + done, starts[i] + done + n)]
    batch = batch_of_spans([(done, n, BLOCKS[i]) for i, done, n in shares])
    if draft_lens is not None:
        batch = replace(batch, draft_lens=torch.tensor(draft_lens))
    metadata = ops.attention_metadata(batch, 1, cache)

    def recorded(builder: GraphBuilder, metadata: Value, **values: Value) -> Value:
        return record(builder, values, metadata, cache)

    own = {name: tensor[rows] for name, tensor in inputs.items()}
    out: Tensor = compute(ops.backend, recorded, own, metadata)
    return list(torch.split(out, [n for _, _, n in shares]))


def _whole(ops: Any, cache: StateCache, inputs: dict[str, Tensor], record: Record) -> Tensor:
    shares = [(i, 0, length) for i, length in enumerate(LENGTHS)]
    return torch.cat(_run(ops, cache, inputs, shares, record))


def _in_pieces(ops: Any, cache: StateCache, inputs: dict[str, Tensor], record: Record) -> Tensor:
    """Tokens of each sequence by seven, those of all sequences in one step."""
    parts: list[list[Tensor]] = [[] for _ in LENGTHS]
    for done in range(0, max(LENGTHS), 7):
        shares = [(i, done, min(7, n - done)) for i, n in enumerate(LENGTHS) if n > done]
        for (i, _, _), rows in zip(shares, _run(ops, cache, inputs, shares, record), strict=True):
            parts[i].append(rows)
    return torch.cat([torch.cat(part) for part in parts])


def _conv_inputs(channels: int) -> dict[str, Tensor]:
    return {"x": random_tensor(sum(LENGTHS), channels, seed=1)}


CONVS: dict[str, dict[str, bool]] = {
    "plain": {},
    "gated": {"gated": True},
    "silu and bias": {"silu": True, "bias": True},
}


def _conv(kind: str) -> tuple[dict[str, Tensor], Record, Tensor]:
    """Inputs, what to record, and the result by PyTorch."""
    options = dict(CONVS[kind])
    bias = random_tensor(CHANNELS, seed=3) if options.pop("bias", False) else None
    weight = random_tensor(WIDTH, CHANNELS, seed=2)
    inputs = _conv_inputs(3 * CHANNELS if options.get("gated") else CHANNELS)

    def record(
        builder: GraphBuilder, values: dict[str, Value], metadata: Value, cache: StateCache
    ) -> Value:
        return short_conv(builder, values["x"], metadata, cache, weight, bias, **options)

    expected = []
    for x in torch.split(inputs["x"].double(), list(LENGTHS)):
        b, c, own = x.chunk(3, dim=1) if options.get("gated") else (1, 1, x)
        padded = torch.nn.functional.pad((b * own).t()[None], (WIDTH - 1, 0))
        taps = weight.double().t()[:, None]
        out = torch.nn.functional.conv1d(
            padded, taps, None if bias is None else bias.double(), groups=CHANNELS
        )[0].t()
        expected.append(c * (torch.nn.functional.silu(out) if options.get("silu") else out))
    return inputs, record, torch.cat(expected).float()


def _delta(channels: int = 1) -> tuple[dict[str, Tensor], Record, Tensor]:
    """A delta rule that forgets by heads or, with as many channels as keys have, by rows of its states."""
    width = 2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM
    n = sum(LENGTHS)
    inputs = {
        "x": random_tensor(n, width, seed=4),
        "y": random_tensor(n, HEADS * (1 + channels), seed=5),
    }
    decay, dt_bias = -random_tensor(HEADS, seed=6).abs(), random_tensor(HEADS * channels, seed=7)

    def record(
        builder: GraphBuilder, values: dict[str, Value], metadata: Value, cache: StateCache
    ) -> Value:
        return gated_delta(
            builder,
            values["x"],
            values["y"],
            metadata,
            cache,
            decay,
            dt_bias,
            key_heads=KEY_HEADS,
            key_dim=KEY_DIM,
        )

    keys = KEY_HEADS * KEY_DIM
    expected = []
    for own, gates in zip(
        torch.split(inputs["x"].double(), list(LENGTHS)),
        torch.split(inputs["y"].double(), list(LENGTHS)),
        strict=True,
    ):
        q, k, v = torch.split(own, [keys, keys, HEADS * VALUE_DIM], dim=1)
        state = torch.zeros(HEADS, KEY_DIM, VALUE_DIM, dtype=torch.double)
        for t in range(len(own)):
            heads = []
            for part in (q, k):
                vectors = part[t].view(KEY_HEADS, KEY_DIM)
                vectors = vectors / (vectors.square().sum(1, keepdim=True) + 1e-6).sqrt()
                heads.append(vectors.repeat_interleave(HEADS // KEY_HEADS, dim=0))
            b, a = gates[t, :HEADS], gates[t, HEADS:]
            soft = torch.nn.functional.softplus(a + dt_bias).view(HEADS, channels)
            state = state * torch.exp(decay[:, None] * soft)[:, :, None]
            seen = torch.einsum("hkv,hk->hv", state, heads[1])
            change = (v[t].view(HEADS, VALUE_DIM) - seen) * torch.sigmoid(b)[:, None]
            state = state + heads[1][:, :, None] * change[:, None]
            expected.append(torch.einsum("hkv,hk->hv", state, heads[0]) * KEY_DIM**-0.5)
    return inputs, record, torch.stack(expected).flatten(1).float()


DELTAS = ("delta", "delta by channels")
SCANS = {"heads": (6, 40, 10, 2), "channels": (71, 1, 6, 1)}
"""Heads, columns and rows of their states, and groups, of selective scans."""
LIMIT = (0.3, 1.5)


def _scan(kind: str) -> tuple[dict[str, Tensor], Record, Tensor]:
    heads, head_dim, state_dim, groups = SCANS[kind]
    inner, keys, n = heads * head_dim, groups * state_dim, sum(LENGTHS)
    inputs = {
        "x": random_tensor(n, inner + keys + 3, seed=4),
        "y": random_tensor(n, heads, seed=5),
        "z": random_tensor(n, keys, seed=9),
    }
    by_element = head_dim == 1
    decay = -random_tensor(*((state_dim, heads) if by_element else (heads,)), seed=6).abs()
    dt_bias, skip = random_tensor(heads, seed=7), random_tensor(heads, seed=8)

    def record(
        builder: GraphBuilder, values: dict[str, Value], metadata: Value, cache: StateCache
    ) -> Value:
        x, dt, c = (values[name] for name in ("x", "y", "z"))
        return selective_scan(
            builder,
            x,
            Columns(x, inner + 3),
            Columns(c),
            dt,
            metadata,
            cache,
            decay,
            dt_bias,
            skip,
            groups=groups,
            head_dim=head_dim,
            by_element=by_element,
            dt_limit=LIMIT,
        )

    factors = decay.double() if by_element else decay.double().expand(state_dim, heads)
    expected = []
    for x, dt, c in zip(
        *(torch.split(inputs[name].double(), list(LENGTHS)) for name in ("x", "y", "z")),
        strict=True,
    ):
        steps = torch.nn.functional.softplus(dt + dt_bias).clamp(*LIMIT)
        state = torch.zeros(heads, state_dim, head_dim, dtype=torch.double)
        for t in range(len(x)):
            values = x[t, :inner].view(heads, head_dim)
            own_b, own_c = (
                part.view(groups, state_dim).repeat_interleave(heads // groups, dim=0)
                for part in (x[t, inner + 3 :], c[t])
            )
            state = state * torch.exp(steps[t] * factors).t()[:, :, None]
            state = state + own_b[:, :, None] * (steps[t, :, None] * values)[:, None]
            out = torch.einsum("hnp,hn->hp", state, own_c) + skip[:, None] * values
            expected.append(out.flatten())
    return inputs, record, torch.stack(expected).float()


def _cases() -> dict[str, tuple[tuple[int, int, int], tuple[dict[str, Tensor], Record, Tensor]]]:
    conv = (CHANNELS, WIDTH - 1, 0)
    return {kind: (conv, _conv(kind)) for kind in CONVS} | {
        "delta": ((HEADS, KEY_DIM * VALUE_DIM, 12), _delta()),
        "delta by channels": ((HEADS, KEY_DIM * VALUE_DIM, 12), _delta(KEY_DIM)),
        "heads": ((6, 40 * 10, 12), _scan("heads")),
        "channels": ((71, 6, 12), _scan("channels")),
    }


@pytest.mark.parametrize("kind", [*CONVS, *DELTAS, *SCANS])
def test_layers_with_a_state(kind: str, ops: Any) -> None:
    sizes, (inputs, record, expected) = _cases()[kind]
    whole = _whole(ops, _states(*sizes), inputs, record)
    torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(_in_pieces(ops, _states(*sizes), inputs, record), whole)


@pytest.mark.parametrize("kind", [*CONVS, *DELTAS, *SCANS])
@pytest.mark.parametrize("num_known", [1, 2, 16])
def test_drafts_leave_states_as_they_were(kind: str, num_known: int, ops: Any) -> None:
    """Every other step has drafts that are right, whose rows have the bits of rows in turn; the others have wrong
    ones. All are forgotten."""
    sizes, (inputs, record, _) = _cases()[kind]
    whole, cache, length = _whole(ops, _states(*sizes), inputs, record), _states(*sizes), LENGTHS[0]
    wrong = {name: tensor + 1 for name, tensor in inputs.items()}
    for step, done in enumerate(range(0, length, num_known)):
        known = min(done + num_known, length)
        num_drafts, is_right = min(17, length - known), step % 2 == 0
        drafts = inputs if is_right else wrong
        own = {name: torch.cat([it[:known], drafts[name][known:]]) for name, it in inputs.items()}
        share = (0, done, known + num_drafts - done)
        (rows,) = _run(ops, cache, own, [share], record, [num_drafts])
        end = known + num_drafts if is_right else known
        assert torch.equal(rows[: end - done], whole[done:end])


@pytest.mark.parametrize("kind", ["gated", *DELTAS, *SCANS])
def test_full_blocks_are_snapshots(kind: str, ops: Any) -> None:
    """Another sequence goes on behind a full block of the first one, whose later blocks it does not see."""
    sizes, (inputs, record, _) = _cases()[kind]
    cache = _states(*sizes)
    whole = _whole(ops, cache, inputs, record)
    for tensor in (cache.memory.keys, cache.memory.values):
        tensor[[1, 3, 4]] = torch.nan  # block 2 has the state behind 48 tokens
    (again,) = _run(ops, cache, inputs, [(0, 48, 27)], record)
    assert torch.equal(again, whole[48:75])


def test_states_leave_what_lies_before_them(ops: Any) -> None:
    sizes, (inputs, record, _) = _cases()["delta"]
    cache = _states(*sizes)
    _whole(ops, cache, inputs, record)
    for half in cache.halves():
        assert bool(half[:, : cache.offset].isnan().all())


def test_gated_norms_of_heads(ops: Any) -> None:
    x, gate, weight = (
        random_tensor(*shape, seed=i) for i, shape in enumerate(((9, 60), (9, 60), (20,)))
    )

    def record(builder: GraphBuilder, x: Value, y: Value) -> Value:
        return gated_head_norm(builder, x, y, weight, 1e-6)

    found = compute(ops.backend, record, {"x": x, "y": gate})
    heads = x.double().view(9, 3, 20)
    normed = heads / (heads.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
    expected = normed.flatten(1) * torch.nn.functional.silu(gate.double())
    torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-6)


def test_norms_of_groups(ops: Any) -> None:
    x, weight = random_tensor(9, 60, seed=1), random_tensor(60, seed=2)
    found = compute(
        ops.backend, lambda builder, x: rms_norm_groups(builder, x, weight, 3, 1e-6), {"x": x}
    )
    groups = x.double().view(9, 3, 20)
    normed = groups / (groups.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    expected = normed.flatten(1) * weight
    torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-6)


def test_states_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fit into half a block of 12"):
        StateCache(KVCache(torch.empty(2, 3, 4), torch.empty(2, 3, 4)), 4, units=5, floats=5)
    builder = GraphBuilder(Alone())
    cache, metadata = _states(CHANNELS, WIDTH - 1), builder.metadata()
    with pytest.raises(ValueError, match="a convolution of 131 inputs"):
        short_conv(builder, builder.input("x", 64), metadata, cache, torch.empty(WIDTH, CHANNELS))
    with pytest.raises(ValueError, match="States of 3 inputs do not fit a convolution of 5"):
        short_conv(builder, builder.input("y", 131), metadata, cache, torch.empty(5, CHANNELS))
