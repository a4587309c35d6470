# SPDX-License-Identifier: Apache-2.0
"""Schemas like those of applications, of which `python -m benchmarks.json_schemas` asks for 500."""

from __future__ import annotations

import pytest

from benchmarks.json_schemas import answers


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
async def test_every_answer_that_ends_validates(plain_url: str, temperature: float) -> None:
    count = 30
    found = await answers(plain_url, count, temperature, concurrency=16)
    assert found.keys() <= {"valid", "cut"}
    assert found["valid"] >= 0.7 * count
