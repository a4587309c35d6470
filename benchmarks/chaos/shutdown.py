"""SIGTERM under load, and SIGKILL of each process of a server: what is answered, and what is left behind."""

from __future__ import annotations

import asyncio
import signal

import aiohttp
import psutil

from benchmarks.chaos.servers import Server, Stream, read_stream, seconds_until_gone, server
from benchmarks.chaos.trial import Outcome, Trial

_STREAMS = 16
_LIMIT_S = 2.0
_PATIENCE_S = 20.0
"""Seconds after which something that is left is taken to stay."""
_SIMULATED = ["--executor", "sim", "--sim-base-ms", "10"]
_QUIET = ["--log-level", "error"]


async def _load(target: Server, signal_after: int) -> list[Stream]:
    """Streams, of which each has so many events when the server gets SIGTERM."""
    streams = [Stream() for _ in range(_STREAMS)]
    async with aiohttp.ClientSession() as session:
        reading = [
            asyncio.ensure_future(
                read_stream(session, target.url, stream, prompt=f"Story {number}:", seed=number)
            )
            for number, stream in enumerate(streams)
        ]
        while any(stream.num_events < signal_after and not stream.error for stream in streams):
            await asyncio.sleep(0.005)
        target.process.send_signal(signal.SIGTERM)
        await asyncio.gather(*reading)
    return streams


def _terminate(flags: list[str], number: int) -> tuple[int, int, list[str]]:
    """Complete streams, the exit status, and what is left, of one server that gets SIGTERM under load."""
    with server([*flags, *_QUIET]) as target:
        family = target.family()
        streams = asyncio.run(_load(target, 1 + number % 8))
        status = target.process.wait()
        return sum(stream.is_complete for stream in streams), status, target.left(family)


def _run_sigterm(short: bool) -> Outcome:
    rounds = 1 if short else 30
    results = [_terminate(_SIMULATED if short else [], number) for number in range(rounds)]
    complete = sum(result[0] for result in results)
    statuses = {result[1] for result in results}
    left = [name for result in results for name in result[2]]
    measured = (
        f"{complete} of {rounds * _STREAMS} requests complete in {rounds} rounds; exit status "
        f"{', '.join(map(str, sorted(statuses)))}; left behind: {', '.join(left) or 'nothing'}"
    )
    return Outcome(measured, complete == rounds * _STREAMS and statuses == {0} and not left)


async def _busy(target: Server, victim: psutil.Process) -> None:
    """The victim gets SIGKILL while streams come."""
    streams = [Stream() for _ in range(4)]
    async with aiohttp.ClientSession() as session:
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


def _run_sigkill(short: bool) -> Outcome:
    flags, rounds = (_SIMULATED, 1) if short else ([], 30)
    seconds = {"the frontend": [_kill_frontend(flags) for _ in range(rounds)]}
    seconds["an engine"] = [
        _kill_child(flags, "pagoda.engine.main") for _ in range(1 + rounds // 10)
    ]
    if not short:
        ranks = ["--tp", "2"]
        seconds["a rank"] = [_kill_child(ranks, "pagoda.worker.main") for _ in range(rounds // 10)]
    longest = max(max(each) for each in seconds.values())
    counted = ", ".join(f"{len(each)} times {victim}" for victim, each in seconds.items())
    measured = f"{counted}: nothing left after {longest:.2f} s at most"
    # How long it takes is no matter of the short form, which also runs on busy machines.
    return Outcome(measured, longest <= (_PATIENCE_S if short else _LIMIT_S))


SIGTERM = Trial(
    "sigterm",
    f"SIGTERM while {_STREAMS} streams come, 30 rounds",
    "every accepted request completes, exit status 0, nothing left behind",
    _run_sigterm,
    limit_s=1800.0,
)
SIGKILL = Trial(
    "sigkill",
    "SIGKILL of the frontend under load, 30 rounds; of engines and ranks, and of their server right after",
    "no process, socket, directory or shared memory left after 2 s",
    _run_sigkill,
    limit_s=1800.0,
)
