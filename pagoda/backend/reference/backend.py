"""The operations in plain PyTorch, on the CPU: the specification that other backends are tested against.

Every result is the same in all bits whatever else is in the batch. Library kernels choose their order of
summation by the shape they are given, so the shapes are fixed here: matrix products are made in tiles of
`ROWS` rows, attention in tiles of `ROWS` query rows by `KEYS` cached tokens at fixed absolute positions, with the
softmax carried on from tile to tile (FlashAttention, Dao et al. 2022). A step only changes how many tiles there
are. `tests/backend/test_invariance.py` checks that the kernels used here keep this promise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.backend.base import (
    UNNAMED,
    Compiled,
    ExpertRouting,
    Experts,
    ForwardPass,
    HeadNorms,
    KVCache,
    TokenBatch,
)
from pagoda.backend.host import DirectForward, HostBackend, check_token_ids
from pagoda.backend.low_rank import LowRank, LowRankMaps, LowRankPart
from pagoda.backend.operation import WeightNames
from pagoda.backend.reference.quantized import (
    PackedBlocks,
    PackedGroups,
    Quantized,
    embedding_rows,
    num_rows,
    quantize_int4,
    quantize_int8,
    quantized_product,
)
from pagoda.backend.reference.sampling import sample_row, token_logprobs
from pagoda.backend.sampling import SampledRow, SamplingRow, ScoredRows, check_logits
from pagoda.backend.weights import (
    BlockWeight,
    DenseWeight,
    GroupedWeight,
    Int8Weight,
    LinearWeight,
)
from pagoda.parallel.collectives import Collectives

ROWS = 16
"""Rows of a matrix product; fewer waste less on a single sequence, more waste less on many."""
OUTPUTS = 32
"""Outputs of an adapter's matrices are a multiple of this."""
KEYS = 128
"""Cached tokens of one attention tile; a multiple of every block size."""
WIDENED_OUTPUTS = 16384
"""Outputs whose weights are widened to float32 at once."""
TILES_PER_PASS = 8
"""Query tiles whose K and V are gathered at once, so that they stay in the processor's cache."""


@dataclass(frozen=True)
class Linear:
    parts: tuple[Tensor | Quantized, ...]
    """Weights whose outputs follow one another; dense ones are [out, in]."""
    bias: Tensor | None
    """[out] float32."""


@dataclass(frozen=True)
class _Pass:
    """Some query tiles of a step, those with the most key tiles first."""

    tiles: slice
    positions: Tensor
    """[tiles, rows], of the query in each row; -1 in rows without one."""
    last_positions: Tensor
    """[tiles]."""
    num_active: list[int]
    """Number of query tiles that reach each key tile."""
    kv_rows: list[Tensor]
    """Rows of each key tile's blocks, for the query tiles that reach it; see `_kv_rows`."""


@dataclass(frozen=True)
class AttentionMetadata:
    block_ids: Tensor
    """[n], the cache block of each token."""
    offsets: Tensor
    """[n], the place of each token in its block."""
    rows: Tensor
    """[n * heads], the row of each token's head in the flattened query tiles [tiles, kv_heads, rows]."""
    num_tiles: int
    rows_per_tile: int
    passes: list[_Pass]


def open_backend(group: Collectives | None) -> ReferenceBackend:
    """The backend, which every machine has."""
    return ReferenceBackend(group)


