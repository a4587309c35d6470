# SPDX-License-Identifier: Apache-2.0
"""SIGTERM under load, and SIGKILL of each process of a server: what is answered, and what is left behind."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import psutil

from benchmarks.chaos.load import Load, load_of
from benchmarks.chaos.servers import (
    Server,
    Stream,
    ask_whole,
    read_stream,
    seconds_until_gone,
    server,
)
from benchmarks.chaos.trial import Outcome, Trial

_STREAMS, _QUEUED = 16, 12
_REQUESTS = _STREAMS + 1 + _QUEUED
"""All requests of a round: streams, a beam search, and requests in one piece."""
_SEATS = _STREAMS + 2
"""Places in the batch: all streams have one, and two beams."""
_LEAST_WAITING = _QUEUED - 2
"""Requests in one piece may take the places of beams between two of their steps."""
_BEAM_SEARCH = {"use_beam_search": True, "n": 1, "best_of": 2}
_DRAINING = ["--max-num-seqs", str(_SEATS), "--drain-timeout", "120"]
_LIMIT_S = 2.0
_PATIENCE_S = 20.0
"""Seconds after which something that is left is taken to stay."""
_SIMULATED = ["--executor", "sim", "--sim-base-ms", "10"]
_QUIET = ["--log-level", "error"]


@dataclass(frozen=True)
class _Terminated:
    """A server that got SIGTERM under load."""

    num_complete: int
    """Complete answers, of streams and of requests in one piece."""
    faults: list[str]
    num_waiting: int
    """Requests that waited for a place in the batch when SIGTERM came."""
    was_searching: bool
    """The beam search had begun and was not over then."""
    status: int = 0
    left: Sequence[str] = ()


async def _load(target: Server, signal_after: int) -> _Terminated:
    """Streams, of which each has so many events when the server gets SIGTERM, a beam search that runs beside them,
    and requests in one piece that wait for both."""
    url, streams = target.url, [Stream() for _ in range(_STREAMS)]
    async with aiohttp.ClientSession() as session:
        reading = [
            asyncio.ensure_future(
                read_stream(
                    session, url, stream, prompt=f"Story {number}:", seed=number, max_tokens=300
                )
            )
            for number, stream in enumerate(streams)
        ]

        async def until_accepted(count: int) -> Load:
            """Returns when the engine has so many requests, or when a stream has ended too early."""
            load = await asyncio.to_thread(load_of, url)
            while load.num_running + load.num_waiting < count and not any(
                task.done() for task in reading
            ):
                load = await asyncio.to_thread(load_of, url)
            return load

        await until_accepted(_STREAMS)
        search = asyncio.ensure_future(ask_whole(session, url, max_tokens=200, **_BEAM_SEARCH))
        await until_accepted(_STREAMS + 1)
        queued = [
            asyncio.ensure_future(ask_whole(session, url, prompt=f"Poem {number}:"))
            for number in range(_QUEUED)
        ]
        load = await until_accepted(_STREAMS + _QUEUED + 1)
        while any(stream.num_events < signal_after and not stream.error for stream in streams):
            await asyncio.sleep(0.005)
        was_searching = not search.done()
        target.process.send_signal(signal.SIGTERM)
        await asyncio.gather(*reading)
        faults = [
            stream.error or "a stream was cut" for stream in streams if not stream.is_complete
        ]
        faults += filter(None, await asyncio.gather(search, *queued))
    return _Terminated(_REQUESTS - len(faults), faults, load.num_waiting, was_searching)


def _terminate(flags: list[str], number: int) -> _Terminated:
    with server([*flags, *_DRAINING, *_QUIET]) as target:
        family = target.family()
        ended = asyncio.run(_load(target, 1 + number % 8))
        status = target.process.wait()
        return replace(ended, status=status, left=target.left(family))


def _run_sigterm(short: bool) -> Outcome:
    rounds = 1 if short else 30
    results = [_terminate(_SIMULATED if short else [], number) for number in range(rounds)]
    complete = sum(result.num_complete for result in results)
    statuses = {result.status for result in results}
    left = [name for result in results for name in result.left]
    waiting = [result.num_waiting for result in results]
    searching = sum(result.was_searching for result in results)
    faults = [fault for result in results for fault in result.faults]
    measured = (
        f"{complete} of {rounds * _REQUESTS} requests complete in {rounds} rounds, with {searching} beam searches "
        f"under way and at least {min(waiting)} requests waiting; exit status "
        f"{', '.join(map(str, sorted(statuses)))}; left behind: {', '.join(left) or 'nothing'}"
    )
    holds = (
        not faults
        and statuses == {0}
        and not left
        and min(waiting) >= _LEAST_WAITING
        and searching == rounds
    )
    return Outcome("; ".join([measured, *faults[:2]]), holds)


async def _begin_upload(url: str) -> asyncio.StreamWriter:
    """An upload to the server's files that does not end."""
    address = urlsplit(url)
    _, writer = await asyncio.open_connection(address.hostname, address.port)
    head = 'Content-Disposition: form-data; name="file"; filename="half.jsonl"'
    body = f"--x\r\n{head}\r\n\r\n{'half of a line' * 10_000}"
    fields = f"Host: {address.netloc}\r\nContent-Type: multipart/form-data; boundary=x\r\n"
    request = f"POST /v1/files HTTP/1.1\r\n{fields}Content-Length: {2 * len(body)}\r\n\r\n{body}"
    writer.write(request.encode())
    await writer.drain()
    return writer


