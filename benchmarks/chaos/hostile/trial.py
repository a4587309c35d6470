# SPDX-License-Identifier: Apache-2.0
"""Every attack by one client, while eight good ones stream.

`python -m benchmarks.chaos.hostile.trial [NAME...]` prints the longest pause of the streams during each attack.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import aiohttp
import psutil

from benchmarks.chaos.hostile.client import NOTHING
from benchmarks.chaos.trial import Outcome, Trial
from pagoda.cli import output
from pagoda.cli.server_process import server_process
from pagoda.concurrency.event_loop import run

_SIMULATED = [
    *("--executor", "sim", "--sim-base-ms", "5", "--max-num-seqs", "128"),
    *("--max-model-len", "262144", "--num-kv-blocks", "400000"),
]
_STREAMS = 8
_TAIL_S = 0.1
_SETTLING_S = 3.0
_MOST_MORE_S = 0.1
_MOST_GROWN_MB = 64.0
_PLAIN = {"prompt": "x", "max_tokens": 200_000, "ignore_eos": True, "stream": True}


class Pause(NamedTuple):
    """Time between two events of a stream, on the clock `time.monotonic`."""

    began: float
    ended: float


@dataclass(frozen=True)
class Row:
    """An attack and what it did."""

    name: str
    seconds: float
    """Time until the answer."""
    longest_s: float
    """The longest pause of a good stream from the beginning to a tenth of a second behind the end."""
    wrong: str
    """Fault of the answer; empty if it is right."""


@dataclass(frozen=True)
class Measured:
    quiet_s: float
    """The longest pause without attacks."""
    rows: Sequence[Row]
    broken: Sequence[str]
    """Errors of good streams."""
    grown_mb: float
    """Memory that the frontend has more afterwards."""

    @property
    def slow(self) -> list[Row]:
        return [row for row in self.rows if row.longest_s > self.quiet_s + _MOST_MORE_S]

    @property
    def wrong(self) -> list[Row]:
        return [row for row in self.rows if row.wrong]


async def _stream(
    session: aiohttp.ClientSession,
    number: int,
    pauses: list[Pause],
    heard_at: dict[int, float],
    broken: list[str],
) -> None:
    """Reads a good stream, and notes its pauses of more than 2 ms, and when it was heard last."""
    loop = asyncio.get_running_loop()
    try:
        async with session.post("/v1/completions", json=_PLAIN) as answer:
            async for line in answer.content:
                if b'"error"' in line:
                    raise ValueError(line.decode(errors="replace")[:200])
                if line.startswith(b"data: {"):
                    now = loop.time()
                    last = heard_at.get(number, now)
                    if now - last > 0.002:
                        pauses.append(Pause(last, now))
                    heard_at[number] = now
        broken.append(f"a stream ended with {answer.status}")
    except (aiohttp.ClientError, ValueError) as error:
        broken.append(f"{type(error).__name__}: {error}")


async def _measure(url: str, pid: int, arguments: Sequence[str]) -> Measured:
    pauses: list[Pause] = []
    heard_at: dict[int, float] = {}
    broken: list[str] = []
    rows: list[Row] = []
    limit = aiohttp.ClientTimeout(None)
    async with aiohttp.ClientSession(url, timeout=limit) as session:
        streams = [
            asyncio.create_task(_stream(session, number, pauses, heard_at, broken))
            for number in range(_STREAMS)
        ]
        await asyncio.sleep(_SETTLING_S)
        pauses.clear()
        before = psutil.Process(pid).memory_info().rss
        command = [sys.executable, "-m", "benchmarks.chaos.hostile.client", url, *arguments]
        pipe = asyncio.subprocess.PIPE
        client = await asyncio.create_subprocess_exec(*command, stdout=pipe, limit=2**20)
        if client.stdout is None:
            raise RuntimeError("The client has no output.")
        async for line in client.stdout:
            name, began, ended, wrong = json.loads(line)
            await asyncio.sleep(_TAIL_S)
            # Pauses that still last count as well.
            now = asyncio.get_running_loop().time()
            open_pauses = [Pause(last, now) for last in heard_at.values()]
            during = [
                p for p in (*pauses, *open_pauses) if p.ended > began and p.began < ended + _TAIL_S
            ]
            longest = max((p.ended - p.began for p in during), default=0.0)
            pauses.clear()
            rows.append(Row(name, ended - began, longest, wrong))
        if await client.wait():
            broken.append(f"the hostile client ended with status {client.returncode}")
        if len(heard_at) < _STREAMS:
            broken.append(f"{_STREAMS - len(heard_at)} good streams were never answered")
        after = psutil.Process(pid).memory_info().rss
        ended_early = list(broken)
        for stream in streams:
            stream.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await stream
    if not rows or rows[0].name != NOTHING:
        raise RuntimeError("The hostile client did not begin.")
    return Measured(rows[0].longest_s, rows[1:], ended_early, (after - before) / 2**20)


def measure_attacks(arguments: Sequence[str]) -> Measured:
    """Starts a server, eight good clients and a hostile one; `arguments` are those of the hostile one."""
    with server_process(_SIMULATED) as server:
        return run(_measure(server.base_url, server.pid, arguments))


def _run(short: bool) -> Outcome:
    found = measure_attacks(["--short"] if short else [])
    faults = [*found.broken]
    faults += [f"{row.name}: {row.wrong}" for row in found.wrong]
    if found.grown_mb > _MOST_GROWN_MB:
        faults.append(f"the frontend grew by more than {_MOST_GROWN_MB:g} MB")
    faults += [f"{row.name}: a pause of {1e3 * row.longest_s:.0f} ms" for row in found.slow]
    longest = max((row.longest_s for row in found.rows), default=0.0)
    said = (
        f"{len(found.rows)} attacks, {len(found.broken)} good streams broken; longest pause of these "
        f"{1e3 * longest:.0f} ms, {1e3 * found.quiet_s:.0f} ms without attacks; memory + {found.grown_mb:.0f} MB"
    )
    return Outcome("; ".join([said, *faults]), not faults)


HOSTILE = Trial(
    "hostile",
    "schemas, patterns, grammars, values, bodies, headers and connections that have broken servers, by one client "
    "while 8 good ones stream",
    "good clients: no error, largest gap at most 100 ms more; each attack gets the answer that is right; "
    f"the frontend has at most {_MOST_GROWN_MB:g} MB more memory",
    _run,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="parts of names of attacks")
    found = measure_attacks(parser.parse_args().names)
    rows = [
        (row.name, f"{row.seconds:.2f} s", f"{1e3 * row.longest_s:.0f} ms", row.wrong)
        for row in found.rows
    ]
    quiet = f"{1e3 * found.quiet_s:.0f} ms without attacks"
    title = f"{quiet}, memory + {found.grown_mb:.0f} MB, broken: {list(found.broken)}"
    output.stdout().print(
        output.table(title, ("attack", "answer after", "longest pause", "wrong"), rows)
    )


if __name__ == "__main__":
    main()
