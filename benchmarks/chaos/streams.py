# SPDX-License-Identifier: Apache-2.0
"""Streams of a server to which something happens meanwhile, each compared with its undisturbed answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from safetensors.numpy import save_file

import pagoda
from benchmarks.chaos.injected import check_faults
from benchmarks.chaos.trial import Outcome
from pagoda.checkpoints.resolve import load_model_config, resolve_model
from pagoda.cli.server_process import ServerProcess, server_process
from pagoda.faults.schedule import FAULTS_ENV, TESTING_ENV

_HELD_OUT = Path(pagoda.__file__).parent / "checkpoints" / "pagoda_tiny" / "heldout.jsonl"
_ADAPTER = "adapted"
_SCHEMA = {
    "type": "object",
    "properties": {
        "entries": {
            "type": "array",
            "items": {"enum": ["red", "green", "blue", 17, None]},
            "minItems": 24,
            "maxItems": 40,
        },
        "count": {"type": "integer", "minimum": 1000, "maximum": 999_999},
    },
    "required": ["entries", "count"],
    "additionalProperties": False,
}
RESPAWN_S = 5.0
"""Seconds beyond a time-out that a pause may last: another process starts, and what ran is computed again."""


@dataclass
class Stream:
    """One answer, as far as it has come."""

    body: dict[str, Any]
    request_id: str = ""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    reason: str = ""
    errors: list[str] = field(default_factory=list)
    longest_pause_s: float = 0.0
    """The longest time between two events, from the first on."""

    @property
    def content(self) -> tuple[str, list[int], str]:
        return self.text, self.token_ids, self.reason


def bodies(count: int, max_tokens: int) -> list[dict[str, Any]]:
    """Requests of four kinds in turn: greedy, sampled from a seed, held to a JSON schema, of an adapter."""
    questions = [json.loads(line) for line in _HELD_OUT.read_text(encoding="utf-8").splitlines()]
    return [
        {
            "model": _ADAPTER if index % 4 == 3 else "pagoda-tiny",
            "messages": questions[index % len(questions)]["messages"],
            "temperature": index % 2,
            "seed": index,
            "max_tokens": max_tokens,
            "stream": True,
            "return_token_ids": True,
            **(_constrained(max_tokens) if index % 4 == 2 else {"ignore_eos": True}),
        }
        for index in range(count)
    ]


def _constrained(max_tokens: int) -> dict[str, Any]:
    schema = {"name": "colors", "strict": True, "schema": _SCHEMA}
    return {
        "response_format": {"type": "json_schema", "json_schema": schema},
        "thinking_token_budget": min(20, max_tokens),
        "max_tokens": max_tokens + 200,
    }


@contextlib.contextmanager
def adapted_server(flags: Sequence[str] = (), faults: str = "") -> Iterator[ServerProcess]:
    """A server of the embedded model with an adapter of random numbers, and perhaps a schedule of faults.
    Raises RuntimeError at the end: a fault of the schedule has not come, so nothing was tried."""
    with (
        tempfile.TemporaryDirectory() as directory,
        tempfile.TemporaryFile() as log,
        _environment(faults),
    ):
        _save_adapter(Path(directory))
        adapter = ("--lora", f"{_ADAPTER}={directory}", "--dtype", "float32")
        arguments = [*adapter, "--log-level", "warning", *flags]
        with server_process(arguments, stderr=log.fileno()) as server:
            yield server
        check_faults(faults, log)


@contextlib.contextmanager
def _environment(faults: str) -> Iterator[None]:
    if not faults:
        yield
        return
    os.environ |= {FAULTS_ENV: faults, TESTING_ENV: "1"}
    try:
        yield
    finally:
        del os.environ[FAULTS_ENV], os.environ[TESTING_ENV]


def _save_adapter(directory: Path, rank: int = 8) -> None:
    import numpy

    config = load_model_config(resolve_model(None).model, "auto")
    draws = numpy.random.default_rng(0)
    tensors = {}
    targets = set()
    for layer in range(config.num_layers):
        for linear in filter(None, config.attention_linears(layer)):
            size = 0.4 * linear.inputs**-0.5 * rank**-0.5
            name = f"base_model.model.{linear.name}"
            down = draws.standard_normal((rank, linear.inputs), dtype=numpy.float32)
            up = draws.standard_normal((linear.outputs, rank), dtype=numpy.float32)
            tensors[f"{name}.lora_A.weight"] = down
            tensors[f"{name}.lora_B.weight"] = (size * up).astype(numpy.float32)
            targets.add(linear.name.rpartition(".")[2])
    save_file(tensors, directory / "adapter_model.safetensors")
    fields = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "bias": "none",
        "target_modules": sorted(targets),
    }
    (directory / "adapter_config.json").write_text(json.dumps(fields), encoding="utf-8")


Disturb = Callable[[list[Stream]], Awaitable[None]]


async def run_streams(
    server: ServerProcess,
    requests: list[dict[str, Any]],
    disturb: Disturb | None = None,
    poisoned: int = -1,
) -> list[Stream]:
    """All requests at once, to their ends. `disturb` sees how far they have come; the id of number `poisoned` says
    that it is."""
    streams = [
        Stream(body, "poison" if index == poisoned else f"chaos-{index}")
        for index, body in enumerate(requests)
    ]
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(
        server.base_url, connector=connector, timeout=timeout
    ) as session:
        disturbing = None if disturb is None else asyncio.ensure_future(disturb(streams))
        try:
            await asyncio.gather(*(_read(session, stream) for stream in streams))
            if disturbing is not None:
                await disturbing
        finally:
            if disturbing is not None:
                disturbing.cancel()
    return streams


async def _read(session: aiohttp.ClientSession, stream: Stream) -> None:
    headers = {"X-Request-Id": stream.request_id}
    async with session.post("/v1/chat/completions", json=stream.body, headers=headers) as response:
        if response.status != 200:
            stream.errors.append(await response.text())
            return
        heard_at: float | None = None
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            now = time.monotonic()
            if heard_at is not None:
                stream.longest_pause_s = max(stream.longest_pause_s, now - heard_at)
            heard_at = now
            event = json.loads(line[6:])
            if "error" in event:
                stream.errors.append(event["error"]["message"])
            for choice in event.get("choices", ()):
                delta = choice["delta"]
                stream.text += (delta.get("content") or "") + (delta.get("reasoning_content") or "")
                stream.token_ids += choice.get("token_ids") or ()
                stream.reason = choice["finish_reason"] or stream.reason


def comparison(
    streams: list[Stream], expected: list[Stream], most_pause_s: float | None
) -> Outcome:
    """Comparison of streams with undisturbed ones; `most_pause_s` limits the longest pause, None does not."""
    same = sum(
        a.content == b.content and not a.errors for a, b in zip(streams, expected, strict=True)
    )
    pause_s = max(stream.longest_pause_s for stream in streams)
    measured = f"{same} of {len(streams)} complete, token for token; longest pause {pause_s:.1f} s"
    errors = Counter(error for stream in streams for error in stream.errors)
    if errors:
        measured += f"; errors: {errors.most_common(2)}"
    holds = same == len(streams) and (most_pause_s is None or pause_s <= most_pause_s)
    return Outcome(measured, holds)


async def signal_children(
    server: ServerProcess, module: str, number: int, times: int, streams: list[Stream]
) -> None:
    """Sends the signal `number` to the process that runs `module`, some times, each time after every stream has
    gone on since the last time, and a random number of further tokens: each pause is of one signal."""
    draws = random.Random(1)
    for _ in range(times):
        await _until_more(streams, draws.randint(len(streams) // 2, 2 * len(streams)))
        child = await _newest(server.pid, module)
        os.kill(child, number)
        await _until_gone(child)
        while await _newest(server.pid, module) == child:
            await asyncio.sleep(0.05)
        await _until_all_went_on(
            streams
        )  # what was on its way from the old process has come by now


async def _until_all_went_on(streams: list[Stream]) -> None:
    waiting = {index: len(stream.token_ids) for index, stream in enumerate(streams)}
    while waiting:
        for index, count in list(waiting.items()):
            stream = streams[index]
            if len(stream.token_ids) > count or stream.reason or stream.errors:
                del waiting[index]
        await asyncio.sleep(0.01)


async def _until_more(streams: list[Stream], count: int) -> None:
    before = sum(len(stream.token_ids) for stream in streams)
    while sum(len(stream.token_ids) for stream in streams) < before + count:
        if all(stream.reason or stream.errors for stream in streams):
            raise RuntimeError("All streams had ended before the last fault; ask for more tokens.")
        await asyncio.sleep(0.01)


async def _until_gone(pid: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            await asyncio.sleep(0.05)


async def _newest(server_pid: int, module: str) -> int:
    while True:
        found = []
        for process in psutil.Process(server_pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if module in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                    found.append((process.create_time(), process.pid))
        if found:
            return max(found)[1]
        await asyncio.sleep(0.05)
