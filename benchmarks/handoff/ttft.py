# SPDX-License-Identifier: Apache-2.0
"""Time that a handoff adds to the first token and the second, beyond computing the prompt.

A prefill and a decode engine with a core each get the same request, as a router would give it to them. From when
the prefill engine tells its token, the clock runs: until the decode engine tells that token, and until it tells
the next one, for which it must have all of the KV, less what a token takes it otherwise. So it does not matter
that computing a prompt takes longer one time than another.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, NamedTuple

import msgspec

from benchmarks.handoff.pod import BLOCK_SIZE, on_cores, random_prompt, two_cores, write_key
from pagoda.cli import output
from pagoda.fleet.engine_client import EngineClient
from pagoda.fleet.replica import Replica
from pagoda.llm.engine_options import (
    EngineOptions,
    ExecutorOptions,
    ParallelOptions,
)
from pagoda.messages.frontend import GenerateRequest, KVSource, Work
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.worker_config import Role
from pagoda.plugins.disaggregation.options import HandoffOptions

Dtype = Literal["float32", "bfloat16"]

_ANSWER = 8
_MAX_MODEL_LEN = 2048


class _Times(NamedTuple):
    """Times of one request, in seconds."""

    prefill: float
    """Seconds until the prefill engine sends its token."""
    first: float
    """Seconds from then until the decode engine sends that token."""
    second: float
    """Seconds from then until the decode engine sends the next token, less its usual pause."""


def ttft(
    *,
    model: str = "qwen3-0.6b",
    dtype: Dtype = "bfloat16",
    prompt_len: int = 1000,
    prompts: int = 7,
    chunk: int = 256,
    transports: str = "shm,tcp",
    seed: int = 0,
) -> None:
    """Measure what the handoff adds to the first and the second token, for each transport.

    Args:
        model: A shape preset, with random weights, or pagoda-tiny.
        dtype: Of weights, activations and KV.
        prompt_len: Random tokens in a prompt.
        prompts: For each transport, in turn.
        chunk: Tokens that the prefill engine computes in a step; their KV goes while the next are computed.
        transports: Those to be measured.
        seed: Of the prompts.
    """
    names = transports.split(",")
    with TemporaryDirectory() as directory:
        key = write_key(Path(directory))
        times, num_blocks = asyncio.run(
            _measure(model, dtype, key, chunk, names, random.Random(seed), prompt_len, prompts)
        )
    _report(times, num_blocks)


def _engine(
    model: str, dtype: Dtype, key: Path, role: Role, transports: str, chunk: int = 2048
) -> Replica:
    is_preset = model != "pagoda-tiny"
    engine = EngineOptions(
        load_format="dummy" if is_preset else "auto",
        dtype=dtype,
        threads=1,
        max_num_batched_tokens=chunk,
        max_model_len=_MAX_MODEL_LEN,
        block_size=BLOCK_SIZE,
        num_kv_blocks=4 * _MAX_MODEL_LEN // BLOCK_SIZE,
    )
    flags = HandoffOptions(
        role="prefill" if role is Role.PREFILL else "decode", kv_transports=transports
    )
    handoff = flags.config(cluster_key_file=key, advertise="127.0.0.1", num_replicas=1)
    executor, parallel = ExecutorOptions(), ParallelOptions()
    files = executor.resolve(engine, model if is_preset else None, parallel)
    return EngineClient(executor.engine_config(engine, files.model, parallel, handoff)).replica


async def _measure(
    model: str,
    dtype: Dtype,
    key: Path,
    chunk: int,
    names: list[str],
    chance: random.Random,
    prompt_len: int,
    prompts: int,
) -> tuple[dict[str, list[_Times]], int]:
    """The times by transport, and how many blocks went each time. What comes first, to warm up, does not count."""
    p_core, d_core = two_cores()
    times: dict[str, list[_Times]] = {name: [] for name in names}
    async with AsyncExitStack() as stack:
        prefill = _engine(model, dtype, key, Role.PREFILL, ",".join(names), chunk)
        decoders = {name: _engine(model, dtype, key, Role.DECODE, name) for name in names}
        for engine in (prefill, *decoders.values()):
            with on_cores([p_core if engine is prefill else d_core]):
                await engine.start()
            stack.push_async_callback(engine.close)
        for number in range(prompts + 1):
            for name, decode in decoders.items():
                prompt = random_prompt(chance, prompt_len)
                measured = await _hand_over(prefill, decode, f"{name}{number}", prompt)
                if number:
                    times[name].append(measured)
        counts = {(await decode.load()).tiers[-1].num_loaded for decode in decoders.values()}
    [num_loaded] = counts
    return times, num_loaded // (prompts + 1)


async def _hand_over(prefill: Replica, decode: Replica, name: str, prompt: list[int]) -> _Times:
    request = GenerateRequest(
        request_id=name,
        prompt_token_ids=prompt,
        work=Work(SamplingParams(temperature=0, seed=0, max_tokens=_ANSWER)),
    )
    source: asyncio.Future[KVSource] = asyncio.get_running_loop().create_future()
    began = time.perf_counter()

    async def compute() -> float:
        """Returns when the prompt's token is sent."""
        copy = msgspec.structs.replace(request, request_id=f"{name}/prefill", holds_kv=True)
        async for chunk in prefill.generate(copy):
            if chunk.kv_source is not None and not source.done():
                source.set_result(chunk.kv_source)
            if chunk.finish_reason is not None:
                return time.perf_counter()
        raise RuntimeError("The prefill engine has not answered.")

    computing = asyncio.create_task(compute())
    fetching = msgspec.structs.replace(request, kv_source=await source)
    told: list[float] = []
    async for chunk in decode.generate(fetching):
        if chunk.error is not None:
            raise RuntimeError(chunk.error)
        told += [time.perf_counter()] * len(chunk.token_ids)
    prefilled = await computing
    usual = statistics.median(later - earlier for earlier, later in itertools.pairwise(told[1:]))
    return _Times(prefilled - began, told[0] - prefilled, told[1] - prefilled - usual)


def _report(times: Mapping[str, list[_Times]], num_blocks: int) -> None:
    rows = [
        (
            name,
            f"{statistics.median(one.prefill for one in measured):.3f} s",
            _shown([one.first for one in measured]),
            _shown([one.second for one in measured]),
        )
        for name, measured in times.items()
    ]
    columns = ("medians", "prefill", "first token, later by", "second token, later by")
    output.stdout().print(output.table("", columns, rows))
    output.stdout().print(f"{num_blocks} blocks of {BLOCK_SIZE} tokens each time")


def _shown(seconds: list[float]) -> str:
    values = [value * 1e3 for value in seconds]
    return f"{statistics.median(values):.1f} ms ({min(values):.1f} to {max(values):.1f})"
