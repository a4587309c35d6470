# SPDX-License-Identifier: Apache-2.0
"""Requests whose answers tell when the first token came and how much of the prompt was cached."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample


class Answer(NamedTuple):
    """Answer to one request."""

    text: str
    ttft_s: float
    num_prompt_tokens: int
    num_cached_tokens: int


async def ask(session: aiohttp.ClientSession, path: str, body: Mapping[str, object]) -> Answer:
    """Streams one answer.

    Raises:
        RuntimeError: the server refused the request, or broke off.
    """
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    sent = time.perf_counter()
    first: float | None = None
    text: list[str] = []
    async with session.post(path, json=body) as response:
        if response.status != 200:
            raise RuntimeError(await response.text())
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(str(event["error"]))
            for choice in event["choices"]:
                piece = choice.get("text") or choice.get("delta", {}).get("content") or ""
                if piece:
                    first = first or time.perf_counter()
                    text.append(piece)
            if event.get("usage"):
                usage = event["usage"]
                cached = usage["prompt_tokens_details"]["cached_tokens"]
                ttft = (first or time.perf_counter()) - sent
                return Answer("".join(text), ttft, usage["prompt_tokens"], cached)
    raise RuntimeError("The answer ended without its usage.")


def open_session(base_url: str) -> aiohttp.ClientSession:
    """A client without time-outs: prompts take as long as they take."""
    return aiohttp.ClientSession(
        base_url,
        timeout=aiohttp.ClientTimeout(total=None),
        connector=aiohttp.TCPConnector(limit=0),
    )


async def tier_figures(session: aiohttp.ClientSession) -> Counter[tuple[str, str]]:
    """Counts of `/metrics` by tier and figure, such as `blocks` or `loaded`; replicas are added up."""
    sums: Counter[tuple[str, str]] = Counter()
    prefix = "pagoda_kv_tier_"
    for sample in await _samples(session):
        if sample.name.startswith(prefix):
            figure = sample.name.removeprefix(prefix).removeprefix("blocks_")
            sums[sample.labels["tier"], figure.removesuffix("_total")] += int(sample.value)
    return sums


async def counter(session: aiohttp.ClientSession, name: str) -> int:
    """A counter of `/metrics`; replicas are added up."""
    return sum(int(it.value) for it in await _samples(session) if it.name == name)


async def _samples(session: aiohttp.ClientSession) -> list[Sample]:
    async with session.get("/metrics") as response:
        text = await response.text()
    return [it for family in text_string_to_metric_families(text) for it in family.samples]