class ReferenceBackend(HostBackend[Linear, AttentionMetadata]):
    def __init__(self, group: Collectives | None = None) -> None:
        super().__init__("reference on cpu", group)

    def block_shapes(
        self,
        block_size: int,
        head_dim: int,
        dtype: torch.dtype,  # noqa: ARG002
        kv_dtype: torch.dtype,  # noqa: ARG002
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (block_size, head_dim), (block_size, head_dim)

    # ---- token by token

    def quantize_int8(self, values: Tensor, *, symmetric: bool) -> Int8Weight:
        return quantize_int8(values, symmetric=symmetric)

    def quantize_int4(self, values: Tensor, group_size: int) -> GroupedWeight:
        return quantize_int4(values, group_size)

    def prepare_linear(
        self, parts: Sequence[LinearWeight], bias: Tensor | None, dtype: torch.dtype
    ) -> Linear:
        wide_bias = None if bias is None else bias.float()
        if all(isinstance(part, DenseWeight) for part in parts):
            joined = torch.cat([part.values.to(dtype) for part in parts])  # type: ignore[union-attr]
            return Linear((joined,), wide_bias)
        return Linear(tuple(_prepared(part, dtype) for part in parts), wide_bias)

    def linear(self, x: Tensor, weight: Linear) -> Tensor:
        x = x.flatten(1)
        if not len(x):
            return x.new_empty((0, sum(map(num_rows, weight.parts))))
        products = [
            _dense_product(x, part) if isinstance(part, Tensor) else quantized_product(x, part)
            for part in weight.parts
        ]
        out = torch.cat(products, dim=1)
        return out if weight.bias is None else out.add_(weight.bias)

    def embedding(
        self, token_ids: Tensor, weight: Linear, first_id: int = 0, vocab_size: int | None = None
    ) -> Tensor:
        (table,) = weight.parts
        outputs = num_rows(table)
        check_token_ids(token_ids, first_id + outputs if vocab_size is None else vocab_size)
        own = token_ids - first_id
        foreign = (own < 0) | (own >= outputs)
        own = own.masked_fill(foreign, 0)
        if isinstance(table, Tensor):
            rows = F.embedding(own, table).float()
        else:
            rows = embedding_rows(own, table)
        return rows.masked_fill(foreign[:, None], 0)

    def add(self, x: Tensor, delta: Tensor) -> Tensor:
        return x + delta

    def argmax(self, x: Tensor, weight: Linear) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.linear(x, weight)
        columns = logits.argmax(dim=1)
        values = logits.gather(1, columns[:, None]).flatten()
        return columns, values, logits.isfinite().all(dim=1)

    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[SampledRow]:
        check_logits(logits, rows)
        return [sample_row(own, row) for own, row in zip(logits, rows, strict=True)]

    def score(self, logits: Tensor, token_ids: Tensor, num_top: int) -> ScoredRows:
        check_logits(logits, token_ids)
        check_token_ids(token_ids, logits.shape[1])
        num_top = min(num_top, logits.shape[1])
        finite = bool(logits.isfinite().all())
        entries = [
            token_logprobs(own, token_id, num_top)
            for own, token_id in zip(logits, token_ids.tolist(), strict=True)
            if finite
        ]
        shape = (len(entries), num_top)
        return ScoredRows(
            finite,
            torch.tensor([entry.rank for entry in entries], dtype=torch.int64),
            torch.tensor([entry.top_token_ids for entry in entries]).long().reshape(shape),
            torch.tensor([[entry.logprob, *entry.top_logprobs] for entry in entries]),
        )

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight

    def add_rms_norm(
        self, x: Tensor, delta: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        total = x + delta
        return total, self.rms_norm(total, weight, eps)

    def rotary(self, x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        """Rotates the pairs (i, i + d/2) of every head of x [n, heads, d]."""
        cos, sin = (part[:, None, :] for part in table)
        left, right = x.chunk(2, dim=-1)
        return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)

    def set_low_rank(
        self, maps: LowRankMaps, adapter: int, parts: Sequence[LowRank | None]
    ) -> None:
        maps.check(parts)
        maps.parts[adapter] = tuple(
            None
            if part is None
            else LowRankPart(
                len(part.down),
                part.scale,
                _padded(part.down.to(maps.dtype), 0),
                _padded(part.up.to(maps.dtype), -len(part.down) % OUTPUTS),
            )
            for part in parts
        )

    def remove_low_rank(self, maps: LowRankMaps, adapter: int) -> None:
        maps.parts.pop(adapter, None)

    def add_low_rank(self, out: Tensor, x: Tensor, maps: LowRankMaps, adapters: Tensor) -> Tensor:
        x = x.flatten(1)
        for adapter, parts in maps.parts.items():
            (rows,) = (adapters == adapter).nonzero(as_tuple=True)
            first = 0
            for part, outputs in zip(parts, maps.outputs, strict=True):
                if part is not None and len(rows):
                    narrow = _dense_product(x[rows], part.down) * part.scale
                    out[rows, first : first + outputs] += _dense_product(narrow, part.up)[
                        :, :outputs
                    ]
                first += outputs
        return out

    def gated_linear(
        self,
        x: Tensor,
        weight: Linear,
        maps: LowRankMaps | None = None,
        adapters: Tensor | None = None,
    ) -> Tensor:
        both = self.linear(x, weight)
        if maps is not None and adapters is not None:
            both = self.add_low_rank(both, x, maps, adapters)
        return self.silu_and_mul(both)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        # F.silu takes another path for the last few elements of a tensor than for the rest.
        return gate / (1 + torch.exp(-gate)) * up

    def experts(self, x: Tensor, logits: Tensor, experts: Experts[Linear]) -> Tensor:
        chosen, weights = routed(logits, experts.routing)
        experts.counts.add_(torch.bincount(chosen.flatten(), minlength=experts.routing.num_experts))
        total = torch.zeros(x.shape)
        for index, (gate, up, down) in enumerate(
            zip(experts.gate, experts.up, experts.down, strict=True)
        ):
            tokens, places = (chosen == experts.first + index).nonzero(as_tuple=True)
            if not len(tokens):
                continue
            own = x[tokens]
            gate_up = torch.cat((self.linear(own, gate), self.linear(own, up)), dim=1)
            out = self.linear(self.silu_and_mul(gate_up), down)
            total[tokens] += out * weights[tokens, places, None]
        return total

    # ---- all at once

    def compile(
        self,
        forward: ForwardPass[Linear, AttentionMetadata],
        hidden: int | None = None,  # noqa: ARG002 - steps have what they have
        names: WeightNames = UNNAMED,
    ) -> Compiled[AttentionMetadata]:
        return DirectForward(self, forward, names)

    # ---- attention

    def attention_metadata(
        self, batch: TokenBatch, num_heads: int, cache: KVCache
    ) -> AttentionMetadata:
        """Cuts every sequence's new tokens into tiles: the queries of a few tokens that share one K/V head."""
        _, num_kv_heads, block_size, _ = cache.keys.shape
        group = num_heads // num_kv_heads
        rows_per_tile = -(-group // ROWS) * ROWS
        tokens_per_tile = rows_per_tile // group

        tiles_of = (batch.query_lens + tokens_per_tile - 1) // tokens_per_tile
        num_tiles = int(tiles_of.sum())
        sequence_of_tile = torch.repeat_interleave(tiles_of)
        first_tile = tiles_of.cumsum(0) - tiles_of
        chunk_start = batch.context_lens - batch.query_lens
        order_in_sequence = torch.arange(num_tiles) - first_tile[sequence_of_tile]
        last_positions = (
            torch.minimum(
                chunk_start[sequence_of_tile] + (order_in_sequence + 1) * tokens_per_tile,
                batch.context_lens[sequence_of_tile],
            )
            - 1
        )

        # Tiles with long contexts come first, so that those which reach a key tile are always the first few.
        last_positions, by_length = last_positions.sort(descending=True, stable=True)
        place_of_tile = torch.empty_like(by_length)
        place_of_tile[by_length] = torch.arange(num_tiles)

        index_in_chunk = batch.positions - chunk_start[batch.sequence_ids]
        tile = place_of_tile[first_tile[batch.sequence_ids] + index_in_chunk // tokens_per_tile]
        row = (index_in_chunk % tokens_per_tile)[:, None] * group + torch.arange(group)
        positions = torch.full((num_tiles, rows_per_tile), -1)
        positions[tile[:, None], row] = batch.positions[:, None].expand_as(row)
        kv_head = torch.arange(num_kv_heads)[:, None]
        rows = (tile[:, None, None] * num_kv_heads + kv_head) * rows_per_tile + row[:, None, :]

        tables = batch.block_tables[sequence_of_tile[by_length]]
        kv_rows = _kv_rows(tables, num_kv_heads, block_size)
        block_index = batch.positions // block_size
        return AttentionMetadata(
            block_ids=batch.block_tables[batch.sequence_ids, block_index],
            offsets=batch.positions % block_size,
            rows=rows.flatten(),
            num_tiles=num_tiles,
            rows_per_tile=rows_per_tile,
            passes=[
                _plan_pass(slice(start, start + TILES_PER_PASS), positions, last_positions, kv_rows)
                for start in range(0, num_tiles, TILES_PER_PASS)
            ],
        )

    def rotate_and_cache(
        self,
        qkv: Tensor,
        cache: KVCache,
        plan: AttentionMetadata,
        table: tuple[Tensor, Tensor],
        norms: HeadNorms | None,
    ) -> Tensor:
        _, num_kv_heads, _, head_dim = cache.keys.shape
        heads = qkv.view(len(qkv), -1, head_dim)
        num_heads = heads.shape[1] - 2 * num_kv_heads
        q, k, v = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
        if norms is not None:
            q = self.rms_norm(q, norms.queries, norms.eps)
            k = self.rms_norm(k, norms.keys, norms.eps)
        self.write_kv(cache, self.rotary(k, table), v, plan)
        return self.rotary(q, table)

    def write_kv(
        self, cache: KVCache, keys: Tensor, values: Tensor, plan: AttentionMetadata
    ) -> None:
        """Stores K and V [n, kv_heads, d] of the step's tokens in the blocks of their sequences."""
        place = (plan.block_ids, slice(None), plan.offsets)
        for stored, scales, new in (
            (cache.keys, cache.key_scales, keys),
            (cache.values, cache.value_scales, values),
        ):
            if scales is None:
                stored[place] = new.to(stored.dtype)
            else:
                stored[place], scales[place] = _quantize(new)

    def attention(
        self,
        queries: Tensor,
        cache: KVCache,
        plan: AttentionMetadata,
        *,
        scale: float,
        window: int | None,
    ) -> Tensor:
        num_kv_heads, head_dim = cache.keys.shape[1], cache.keys.shape[3]
        shape = (plan.num_tiles, num_kv_heads, plan.rows_per_tile, head_dim)
        tiles = torch.zeros(shape, dtype=torch.float32)
        scaled = queries.reshape(-1, head_dim) * scale
        tiles.view(-1, head_dim).index_copy_(0, plan.rows, scaled)
        for part in plan.passes:
            tiles[part.tiles] = _attend(tiles[part.tiles], cache, part, window)
        out = tiles.view(-1, head_dim).index_select(0, plan.rows)
        return out.view_as(queries)


def _padded(matrix: Tensor, more_inputs: int) -> Tensor:
    """A narrow matrix with outputs and inputs of zeros: of one that has few, libraries take rows another way."""
    return F.pad(matrix, (0, more_inputs, 0, -len(matrix) % OUTPUTS))


def _prepared(part: LinearWeight, dtype: torch.dtype) -> Tensor | Quantized:
    if isinstance(part, DenseWeight):
        return part.values.to(dtype, copy=True)
    if isinstance(part, BlockWeight):
        return PackedBlocks.of(part)
    return part if isinstance(part, Int8Weight) else PackedGroups.of(part)


def routed(logits: Tensor, routing: ExpertRouting) -> tuple[Tensor, Tensor]:
    """Numbers of each token's experts, ascending, and their weights: two of [n, experts_per_token]."""
    # By logits: two that differ may have the same probability.
    ranked = logits.sort(dim=1, descending=True, stable=True).indices
    chosen = ranked[:, : routing.experts_per_token].sort(dim=1).values
    weights = logits.softmax(dim=1).gather(1, chosen)
    return chosen, weights / weights.sum(1, keepdim=True) if routing.renormalize else weights


def _dense_product(x: Tensor, matrix: Tensor) -> Tensor:
    """x [n, in] float32 times a matrix [out, in] of any dtype: [n, out] float32."""
    if matrix.dtype == torch.bfloat16:
        x = x.to(torch.bfloat16).float()
    num_tokens = x.shape[0]
    x = F.pad(x, (0, 0, 0, -num_tokens % ROWS))
    out = x.new_empty(x.shape[0], matrix.shape[0])
    for first in range(0, len(matrix), WIDENED_OUTPUTS):
        outputs = slice(first, first + WIDENED_OUTPUTS)
        # Products of half-precision numbers are exact in float32, in which they are added up.
        wide = matrix[outputs].float().t()
        for start in range(0, x.shape[0], ROWS):
            rows = slice(start, start + ROWS)
            out[rows, outputs] = x[rows] @ wide
    return out[:num_tokens]


def _plan_pass(tiles: slice, positions: Tensor, last_positions: Tensor, kv_rows: Tensor) -> _Pass:
    last = last_positions[tiles]
    num_key_tiles = last // KEYS + 1
    reached = num_key_tiles[:, None] > torch.arange(int(num_key_tiles[0]))
    num_active = reached.sum(0).tolist()
    return _Pass(
        tiles=tiles,
        positions=positions[tiles],
        last_positions=last,
        num_active=num_active,
        kv_rows=[kv_rows[tiles][:n, i].flatten() for i, n in enumerate(num_active)],
    )


def _kv_rows(tables: Tensor, num_kv_heads: int, block_size: int) -> Tensor:
    """Rows of each key tile's blocks in a cache flattened to [num_blocks * kv_heads, ...].

    Returns [tiles, key_tiles, kv_heads, blocks_per_tile].
    """
    per_tile = KEYS // block_size
    tables = F.pad(tables, (0, -tables.shape[1] % per_tile))
    blocks = tables.view(tables.shape[0], -1, 1, per_tile)
    return blocks * num_kv_heads + torch.arange(num_kv_heads)[:, None]


def _attend(queries: Tensor, cache: KVCache, part: _Pass, window: int | None) -> Tensor:
    """Attention of query tiles [tiles, kv_heads, rows, d], already scaled, in float32."""
    num_heads = queries.shape[1]
    queries = queries.flatten(0, 1)
    highest = queries.new_full((*queries.shape[:2], 1), -torch.inf)
    total = torch.zeros_like(highest)
    out = torch.zeros_like(queries)
    for index, (active, rows) in enumerate(zip(part.num_active, part.kv_rows, strict=True)):
        key_positions = torch.arange(index * KEYS, (index + 1) * KEYS)
        keys = _gather(cache.keys, cache.key_scales, rows)
        values = _gather(cache.values, cache.value_scales, rows)
        going_on = part.num_active[index + 1] if index + 1 < len(part.num_active) else 0
        unwritten = key_positions > part.last_positions[going_on:active, None]
        _by_head(values[going_on * num_heads :], num_heads).masked_fill_(
            unwritten[:, None, :, None], 0
        )  # a weight of zero does not take away what an ended request left there if that is NaN

        now = slice(0, active * num_heads)
        scores = _bmm(queries[now], keys.transpose(1, 2))
        hidden = _hidden(key_positions, part.positions[:active], window)
        _by_head(scores, num_heads).masked_fill_(hidden[:, None], -torch.inf)

        new_highest = torch.maximum(highest[now], scores.amax(-1, keepdim=True))
        base = new_highest.masked_fill(new_highest == -torch.inf, 0)
        weights = scores.sub_(base).exp_()
        decay = torch.exp(highest[now] - base)
        highest[now] = new_highest
        total[now] = total[now] * decay + weights.sum(-1, keepdim=True)
        out[now] = out[now] * decay + _bmm(weights, values)
    # The highest score adds exactly 1 to the total, so only rows without a query have less.
    return _by_head(out / total.clamp(min=1), num_heads)


def _hidden(key_positions: Tensor, positions: Tensor, window: int | None) -> Tensor:
    """[tiles, rows, keys], which keys a query does not see."""
    positions = positions[:, :, None]
    hidden = key_positions > positions
    return hidden if window is None else hidden | (key_positions <= positions - window)


def _quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., d] as int8 and the scales [...] float32 that bring it back; the largest of d elements is 127."""
    scales = x.abs().amax(-1) / 127
    divisors = scales.masked_fill(scales == 0, 1)
    return (x / divisors[..., None]).round().to(torch.int8), scales


def _gather(cached: Tensor, scales: Tensor | None, rows: Tensor) -> Tensor:
    """The blocks at `rows` as float32 keys or values [tiles * kv_heads, KEYS, d]."""
    head_dim = cached.shape[3]
    blocks = cached.flatten(0, 1).index_select(0, rows).float()
    if scales is not None:
        blocks *= scales.flatten(0, 1).index_select(0, rows)[..., None]
    return blocks.view(-1, KEYS, head_dim)


def _by_head(x: Tensor, num_heads: int) -> Tensor:
    return x.view(-1, num_heads, *x.shape[1:])


def _bmm(a: Tensor, b: Tensor) -> Tensor:
    """Batched product. With at least one matrix per thread, none is ever shared out between threads."""
    count = a.shape[0]
    missing = torch.get_num_threads() - count
    if missing > 0:
        a, b = (F.pad(x, (0, 0, 0, 0, 0, missing)) for x in (a, b))
    return torch.bmm(a, b)[:count]
