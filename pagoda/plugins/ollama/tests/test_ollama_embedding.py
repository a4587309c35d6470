# SPDX-License-Identifier: Apache-2.0
"""Vectors of texts as Ollama gives them."""

from __future__ import annotations

import math
from array import array

import pytest

from pagoda.plugins.sim.model import sim_embedding


def vector_of(text: str, dimensions: int = 8) -> list[float]:
    vector = array("f", sim_embedding(list(text.encode())))[:dimensions]
    return [x / math.hypot(*vector) for x in vector]


async def test_vectors_as_ollama_has_them(api) -> None:
    answer = (await api.post("/api/embed", {"model": "tiny:latest", "input": ["abc", "d"]})).json()
    assert answer["model"] == "tiny:latest"
    assert answer["prompt_eval_count"] == 4
    for got, text in zip(answer["embeddings"], ["abc", "d"], strict=True):
        assert got == pytest.approx(vector_of(text), abs=1e-6)
    one = {"model": "tiny", "input": "abc", "dimensions": 3, "options": {"num_ctx": 64}}
    [got] = (await api.post("/api/embed", {**one, "keep_alive": "5m"})).json()["embeddings"]
    assert got == pytest.approx(vector_of("abc", 3), abs=1e-6)
    assert (await api.post("/api/embed", {"model": "tiny", "input": []})).json()["embeddings"] == []
    long = {"model": "tiny", "input": "x" * 300}
    assert (await api.post("/api/embed", long)).status == 200
    assert (await api.post("/api/embed", {**long, "truncate": False})).status == 400
    assert (await api.post("/api/embed", {**one, "options": {"num_ctx": 512}})).status == 200
    assert (await api.post("/api/embed", {"model": "other", "input": "a"})).status == 404
    old = (await api.post("/api/embeddings", {"model": "tiny", "prompt": "abc"})).json()
    assert old == {"embedding": array("f", sim_embedding(list(b"abc"))).tolist()}
    old = (await api.post("/api/embeddings", {"model": "tiny", "prompt": ""})).json()
    assert old == {"embedding": []}
