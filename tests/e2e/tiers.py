# SPDX-License-Identifier: Apache-2.0
"""Questions to servers with KV tiers, and what their answers and figures say about where KV came from."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec
from metrics_text import series

from pagoda.cli.openai_client import ClientMessage
from pagoda.cli.questions import Question, load_questions
from pagoda.kv.block_keys import prefix_keys

BLOCK_SIZE = 32
DEVICE_BLOCKS = 64
HOST_BLOCKS = 64
MODEL_FLAGS = ["--dtype", "float32", "--log-level", "warning", "--block-size", str(BLOCK_SIZE)]
BLOCK_BYTES = 2 * 4 * 2 * 64 * BLOCK_SIZE * 4
"""Keys and values in four layers with two heads of 64 channels, in float32."""
LONG = ("recall_40", "recall_100")


class Reply(NamedTuple):
    """An answer, and how much of its prompt was cached when the request was admitted."""

    message: dict[str, Any]
    num_prompt_tokens: int
    num_cached_tokens: int


def flags(directory: Path | None, *, host_blocks: int = HOST_BLOCKS, **others: object) -> list[str]:
    """A device of 64 blocks, as many in host memory, the rest on disk, where blocks go at once."""
    given: dict[str, object] = {"num_kv_blocks": DEVICE_BLOCKS}
    if host_blocks:
        given["kv_host_bytes"] = host_blocks * BLOCK_BYTES
    if directory is not None:
        given |= {"kv_disk_path": directory, "kv_disk_bytes": "1GiB", "kv_disk_min_touches": 1}
    pairs = (
        (f"--{name.replace('_', '-')}", str(value)) for name, value in (given | others).items()
    )
    return [*MODEL_FLAGS, *itertools.chain.from_iterable(pairs)]


def some_questions(long: int = 8, short: int = 1) -> list[Question]:
    """So many of each skill, in turn. The long ones have hundreds of different blocks."""
    by_skill = itertools.groupby(load_questions(None, ()), key=lambda question: question.skill)
    some = [
        list(itertools.islice(group, long if skill in LONG else short)) for skill, group in by_skill
    ]
    return [question for group in itertools.zip_longest(*some) for question in group if question]


def num_right(questions: Sequence[Question], replies: Sequence[Reply]) -> int:
    return sum(
        question.expect.is_met_by(msgspec.convert(reply.message, ClientMessage))
        for question, reply in zip(questions, replies, strict=True)
    )


async def ask_all(
    base_url: str, questions: Sequence[Question], concurrency: int = 16
) -> list[Reply]:
    room = asyncio.Semaphore(concurrency)

    async def ask(question: Question) -> Reply:
        async with (
            room,
            session.post("/v1/chat/completions", json=question.body("pagoda-tiny")) as r,
        ):
            assert r.status == 200, await r.text()
            answer = await r.json()
        usage = answer["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        [choice] = answer["choices"]
        for call in choice["message"].get("tool_calls") or ():
            del call["id"]  # is drawn for every answer
        return Reply(choice["message"], usage["prompt_tokens"], cached)

    async with aiohttp.ClientSession(base_url) as session:
        return list(await asyncio.gather(*map(ask, questions)))


def messages(replies: Sequence[Reply]) -> list[dict[str, Any]]:
    return [reply.message for reply in replies]


async def figures(base_url: str) -> Counter[tuple[str, str]]:
    """What `/metrics` says of tiers, by tier and figure such as `("disk", "loaded")`; replicas added up.

    Asks again while an engine that is busy is left out."""
    sums: Counter[tuple[str, str]] = Counter()
    async with aiohttp.ClientSession(base_url) as session:
        while not sums:
            async with session.get("/metrics") as response:
                text = await response.text()
            for labels, value in series(text, "pagoda_kv_tier_blocks"):
                sums[labels["tier"], "held"] += int(value)
            for figure in ("stored", "removed", "loaded", "failed"):
                for labels, value in series(text, f"pagoda_kv_tier_blocks_{figure}_total"):
                    sums[labels["tier"], figure] += int(value)
    return sums


async def keys_of(base_url: str, questions: Sequence[Question]) -> list[list[bytes]]:
    """For each question the keys of the blocks that a request may find cached."""
    keys = []
    async with aiohttp.ClientSession(base_url) as session:
        for question in questions:
            body = {**question.body("pagoda-tiny"), "add_generation_prompt": True}
            fields = ("model", "messages", "tools", "chat_template_kwargs", "add_generation_prompt")
            body = {name: body[name] for name in fields if name in body}
            async with session.post("/tokenize", json=body) as response:
                assert response.status == 200, await response.text()
                token_ids = (await response.json())["tokens"]
            keys.append(prefix_keys(token_ids, BLOCK_SIZE, None, 1000))
    return keys


def objects(directory: Path) -> dict[bytes, list[Path]]:
    """The objects in a directory, by key; of several ranks each has one."""
    found: dict[bytes, list[Path]] = {}
    for path in directory.glob("*/??/*"):
        if re.fullmatch(r"[0-9a-f]{62}", path.name):
            found.setdefault(bytes.fromhex(path.parent.name + path.name), []).append(path)
    return found


async def until_written(directory: Path, keys: Sequence[Sequence[bytes]]) -> None:
    """Waits until all these blocks are on disk."""
    wanted = set(itertools.chain.from_iterable(keys))
    while not wanted <= objects(directory).keys():
        await asyncio.sleep(0.01)
