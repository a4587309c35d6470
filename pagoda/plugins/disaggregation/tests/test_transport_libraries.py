# SPDX-License-Identifier: Apache-2.0
"""Links over libraries: closing one waits for nobody, and who reads lets go of what it reads by.

The libraries are scripted first, and keep the promises of all transports where they are installed.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from pagoda.errors import TransportError
from pagoda.kv.memory import DirectMemory, Region
from pagoda.plugins.disaggregation.transport import mooncake, nixl
from pagoda.plugins.disaggregation.transport.base import MemorySpan
from pagoda.plugins.disaggregation.transport.mooncake import MooncakeDescriptor, MooncakeLink
from pagoda.plugins.disaggregation.transport.nixl import NixlDescriptor, NixlLink
from pagoda.plugins.disaggregation.transport.remote_memory import BatchedLink

REGION = Region(4096, 4096)
FAR = 1000.0


class Link(BatchedLink):
    """A link whose every read does what `during` says."""

    most_bytes = 64

    def __init__(self, during: Callable[[], None] = lambda: None) -> None:
        super().__init__([REGION])
        self.during = during
        self.num_releases = 0

    def _read(self, *_: object) -> None:
        self.during()

    def _release(self) -> None:
        self.num_releases += 1

    def read_some(self) -> None:
        self.read([MemorySpan(0, 0, 8, 0)], time.monotonic() + FAR)


def test_the_last_who_reads_lets_go_and_only_once() -> None:
    begun, is_closed = threading.Event(), threading.Event()

    def read() -> None:
        begun.set()
        assert is_closed.wait(20)

    link = Link(read)
    with ThreadPoolExecutor(2) as pool:
        readings = [pool.submit(link.read_some) for _ in range(2)]
        assert begun.wait(20)
        link.close()
        link.close()
        assert link.num_releases == 0, "somebody reads still"
        is_closed.set()
        for reading in readings:
            with pytest.raises(TransportError, match="closed"):
                reading.result(20)
    assert link.num_releases == 1
    with pytest.raises(TransportError, match="closed"):
        link.read_some()
    link.close()
    assert link.num_releases == 1


def test_who_closes_what_nobody_reads_lets_go() -> None:
    link = Link()
    link.read_some()
    link.close()
    link.close()
    assert link.num_releases == 1


def test_closing_shortens_patience_and_never_lengthens_it() -> None:
    link = Link()
    assert link.shortened(FAR, 3) == FAR
    link.close()
    now = time.monotonic()
    assert now - 1 < link.shortened(now + FAR, 3) <= now + 3
    assert link.shortened(now - FAR, 3) == now - FAR


class Agent:
    """An agent of NIXL with a read that ends when the test says so."""

    def __init__(self) -> None:
        self.begun, self.is_over = threading.Event(), threading.Event()

    def transfer(self, _handle: object) -> str:
        self.begun.set()
        return "PROC"

    def check_xfer_state(self, _handle: object) -> str:
        return "DONE" if self.is_over.is_set() else "PROC"

    def __getattr__(self, name: str) -> Any:
        return lambda *_args: SimpleNamespace(release=lambda: None)


@pytest.mark.parametrize("ends", [True, False])
def test_closing_a_link_of_nixl(ends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing waits for nobody; a read that does not end by itself is given up, and its agent kept."""
    monkeypatch.setattr(nixl, "_FAREWELL_S", FAR if ends else 0.01)
    agent, abandoned = Agent(), list[Any]()
    library = SimpleNamespace(nixl_agent_config=lambda **_: None, nixl_agent=lambda *_: agent)
    descriptor = msgspec.msgpack.encode(NixlDescriptor(b"", [REGION]))
    memory = DirectMemory((REGION,), "DRAM", 0, lambda: None)
    link = NixlLink(library, memory, descriptor, time.monotonic() + FAR, abandoned)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(link.read, [MemorySpan(0, 0, 8, 0)], time.monotonic() + FAR)
        assert agent.begun.wait(20)
        link.close()
        if ends:
            assert link.agent is not None, "it is read by still"
            agent.is_over.set()
        with pytest.raises(TransportError, match="closed" if ends else "too long"):
            reading.result(20)
    assert link.agent is None
    assert abandoned == ([] if ends else [agent])


class Engine:
    """An engine of Mooncake: a read ends when the test says so, with a status."""

    def __init__(self, status: int) -> None:
        self.status = status
        self.begun, self.is_over = threading.Event(), threading.Event()
        self.registered: set[int] = set()

    def register_memory(self, address: int, _num_bytes: int) -> int:
        self.registered.add(address)
        return 0

    def unregister_memory(self, address: int) -> int:
        self.registered.remove(address)
        return 0

    def batch_transfer_sync_read(self, *_args: object) -> int:
        self.begun.set()
        assert self.is_over.wait(20)
        return self.status


@pytest.mark.parametrize("status", [0, -1])
def test_closing_a_link_of_mooncake_waits_for_nobody(status: int) -> None:
    engine = Engine(status)
    abandoned = mooncake.AbandonedStaging()
    descriptor = msgspec.msgpack.encode(MooncakeDescriptor("host:1", [REGION]))
    link = MooncakeLink(engine, descriptor, abandoned)
    target = ctypes.create_string_buffer(8)
    span = MemorySpan(0, 0, 8, ctypes.addressof(target))
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(link.read, [span], time.monotonic() + FAR)
        assert engine.begun.wait(20)
        link.close()
        assert not reading.done()
        assert len(engine.registered) == 1, "it is written to still"
        engine.is_over.set()
        with pytest.raises(TransportError):
            reading.result(20)
    late = time.monotonic() + mooncake.LATE_WRITES_S
    assert len(engine.registered) == (1 if status else 0), "a read that failed may write later"
    abandoned.close_old(late - mooncake.LATE_WRITES_S)
    assert len(engine.registered) == (1 if status else 0)
    abandoned.close_old(late)
    assert not engine.registered


# ---- the libraries themselves, in processes that end without taking them down, which not all of them survive

_RUN = (
    "import os, sys, pytest; code = pytest.main(sys.argv[1:]); sys.stdout.flush(); os._exit(code)"
)


_EXPORT_ENDS = "not (test_closing_ends_a_read_under_way and export)"
"""UCX may end a process (`ucs_arbiter_group_is_empty`) that takes a door down while somebody reads; a worker does
so only when it ends itself."""


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("name", "chosen"), [("nixl", _EXPORT_ENDS), ("mooncake", "")])
def test_an_extra_keeps_the_promises_of_all_transports(name: str, chosen: str) -> None:
    _run("test_transports.py", name, chosen, {"PAGODA_TEST_TRANSPORT": name})


@pytest.mark.timeout(240)
def test_nixl_moves_memory_by_its_kind() -> None:
    _run("test_nixl_memory.py", "nixl", "", {"PAGODA_TEST_NIXL": "real"})


def _run(file: str, name: str, chosen: str, variables: dict[str, str]) -> None:
    """Runs tests of a file beside this one with a library, in a process of their own."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed: pip install 'pagoda-llm[{name}]'")
    tests = str(Path(__file__).parent / file)
    options = ["-v", "-rs", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", chosen]
    done = subprocess.run(
        [sys.executable, "-c", _RUN, tests, *options],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=220,
    )
    said = done.stdout[-8000:]
    reasons = [line for line in said.splitlines() if line.startswith("SKIPPED")]
    if reasons:
        pytest.skip(reasons[0])
    assert done.returncode == 0, said
    assert " passed" in said
