# SPDX-License-Identifier: Apache-2.0
"""The memory of kept JSON is estimated well enough to be bounded by it."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgspec
import pytest

from pagoda.api.answers.kept_json import kept_bytes

_COPIES = 100


def _response() -> dict[str, Any]:
    part = {"type": "output_text", "text": "1 + 2 = 3", "annotations": [], "logprobs": []}
    message = {"id": "msg_1", "type": "message", "role": "assistant", "content": [part]}
    options = {f"option_{i}": 0.5 + i for i in range(20)}
    return {"id": "resp_1", "output": [message], "usage": {"input_tokens": 4711}, **options}


def _nested(depth: int, name: str | None = None) -> Any:
    value: Any = [] if name is None else {}
    for _ in range(depth):
        value = [value] if name is None else {name: value}
    return value


@pytest.mark.parametrize(
    "value",
    [
        _response(),
        [[]] * 500,
        [{}] * 500,
        _nested(300),
        _nested(300, "a"),
        [{"a": 1}] * 300,
        ["ab"] * 500,
        [1000 + i for i in range(500)],
        {f'"a\\{i}\\': i for i in range(300)},
        "{[,:" * 1000,
        ["a" * 1000 + "\N{GRINNING FACE}", "\N{GRINNING FACE}" * 1000],
    ],
    ids=[
        *("a response", "empty arrays", "empty objects", "arrays in arrays", "objects in objects"),
        *("small objects", "texts", "numbers", "escaped names", "brackets in a text", "wide texts"),
    ],
)
def test_the_estimate_is_near_what_python_takes(value: Any) -> None:
    text = msgspec.json.encode(value)
    tracemalloc.start()
    try:
        copies = [msgspec.json.decode(text) for _ in range(_COPIES)]
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.5 < kept_bytes(copies[0]) * _COPIES / taken < 2.0


def test_names_within_a_text_are_text() -> None:
    inner = msgspec.json.encode(_response()).decode()
    assert kept_bytes(inner) - len(msgspec.json.encode(inner)) == kept_bytes("a") - len(b'"a"')
