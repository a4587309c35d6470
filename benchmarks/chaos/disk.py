"""The tier on disk fails under load: it is full, read-only, hangs, or its directory goes."""

from __future__ import annotations

import asyncio
import shutil
import signal
import tempfile
import time
from pathlib import Path

import aiohttp

from benchmarks.chaos.servers import Server, Stream, read_stream, server
from benchmarks.chaos.trial import Outcome, Trial
from pagoda.kv.tiered_connector import LOAD_TIMEOUT_S

_FAULTS = {
    "full": "disk.write:enospc",
    "read-only": "disk.write:erofs",
    "hangs writing": "disk.write:hang@3+",
    "hangs reading": "disk.read:hang@3+",
    "gone": "",
}
"""Schedules of `PAGODA_FAULTS`."""
_CLIENTS = 4
_PROMPTS = 12
"""Prompts of some 30 blocks each: the device holds a quarter of them."""
_DEVICE = ["--dtype", "float32", "--block-size", "16", "--num-kv-blocks", "96"]
_DEVICE += ["--max-model-len", "768", "--log-level", "error"]
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


def _serve(
    flags: list[str], schedule: str, rounds: int, gone: Path | None
) -> tuple[list[Stream], int, float]:
    """The streams of a server, its exit status, and the seconds that it took to end."""
    environment = {"PAGODA_TESTING": "1", "PAGODA_FAULTS": schedule} if schedule else {}
    with server([*_DEVICE, *flags], environment=environment) as target:
        streams = asyncio.run(_ask(target, rounds, gone))
        target.process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        status = target.process.wait()
        return streams, status, time.monotonic() - began


def _run(short: bool) -> Outcome:
    rounds = 2 if short else 4
    expected = [stream.text for stream in _serve([], "", 1, None)[0]]
    parts, holds = [], True
    for name, schedule in _FAULTS.items():
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
            streams, status, end_s = _serve(flags, schedule, rounds, gone)
        right = sum(
            stream.is_complete and stream.text == expected[number % _PROMPTS]
            for number, stream in enumerate(streams)
        )
        pause_s = max(stream.longest_pause_s for stream in streams)
        parts.append(
            f"{name}: {right} of {len(streams)} right, pause {pause_s:.1f} s, ended in {end_s:.1f} s"
        )
        in_time = short or (pause_s <= _PAUSE_S and end_s <= _END_S)
        holds = holds and right == len(streams) and status == 0 and in_time
    return Outcome("; ".join(parts), holds)


DISK = Trial(
    "disk",
    "the disk tier is full, read-only, hangs while it writes or reads, or its directory goes, under load",
    f"every answer right, no pause beyond {_PAUSE_S:g} s, and the server ends as ever",
    _run,
    limit_s=1800.0,
)