async def _busy(target: Server, victim: psutil.Process) -> None:
    """The victim gets SIGKILL while streams come and a file is uploaded."""
    streams = [Stream() for _ in range(4)]
    async with aiohttp.ClientSession() as session:
        upload = await _begin_upload(target.url)
        reading = [
            asyncio.ensure_future(read_stream(session, target.url, stream, max_tokens=400))
            for stream in streams
        ]
        while any(stream.num_events < 2 and not stream.error for stream in streams):
            await asyncio.sleep(0.005)
        victim.kill()
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        upload.close()


def _kill_frontend(flags: list[str]) -> float:
    with server([*flags, *_QUIET]) as target:
        family = target.family()
        asyncio.run(_busy(target, family[0]))
        target.process.wait()
        return seconds_until_gone(target, family, _PATIENCE_S)


def _kill_child(flags: list[str], module: str) -> float:
    """Kills a child under load, and then the server: nothing is left of both."""
    with server([*flags, *_QUIET]) as target:
        victim = target.child(module)
        family = target.family()
        asyncio.run(_busy(target, victim))
        family += target.family()
        target.process.kill()
        target.process.wait()
        return seconds_until_gone(target, family, _PATIENCE_S)


def _damage(directory: Path, flags: list[str]) -> list[str]:
    """Faults of what killed servers have left in their directories of KV and of files."""
    faults, kv = [], directory / "kv"
    if kv.exists():
        verify = [sys.executable, "-m", "pagoda", "kv", "verify", str(kv)]
        done = subprocess.run(verify, capture_output=True, text=True, check=False)
        if done.returncode:
            faults.append(f"pagoda kv verify: {(done.stdout + done.stderr).strip()[-200:]}")
        if not any(path.is_file() for path in kv.rglob("*")):
            faults.append("no block of KV was stored")
    with server([*flags, *_QUIET]):  # a start removes what was half-written
        names = {path.name for path in (directory / "files").iterdir()} - {"files.lock"}
        faults += [f"{name} is half-written" for name in sorted(names)]
    return faults


def _run_sigkill(short: bool) -> Outcome:
    rounds = 1 if short else 30
    with tempfile.TemporaryDirectory() as directory:
        flags = ["--files-dir", f"{directory}/files"]
        if short:
            flags += _SIMULATED
        else:
            flags += ["--kv-host-bytes", "8MiB", "--kv-disk-path", f"{directory}/kv"]
            flags += ["--kv-disk-bytes", "1GiB", "--num-kv-blocks", "256"]
        seconds = {"the frontend": [_kill_frontend(flags) for _ in range(rounds)]}
        seconds["an engine"] = [
            _kill_child(flags, "pagoda.engine.main") for _ in range(1 + rounds // 10)
        ]
        if not short:
            ranks = [*flags, "--tp", "2"]
            seconds["a rank"] = [
                _kill_child(ranks, "pagoda.worker.main") for _ in range(rounds // 10)
            ]
        faults = _damage(Path(directory), flags)
    longest = max(max(each) for each in seconds.values())
    counted = ", ".join(f"{len(each)} times {victim}" for victim, each in seconds.items())
    measured = f"{counted}: nothing left after {longest:.2f} s at most"
    measured += f"; half-written: {', '.join(faults) or 'nothing'}"
    # How long it takes is no matter of the short form, which also runs on busy machines.
    return Outcome(measured, not faults and longest <= (_PATIENCE_S if short else _LIMIT_S))


SIGTERM = Trial(
    "sigterm",
    f"SIGTERM while {_STREAMS} streams and a beam search run and {_QUEUED} requests in one piece wait, 30 rounds",
    "every accepted request completes, exit status 0, nothing left behind",
    _run_sigterm,
    limit_s=1800.0,
)
SIGKILL = Trial(
    "sigkill",
    "SIGKILL of the frontend under load, with KV tiers and an upload under way, 30 rounds; of engines and ranks, "
    "and of their server right after",
    "no process, socket, directory or shared memory left after 2 s; no object of KV damaged, no half of an upload "
    "left by the next start",
    _run_sigkill,
    limit_s=1800.0,
)
