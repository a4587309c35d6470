# SPDX-License-Identifier: Apache-2.0
"""Schemas like those of applications, of which `python -m benchmarks.json_schemas` asks for 500."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from benchmarks.json_schemas import answers


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
async def test_every_answer_that_ends_validates(plain_url: str, temperature: float) -> None:
    count = 30
    found = await answers(plain_url, count, temperature, concurrency=16)
    assert found.keys() <= {"valid", "cut"}
    assert found["valid"] >= 0.7 * count


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"guided_json": {"type": "integer"}, "allowed_token_ids": [0]}, "allowed_token_ids"),
        ({"repetition_penalty": 1e-30}, "repetition_penalty"),
    ],
)
async def test_parameters_that_leave_no_token_are_the_clients_mistake(
    plain_url: str, fields: dict[str, Any], field: str
) -> None:
    body = {"prompt": "1 2 3", "max_tokens": 4} | fields
    async with (
        aiohttp.ClientSession(plain_url) as session,
        session.post("/v1/completions", json=body) as response,
    ):
        told = await response.json()
    assert (response.status, told["error"]["type"]) == (400, "invalid_request_error")
    assert told["error"]["param"] == field
    assert field in told["error"]["message"]
    assert "guided_json" not in told["error"]["message"]
