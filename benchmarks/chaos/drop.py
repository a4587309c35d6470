# SPDX-License-Identifier: Apache-2.0
"""Clients that drop their connections, never read, or never finish a request, beside a few that behave.

What an engine computes for clients that never read makes its steps as long as for clients that read: as many of
these ask the same before, and times between tokens are compared with those beside them.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from subprocess import PIPE, Popen

from benchmarks.chaos.good_streams import Seen, good_streams
from benchmarks.chaos.load import load_of
from benchmarks.chaos.processes import ended
from benchmarks.chaos.trial import Outcome, Trial
from benchmarks.chaos.vitals import vitals
from pagoda.cli.server_process import ServerProcess, server_process

_GOOD = 4
"""Streams whose tokens are timed."""
_GOOD_TOKENS = 200
_FREED_S = 1.0
_LARGEST_GROWTH = 1.05
_LARGEST_ITL_RATIO = 1.2
_READING, _NEVER_READ = "reading", "never-read"
_LEAST_COMPUTED = 0.1
"""Least share of them that must be computed: those that wait for a place until they are aborted try nothing."""
_LEAST_GAPS = 100
"""Least number of times between events, beside each kind of rude clients, that say anything."""
_HIGHEST_WAIT_S = 120.0
"""The longest wait for what should take a second, or for connections that should be closed after 75 seconds."""


@dataclass(frozen=True)
class _Server:
    name: str
    arguments: tuple[str, ...]
    drop_rate: float
    """Clients a second that the server answers without a queue, with the clients on the same two cores."""
    stay_rate: float


_SERVERS = (
    _Server("simulated", ("--executor", "sim", "--sim-base-ms", "50"), 100.0, 20.0),
    # Few blocks, so that those before the measurement have touched all memory of the cache.
    _Server("pagoda-tiny", ("--num-kv-blocks", "1024", "--max-num-seqs", "16"), 25.0, 20.0),
)


@dataclass(frozen=True)
class _Sizes:
    """Numbers of clients, and the seconds for which good streams are watched before."""

    drop: int
    never_read: int
    half_open: int
    baseline_s: float
    computed_s: float
    """The longest wait until the answers of clients that stay are computed."""
    waits_for_close: bool
    """Waits until the server has closed half-open connections itself."""

    def before(self) -> _Sizes:
        """Clients that come before memory is measured: a tenth as many that drop, and as many at a time."""
        return replace(self, drop=self.drop // 10, baseline_s=0.0, waits_for_close=False)


_FULL = _Sizes(10_000, 500, 1_000, 30.0, 120.0, waits_for_close=True)
_SHORT = _Sizes(60, 6, 10, 0.5, 0.5, waits_for_close=False)


@dataclass
class _Findings:
    freed_s: float = 0.0
    """The longest time from the last client of a kind to a server with nothing but the good streams' requests."""
    itl: dict[str, Seen] = field(default_factory=dict)
    """Figures of good streams by the kind of rude clients; without these, under the empty name."""
    growth: float = 0.0
    """Memory in the end, of that before."""
    computed: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Answers that were computed to their end while their clients stayed, of how many, by the kind of clients."""
    faults: list[str] = field(default_factory=list)


@contextmanager
def _rude(url: str, kind: str, clients: int, rate: float, seed: int) -> Iterator[Popen[bytes]]:
    command = [sys.executable, "-m", "benchmarks.chaos.rude_clients", url, kind]
    command += ["--clients", str(clients), "--rate", str(rate), "--seed", str(seed)]
    with ended(Popen(command, stdin=PIPE, stdout=PIPE)) as process:
        yield process


def _end_of(process: Popen[bytes], faults: list[str]) -> None:
    """Lets the clients leave, and waits until all have."""
    told, _ = process.communicate()
    end = json.loads(told.splitlines()[-1])
    if end["failures"]:
        faults.append(f"{len(end['failures'])} connections failed, one by {end['failures'][0]}")


def _freed_after(url: str, others: int) -> float:
    """Seconds until no more requests than `others` run and none waits; without others, all blocks are free."""
    began = time.monotonic()
    while True:
        load, waited = load_of(url), time.monotonic() - began
        is_rest = load.num_running <= others and load.num_waiting == 0
        if (is_rest and (others or load.num_free_blocks == load.num_blocks)) or (
            waited > _HIGHEST_WAIT_S
        ):
            return waited
        time.sleep(0.02)


def _storm(
    server: ServerProcess, rates: _Server, sizes: _Sizes, good: Callable[[], Seen], seed: int
) -> _Findings:
    """All kinds of rude clients, one kind after the other."""
    url, found = server.base_url, _Findings()
    stays = (
        (_READING, sizes.never_read),
        (_NEVER_READ, sizes.never_read),
        ("half-open", sizes.half_open),
    )
    good()
    with _rude(url, "drop", sizes.drop, rates.drop_rate, seed) as process:
        _end_of(process, found.faults)
        found.freed_s = _freed_after(url, _GOOD)
    found.itl["drop"] = good()
    for kind, clients in stays:
        descriptors = vitals(server.pid)["frontend"].num_descriptors
        with _rude(
            url, kind, clients, rates.stay_rate * (5 if kind == "half-open" else 1), seed
        ) as process:
            _check_held(process, kind, clients, found.faults)
            if kind != "half-open":
                found.computed[kind] = _computed_of(url, clients, sizes.computed_s), clients
            if kind == "half-open" and sizes.waits_for_close:
                _wait_closed(server, descriptors, found.faults)
            _end_of(process, found.faults)
            found.freed_s = max(found.freed_s, _freed_after(url, _GOOD))
        found.itl[kind] = good()
    return found


def _check_held(process: Popen[bytes], kind: str, clients: int, faults: list[str]) -> None:
    """Returns when all clients have come."""
    told = b"" if process.stdout is None else process.stdout.readline()
    held = json.loads(told or b'{"held": 0}')["held"]
    if held < clients:
        faults.append(f"{held} of {clients} {kind} clients stay")


def _computed_of(url: str, clients: int, limit_s: float) -> int:
    """Answers of clients that stay which are computed to their end: all, or as many as are within `limit_s`."""
    deadline = time.monotonic() + limit_s
    while True:
        load = load_of(url)
        open_requests = max(0, load.num_running + load.num_waiting - _GOOD)
        if not open_requests or time.monotonic() > deadline:
            return max(0, clients - open_requests)
        time.sleep(0.1)


def _wait_closed(server: ServerProcess, descriptors: int, faults: list[str]) -> None:
    deadline = time.monotonic() + _HIGHEST_WAIT_S
    while vitals(server.pid)["frontend"].num_descriptors > descriptors + _GOOD:
        if time.monotonic() > deadline:
            faults.append("half-open connections stay")
            return
        time.sleep(1)


def _total_memory(server: ServerProcess) -> int:
    return sum(process.memory_bytes for process in vitals(server.pid).values())


def _try(rates: _Server, sizes: _Sizes) -> _Findings:
    with tempfile.TemporaryFile() as log:
        arguments = [*rates.arguments, "--any-model-name"]
        with server_process(arguments, stderr=log.fileno()) as server:
            url = server.base_url
            with good_streams(url, _GOOD, _GOOD_TOKENS) as good:
                _storm(server, rates, sizes.before(), good, seed=1)
            _freed_after(url, 0)
            time.sleep(sizes.baseline_s / 3)
            before = _total_memory(server)
            with good_streams(url, _GOOD, _GOOD_TOKENS) as good:
                time.sleep(1)
                good()
                time.sleep(sizes.baseline_s)
                quiet = good()
                found = _storm(server, rates, sizes, good, seed=2)
            found.itl[""] = quiet
            found.freed_s = max(found.freed_s, _freed_after(url, 0))
            time.sleep(sizes.baseline_s / 3)
            found.growth = _total_memory(server) / before
        log.seek(0)
        if b"Traceback" in log.read():
            found.faults.append("a traceback in the log")
    found.faults += [error for seen in found.itl.values() for error in seen.errors]
    return found


def _words(name: str, found: _Findings) -> str:
    quiet, reading = (found.itl[kind].p99_ms for kind in ("", _READING))
    ratios = ", ".join(
        f"{seen.p99_ms / quiet:.2f} × {kind}" for kind, seen in found.itl.items() if kind
    )
    ratios += "".join(
        f"; {done} of {clients} answers computed for {kind}"
        for kind, (done, clients) in found.computed.items()
    )
    ratios += f"; never-read {found.itl[_NEVER_READ].p99_ms / reading:.2f} × reading"
    told = f"; {'; '.join(found.faults)[:200]}" if found.faults else ""
    return (
        f"{name}: free within {found.freed_s:.2f} s; memory {found.growth - 1:+.1%}; "
        f"ITL p99 {quiet:.1f} ms before, {ratios}{told}"
    )


def _run(short: bool) -> Outcome:
    sizes, servers = (_SHORT, _SERVERS[:1]) if short else (_FULL, _SERVERS)
    found = {server.name: _try(server, sizes) for server in servers}
    holds = all(
        not one.faults
        and all(seen.gaps >= (1 if short else _LEAST_GAPS) for seen in one.itl.values())
        and one.freed_s <= (_HIGHEST_WAIT_S if short else _FREED_S)
        and (short or (one.growth <= _LARGEST_GROWTH and _itl_holds(one) and _is_computed(one)))
        for one in found.values()
    )
    return Outcome("; ".join(_words(name, one) for name, one in found.items()), holds)


def _is_computed(found: _Findings) -> bool:
    return all(done >= _LEAST_COMPUTED * clients for done, clients in found.computed.values())


def _itl_holds(found: _Findings) -> bool:
    quiet, reading = (found.itl[kind].p99_ms for kind in ("", _READING))
    limits = {_READING: math.inf, _NEVER_READ: _LARGEST_ITL_RATIO * max(quiet, reading)}
    usual = _LARGEST_ITL_RATIO * quiet
    return all(seen.p99_ms <= limits.get(kind, usual) for kind, seen in found.itl.items())


DROP = Trial(
    "drop",
    "10,000 clients that drop their connection before, in or behind their request or in its stream; 500 that "
    "never read; 1,000 half-open connections",
    "all blocks free within 1 s; memory at most 5 % above that before; ITL p99 of four other streams at most "
    "1.2 × that before, or that beside 500 clients that ask the same and read; no traceback in the log",
    _run,
)
