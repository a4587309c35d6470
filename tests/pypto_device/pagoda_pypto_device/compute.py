# SPDX-License-Identifier: Apache-2.0
"""What the programs compute: the reference's functions on what lies in the chips' memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pagoda.backend.base import KVCache, TokenBatch
from pagoda.backend.reference.attention import attention, plan_attention, rotate_and_cache
from pagoda.backend.reference.linear import Linear, embedding, linear
from pagoda.backend.reference.rows import add, rms_norm, silu_and_mul
from pagoda.plugins.pypto.contract import Contract
from pagoda_pypto_device.memory import ContractError

_AT_ONCE = 1 << 18
"""Elements of weights that are checked at once, few enough for the processor's cache."""


@dataclass(frozen=True)
class Layer:
    """A layer in the reference's form, joined as a model joins it, so that products have the same bits."""

    attention_norm: Tensor
    qkv: Linear
    q_norm: Tensor
    k_norm: Tensor
    out: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True)
class Weights:
    layers: tuple[Layer, ...]
    embedding: Linear
    head: Linear
    final_norm: Tensor
    cosines: Tensor
    sines: Tensor


def read_weights(contract: Contract, staged: Mapping[str, Sequence[Tensor]]) -> Weights:
    """Weights out of the memory of all chips. Raises ContractError: they are not what the contract says."""
    whole = {meaning: _joined(contract, meaning, parts) for meaning, parts in staged.items()}
    sizes = contract.sizes
    _check_tables(whole["rope_cos"], whole["rope_sin"])
    _check_padding(whole, sizes["REAL_V"])
    for meaning, values in whole.items():
        if not all(bool(some.isfinite().all()) for some in values.flatten().split(_AT_ONCE)):
            raise ContractError(f"{meaning} has NaN: not all of it was uploaded")

    def maps(layer: int, *meanings: str) -> Linear:
        parts = []
        for meaning in meanings:
            rows = len(whole[meaning]) // sizes["L"]
            parts.append(whole[meaning][layer * rows : (layer + 1) * rows].t())
        joined = torch.cat(parts).contiguous()
        return Linear(*joined.shape, (joined,), joined.dtype, None)

    layers = tuple(
        Layer(
            whole["attention_norms"][layer],
            maps(layer, "w_q", "w_k", "w_v"),
            whole["q_norms"][layer],
            whole["k_norms"][layer],
            maps(layer, "w_o"),
            whole["mlp_norms"][layer],
            maps(layer, "w_gate", "w_up"),
            maps(layer, "w_down"),
        )
        for layer in range(sizes["L"])
    )
    tables = (whole[name][: sizes["REAL_V"]] for name in ("embedding", "head"))
    embedding_map, head = (Linear(*table.shape, (table,), table.dtype, None) for table in tables)
    half = sizes["D"] // 2
    return Weights(
        layers,
        embedding_map,
        head,
        whole["final_norm"][0],
        whole["rope_cos"][:, :half],
        whole["rope_sin"][:, :half],
    )


def _joined(contract: Contract, meaning: str, parts: Sequence[Tensor]) -> Tensor:
    """A tensor whose parts lie on the chips, or of which each has all."""
    argument = contract.programs["decode"].argument(meaning)
    if len(parts) == 1:
        return parts[0]
    if not argument.split:
        if any(not torch.equal(part, parts[0]) for part in parts):
            raise ContractError(f"{meaning} differs from chip to chip")
        return parts[0]
    at = next(i for i, dim in enumerate(argument.shape) if argument.split in dim.split("*"))
    dims = argument.shape[at].split("*")
    if at == 0 and dims[0] == "L":  # layer after layer on each chip
        layers = contract.sizes["L"]
        by_layer = [part.view(layers, -1, *part.shape[1:]) for part in parts]
        return torch.cat(by_layer, dim=1).flatten(0, 1)
    return torch.cat(list(parts), dim=at)


def _check_tables(cosines: Tensor, sines: Tensor) -> None:
    half = cosines.shape[1] // 2
    for name, table in (("rope_cos", cosines), ("rope_sin", sines)):
        if not torch.equal(table[:, :half], table[:, half:]):
            raise ContractError(f"{name} has other angles in its second half")
    unit = cosines.square() + sines.square()
    if not torch.allclose(unit, torch.ones(()), atol=1e-5) or bool((sines[0] != 0).any()):
        raise ContractError("rotary tables are no cosines and sines of positions from 0 on")


def _check_padding(whole: Mapping[str, Tensor], real: int) -> None:
    if bool((whole["embedding"][real:] != 0).any()):
        raise ContractError("the embedding is not zero behind its tokens")
    head = whole["head"]
    if bool((head[real:] != head[:1]).any()):
        raise ContractError("the head does not repeat its first row behind its tokens")


