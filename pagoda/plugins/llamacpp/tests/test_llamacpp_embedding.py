# SPDX-License-Identifier: Apache-2.0
"""Vectors of texts as llama.cpp gives them."""

from __future__ import annotations

import math
from array import array

import pytest

from pagoda.plugins.llamacpp.embedding import normalized
from pagoda.plugins.sim.model import sim_embedding


def vector_of(text: str | list[int]) -> list[float]:
    vector = array("f", sim_embedding(list(text.encode()) if isinstance(text, str) else text))
    return [x / math.hypot(*vector) for x in vector]


@pytest.mark.parametrize(
    ("kind", "length"), [(None, 5.0), (2, 5.0), (1, 7.0), (0, 4 / 32760), (3, 91 ** (1 / 3))]
)
def test_lengths_of_llamacpp(kind: int | None, length: float) -> None:
    got = normalized(array("f", [3.0, -4.0]), 2 if kind is None else kind)
    assert got == pytest.approx([3 / length, -4 / length])
    assert normalized(array("f", [0.0, 0.0]), 0 if kind is None else kind) == [0.0, 0.0]


async def test_vectors_as_llamacpp_has_them(api) -> None:
    for body in ({"content": ["abc", [1, 2]]}, {"input": ["abc", [1, 2]]}):
        answer = (await api.post("/embedding", {"model": "tiny", **body})).json()
        assert [one["index"] for one in answer] == [0, 1]
        for one, text in zip(answer, ["abc", [1, 2]], strict=True):
            assert one["embedding"] == [pytest.approx(vector_of(text), abs=1e-6)]
    raw = array("f", sim_embedding(list(b"abc"))).tolist()
    answer = (await api.post("/embedding", {"content": "abc", "embd_normalize": -1})).json()
    assert answer == [{"index": 0, "embedding": [raw]}]
    for wrong in ({}, {"content": []}, {"content": "a", "input": "a"}, {"content": "x" * 300}):
        refused = await api.post("/embedding", wrong)
        assert (refused.status, refused.json()["error"]["code"]) == (400, 400)
        assert "content" in refused.json()["error"]["message"]
