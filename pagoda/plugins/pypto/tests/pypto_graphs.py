# SPDX-License-Identifier: Apache-2.0
"""Graphs of decoders such as programs compute, and of others."""

from __future__ import annotations

from typing import Any

import torch

from pagoda.backend.base import HeadNorms, KVCache
from pagoda.backend.graph import Graph
from pagoda.backend.operations import GraphBuilder
from pagoda.parallel.collectives import Alone
from pagoda.plugins.pypto.pool import stand_in
from pagoda.plugins.pypto.weights import HostLinear

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCAB = 256, 4, 2, 64, 768, 960
EPS = 1e-6


def _map(outputs: int, inputs: int) -> HostLinear:
    return HostLinear(torch.zeros(outputs, inputs))


class Recorder:
    """Records a decoder of pagoda-tiny's shape; `others` replace what it is made of."""

    def __init__(self, **others: Any) -> None:
        self.layers = 4
        self.eps = EPS
        self.attention: dict[str, Any] = {"scale": HEAD_DIM**-0.5, "window": None}
        self.norms: HeadNorms | None = HeadNorms(torch.ones(HEAD_DIM), torch.ones(HEAD_DIM), EPS)
        self.scale_embedding = False
        self.activation = "silu_and_mul"
        self.outputs = VOCAB
        self.one_head = True
        self.third: dict[str, Any] = {}
        """What the third layer has instead: sizes, numbers, or the `cache` of another layer by its place."""
        for name, value in others.items():
            setattr(self, name, value)

    def graph(self) -> Graph:
        ops = GraphBuilder(Alone())
        ones, embedding = torch.ones(HIDDEN), _map(VOCAB, HIDDEN)
        x = ops.embedding(ops.input("token_ids"), embedding)
        if self.scale_embedding:
            x = ops.scale(x, 16.0)
        table = ops.rotary_table(ops.input("positions"), torch.ones(HEAD_DIM // 2), 1.0)
        caches: list[KVCache] = []
        for layer in range(self.layers):
            own = self.third if layer == 2 else {}
            heads, kv_heads = own.get("heads", HEADS), own.get("kv_heads", KV_HEADS)
            shape = (3, own.get("cached_heads", kv_heads), 128, HEAD_DIM)
            kept = own.get("kept", torch.float32)
            caches.append(KVCache(stand_in(shape, kept), stand_in(shape, kept)))
            qkv = _map((heads + 2 * kv_heads) * HEAD_DIM, HIDDEN)
            h = ops.linear(ops.rms_norm(x, ones, own.get("eps", self.eps)), qkv)
            queries = ops.rotate_and_cache(
                h,
                ops.metadata(),
                table,
                caches[-1],
                own.get("norms", self.norms),
                num_heads=heads,
                head_dim=HEAD_DIM,
            )
            attention = self.attention | own.get("attention", {})
            cache = caches[own.get("cache", layer)]
            h = ops.attention(queries, ops.metadata(), cache, head_dim=HEAD_DIM, **attention)
            if layer == self.layers - 1:
                rows = ops.input("rows")
                h, x = ops.select_rows(h, rows), ops.select_rows(x, rows)
            x = ops.add(x, ops.linear(h, _map(HIDDEN, heads * HEAD_DIM)))
            inner = own.get("inner", INNER)
            mlp_eps = own.get("mlp_eps", self.eps)
            h = ops.linear(ops.rms_norm(x, ones, mlp_eps), _map(2 * inner, HIDDEN))
            h = getattr(ops, self.activation)(h)
            x = ops.add(x, ops.linear(h, _map(HIDDEN, inner)))
        h = ops.rms_norm(x, ones, self.eps)
        ops.result("last_hidden", h)
        head = _map(self.outputs, HIDDEN)
        ops.result("logits", ops.linear(h, head))
        chosen = head if self.one_head else _map(self.outputs, HIDDEN)
        ops.result("argmax", ops.linear_argmax(h, chosen))
        return ops.build()