@dataclass(frozen=True)
class PoolView:
    """The pool of all chips as [layers, pages, page, heads of a chip, element], of each chip."""

    keys: Sequence[Tensor]
    values: Sequence[Tensor]

    def gathered(self, which: str, layer: int, pages: Tensor) -> Tensor:
        """Some pages as the reference has blocks: [pages, heads, page, element]."""
        parts: Sequence[Tensor] = getattr(self, which)
        return torch.cat([part[layer][pages] for part in parts], dim=2).transpose(1, 2).contiguous()

    def put(self, which: str, layer: int, slots: Tensor, rows: Tensor) -> None:
        """Writes rows [n, heads, element] to slots."""
        parts: Sequence[Tensor] = getattr(self, which)
        page, heads = parts[0].shape[2:4]
        for chip, part in enumerate(parts):
            own = rows[:, chip * heads : (chip + 1) * heads]
            part[layer][slots // page, slots % page] = own


@dataclass(frozen=True)
class Tokens:
    """The tokens of a call: those of each sequence in a row."""

    ids: Tensor
    """[n] int64."""
    query_lens: Tensor
    """[s] int64."""
    context_lens: Tensor
    """[s] int64."""
    tables: Tensor
    """[s, b] int64, entries behind a sequence are 0."""
    slots: Tensor
    """[n] int64."""


def compute(contract: Contract, weights: Weights, pool: PoolView, tokens: Tokens) -> Tensor:
    """Logits [s, padded vocabulary] of the last tokens of all sequences; K and V go to the pool.

    Raises ContractError: the pool lacks what a sequence has computed, or is not finite behind it.
    """
    sizes, page = contract.sizes, contract.limits.page
    pages, places = tokens.tables.unique(return_inverse=True)
    sequence_ids = torch.repeat_interleave(tokens.query_lens)
    ends = tokens.query_lens.cumsum(0)
    firsts = (tokens.context_lens - tokens.query_lens)[sequence_ids]
    positions = firsts + torch.arange(len(tokens.ids)) - (ends - tokens.query_lens)[sequence_ids]
    batch = TokenBatch(
        tokens.ids,
        positions,
        sequence_ids,
        tokens.query_lens,
        tokens.context_lens,
        (places.view_as(tokens.tables),),
    )
    x = embedding(tokens.ids, weights.embedding, first_id=0, vocab_size=sizes["REAL_V"])
    table = weights.cosines[positions], weights.sines[positions]
    plan, head_dim = None, sizes["D"]
    for number, layer in enumerate(weights.layers):
        cache = KVCache(*(pool.gathered(kind, number, pages) for kind in ("keys", "values")))
        _check_context(batch, cache, page)
        plan = plan or plan_attention(batch, sizes["QH"], cache)
        h = linear(rms_norm(x, layer.attention_norm, eps=contract.eps), layer.qkv)
        norms = layer.q_norm, layer.k_norm
        queries = rotate_and_cache(
            h,
            plan,
            *table,
            cache,
            *norms,
            head_dim=head_dim,
            eps=contract.eps,
            norms_all_heads=False,
        )
        for kind, held in (("keys", cache.keys), ("values", cache.values)):
            pool.put(kind, number, tokens.slots, held[plan.block_ids, :, plan.offsets])
        h = attention(
            queries,
            plan,
            cache,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            window=None,
            softcap=None,
            chunk=None,
            causal=True,
        )
        if number == len(weights.layers) - 1:
            h, x = h[ends - 1], x[ends - 1]
        x = add(x, linear(h, layer.out))
        h = rms_norm(x, layer.mlp_norm, eps=contract.eps)
        x = add(x, linear(silu_and_mul(linear(h, layer.gate_up)), layer.down))
    logits = linear(rms_norm(x, weights.final_norm, eps=contract.eps), weights.head)
    padded = logits[:, :1].expand(-1, sizes["V"] - sizes["REAL_V"])
    return torch.cat((logits, padded), dim=1)


def _check_context(batch: TokenBatch, cache: KVCache, page: int) -> None:
    """Raises ContractError: K or V before the step's tokens is missing, or what is behind them is NaN."""
    (tables,) = batch.block_tables
    for table, count, end in zip(tables, batch.query_lens, batch.context_lens, strict=True):
        own, first = table[: -(-int(end) // page)], int(end - count)
        for name, held in (("K", cache.keys), ("V", cache.values)):
            rows = held[own].transpose(1, 2).flatten(0, 1).flatten(1)
            if not bool(rows.isfinite().all()):
                raise ContractError(f"a page of a sequence of {end} tokens has NaN in {name}")
            if not bool((rows[:first] != 0).any(1).all()):
                raise ContractError(f"a sequence of {end} tokens lacks {name} that it reads")


def select(logits: Tensor, real: int, k: int) -> tuple[Tensor, Tensor]:
    """The k highest of real tokens' logits and their tokens; of equal ones the lowest token comes first."""
    best, order = logits[:, :real].sort(dim=1, descending=True, stable=True)
    return best[:, :k], order[:, :k].int()
