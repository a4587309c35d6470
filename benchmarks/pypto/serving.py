# SPDX-License-Identifier: Apache-2.0
"""Requests through an engine and its worker, on the device and on the reference."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import msgspec

from pagoda.fleet.engine_client import EngineClient
from pagoda.fleet.replica import Replica
from pagoda.llm.engine_options import EngineOptions, ExecutorOptions, ParallelOptions
from pagoda.messages.frontend import GenerateRequest, Work
from pagoda.messages.load import LoadReport
from pagoda.messages.sampling_params import SamplingParams

PAGE = 128
_KINDS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9, top_p=0.95),
    SamplingParams(temperature=0.7, top_k=20, repetition_penalty=1.1),
    # What Qwen3's authors recommend, with thinking and without.
    SamplingParams(temperature=0.6, top_k=20, top_p=0.95),
    SamplingParams(temperature=0.7, top_k=20, top_p=0.8),
)
_VOCABULARY = 900
"""Token ids of prompts are below this."""


class Served(NamedTuple):
    """Tokens of each request in order, or the error that ended it, and the engine's figures behind all."""

    answers: list[list[int] | str]
    load: LoadReport


def requests(
    count: int, seed: int, *, pages: int = 4, max_tokens: int = 48
) -> list[GenerateRequest]:
    """Requests whose prompts share beginnings of up to so many pages, of all `_KINDS` in turn; some are urgent."""
    random = Random(seed)
    stems = [[random.randrange(_VOCABULARY) for _ in range(PAGE * pages)] for _ in range(4)]
    found = []
    for number in range(count):
        stem = random.choice(stems)[: PAGE * random.randrange(pages + 1)]
        own = [random.randrange(_VOCABULARY) for _ in range(random.randrange(1, PAGE))]
        sampling = msgspec.structs.replace(
            _KINDS[number % len(_KINDS)], seed=number, max_tokens=max_tokens, ignore_eos=True
        )
        found.append(
            GenerateRequest(
                request_id=f"r{seed}-{number}",
                prompt_token_ids=stem + own,
                work=Work(sampling),
                priority=-(number % 4 == 3),
            )
        )
    return found


async def serve(
    asked: Sequence[GenerateRequest],
    backend: str,
    model: Path | None = None,
    devices: str | None = None,
    **options: Any,
) -> Served:
    """Asks all at once, but for urgent ones, which come once the others have begun and take their places.

    `options` are fields of `EngineOptions`.
    """
    parallel = ParallelOptions(devices=devices)
    given: dict[str, Any] = {"block_size": PAGE, "max_num_seqs": 16, "threads": 1}
    given["backend"] = backend
    engine = EngineOptions(**(given | options))
    executor = ExecutorOptions()
    files = executor.resolve(engine, None if model is None else str(model), parallel)
    replica = EngineClient(executor.engine_config(engine, files.model, parallel)).replica
    await replica.start()
    try:
        begun = asyncio.Event()
        answers = await asyncio.gather(*(_answer(replica, request, begun) for request in asked))
        return Served(list(answers), await replica.load())
    finally:
        await replica.close()


async def _answer(
    replica: Replica, request: GenerateRequest, begun: asyncio.Event
) -> list[int] | str:
    token_ids: list[int] = []
    if request.priority < 0:
        await begun.wait()
    async with aclosing(replica.generate(request)) as chunks:
        async for chunk in chunks:
            begun.set()
            if chunk.error is not None:
                return chunk.error
            token_ids += chunk.token_ids
    return token_ids
