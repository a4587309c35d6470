# SPDX-License-Identifier: Apache-2.0
"""The tier on disk fails under load: it is full, read-only, hangs, or its directory goes."""

from __future__ import annotations

import asyncio
import shutil
import signal
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from benchmarks.chaos.injected import check_faults
from benchmarks.chaos.load import load_of
from benchmarks.chaos.servers import Server, Stream, read_stream, server
from benchmarks.chaos.trial import Outcome, Trial
from pagoda.faults.schedule import FAULTS_ENV, TESTING_ENV
from pagoda.kv.tiered_connector import LOAD_TIMEOUT_S

_FAULTS = {
    "full": ("disk.write:enospc", 0),
    "read-only": ("disk.write:erofs", 0),
    "hangs writing": ("disk.write:hang@3+", 0),
    "hangs reading": ("disk.read:hang@3+", 100),
    "gone": ("", 100),
}
"""Schedules of `PAGODA_FAULTS`, and the least number of blocks that the tier stores in spite of them, of some
400: none where writes fail."""
_CLIENTS = 4
_PROMPTS = 12
"""Prompts of some 30 blocks each: the device holds a quarter of them."""
_DEVICE = ["--dtype", "float32", "--block-size", "16", "--num-kv-blocks", "96"]
_DEVICE += ["--max-model-len", "768", "--log-level", "warning"]
_PAUSE_S = LOAD_TIMEOUT_S + 5.0
_END_S = 15.0
"""Seconds that the server may take to end: it waits for threads that the disk keeps, for 5 s."""


def _prompt(number: int) -> str:
    return f"Story {number}: " + " ".join(f"{number * step % 97}" for step in range(150))


async def _ask(target: Server, rounds: int, directory: Path | None) -> list[Stream]:
    """Each prompt once a round; the directory is removed in the second round, if there is one."""
    streams = [Stream() for _ in range(rounds * _PROMPTS)]
    room = asyncio.Semaphore(_CLIENTS)

    async def ask(number: int, stream: Stream) -> None:
        async with room:
            if number == _PROMPTS * 3 // 2 and directory is not None:
                await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
            prompt = _prompt(number % _PROMPTS)
            await read_stream(session, target.url, stream, prompt=prompt, max_tokens=8)

    async with aiohttp.ClientSession() as session:
        await asyncio.gather(*(ask(number, stream) for number, stream in enumerate(streams)))
    return streams


@dataclass(frozen=True)
class _Served:
    streams: list[Stream]
    num_stored: int
    """Blocks that the tier on disk had stored in the end."""
    status: int
    """The exit status."""
    end_s: float
    """Seconds that the server took to end."""


def _serve(flags: list[str], schedule: str, rounds: int, gone: Path | None) -> _Served:
    """Raises RuntimeError: a fault of the schedule has not come."""
    environment = {FAULTS_ENV: schedule, TESTING_ENV: "1"} if schedule else {}
    with (
        tempfile.TemporaryFile() as log,
        server([*_DEVICE, *flags], environment=environment, stderr=log.fileno()) as target,
    ):
        streams = asyncio.run(_ask(target, rounds, gone))
        tiers = load_of(target.url).tiers
        target.process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        status = target.process.wait()
        end_s = time.monotonic() - began
        check_faults(schedule, log)
    num_stored = sum(tier.num_stored for tier in tiers if tier.name == "disk")
    return _Served(streams, num_stored, status, end_s)


def _run(short: bool) -> Outcome:
    rounds = 2 if short else 4
    expected = [stream.text for stream in _serve([], "", 1, None).streams]
    parts, holds = [], True
    for name, (schedule, least_stored) in _FAULTS.items():
        if short and name not in ("full", "gone"):
            continue
        with tempfile.TemporaryDirectory(dir="/tmp") as directory:
            path = Path(directory) / "kv"
            flags = [
                "--kv-disk-path",
                str(path),
                "--kv-disk-bytes",
                "1GiB",
                "--kv-disk-min-touches",
                "1",
            ]
            gone = path if name == "gone" else None
            served = _serve(flags, schedule, rounds, gone)
        streams, end_s = served.streams, served.end_s
        right = sum(
            stream.is_complete and stream.text == expected[number % _PROMPTS]
            for number, stream in enumerate(streams)
        )
        pause_s = max(stream.longest_pause_s for stream in streams)
        parts.append(
            f"{name}: {right} of {len(streams)} right, {served.num_stored} blocks stored, "
            f"pause {pause_s:.1f} s, ended in {end_s:.1f} s"
        )
        in_time = short or (pause_s <= _PAUSE_S and end_s <= _END_S)
        was_used = served.num_stored >= least_stored
        holds = holds and right == len(streams) and served.status == 0 and in_time and was_used
    return Outcome("; ".join(parts), holds)


DISK = Trial(
    "disk",
    "the disk tier is full, read-only, hangs while it writes or reads, or its directory goes, under load",
    f"every answer right, no pause beyond {_PAUSE_S:g} s, and the server ends as ever",
    _run,
    limit_s=1800.0,
)
