# SPDX-License-Identifier: Apache-2.0
"""The index of a directory of a million KV blocks: how soon it answers, how long it takes, and what it weighs.

`python -m benchmarks.kv_index [DIRECTORY] [--objects N] [--cold]`. Makes the objects (empty files of the right
length), looks at them as an engine does that starts, in a process of its own, and removes them.
"""

from __future__ import annotations

import gc
import hashlib
import os
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import msgspec
import psutil
from cyclopts import App, Parameter

from benchmarks.figure import Figure
from pagoda.cli import output
from pagoda.cli.progress import progress
from pagoda.ipc.clock import MonotonicClock
from pagoda.kv.block_pool import BlockPool
from pagoda.kv.connector import PrefixRequest
from pagoda.kv.plugin import TierContext
from pagoda.kv.post import TierPost
from pagoda.kv.transfers import TransferLedger
from pagoda.messages.transfers import TierPlace
from pagoda.messages.worker_config import KVTierConfig
from pagoda.plugins.disk_tier.directory import MIN_TOUCHES
from pagoda.plugins.disk_tier.objects import FAN_OUTS, Manifest, object_name, open_directory
from pagoda.plugins.disk_tier.tier import open_tier

_OBJECTS = 1_000_000
_PREFIX_BLOCKS = 250
"""Blocks of a request: 4,000 tokens."""
_LOOKUP_INTERVAL_S = 0.1
_MANIFEST = Manifest(
    model="benchmark",
    model_digest="0",
    dtype="bfloat16",
    kv_dtype="bfloat16",
    quantization="none",
    arithmetic="",
    layout="",
    block_size=16,
    payload_bytes=2**20,
)

_app = App()


class Measured(msgspec.Struct):
    """Record that the looking process sends to the printing one."""

    first_lookup_s: float
    """Seconds from the start to the answer for a request whose blocks are all there."""
    lookups_s: list[float]
    """Seconds from the announcement of a request to the answer, ten times a second while the index was made."""
    indexed_s: float
    index_bytes: int
    polls_s: list[float]
    """Seconds for which each poll of updates held up the engine."""
    cpu_s: float


@_app.default
def main(
    directory: Path | None = None,
    /,
    *,
    objects: int = _OBJECTS,
    cold: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Measures.

    Args:
        directory: Where the objects are made and removed again.
        objects: How many.
        cold: Drop what the system knows of the files before; only root may.
    """
    with tempfile.TemporaryDirectory(dir=directory, prefix="kv-index-") as root:
        try:
            path = _make(Path(root), objects)
            if cold:
                os.sync()
                Path("/proc/sys/vm/drop_caches").write_text("3\n")
            command = [sys.executable, "-m", __spec__.name, "measure", str(path), str(objects)]
            printed = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
        finally:
            _remove(Path(root))
    figures = _figures(msgspec.json.decode(printed, type=Measured), objects)
    rows = [(figure.what, figure.measured, figure.target) for figure in figures]
    title = f"Index of {objects:,} blocks{', cold' if cold else ''}"
    output.stdout().print(output.table(title, ("what", "measured", "target"), rows))


def _figures(measured: Measured, objects: int) -> list[Figure]:
    command = "python -m benchmarks.kv_index"
    lookups, polls = sorted(measured.lookups_s), sorted(measured.polls_s)
    return [
        Figure(
            "first lookup answered", f"{1000 * measured.first_lookup_s:.1f} ms", "at once", command
        ),
        Figure(
            f"lookups while indexing, {len(lookups)}",
            f"median {1000 * lookups[len(lookups) // 2]:.2f} ms, longest {1000 * lookups[-1]:.1f} ms",
            "",
            command,
        ),
        Figure("index complete", f"{measured.indexed_s:.1f} s", "≤ 20 s", command),
        Figure("CPU time for it", f"{measured.cpu_s:.1f} s", "", command),
        Figure(
            f"the engine held up by news, {len(polls)} times",
            f"median {1000 * polls[len(polls) // 2]:.2f} ms, longest {1000 * polls[-1]:.1f} ms",
            "",
            command,
        ),
        Figure("memory", f"{measured.index_bytes / objects:.0f} bytes a block", "≤ 200", command),
    ]


def _key(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()


def _make(root: Path, objects: int) -> Path:
    directory = open_directory(root, _MANIFEST)
    for fan_out in FAN_OUTS:
        (directory / fan_out).mkdir()
    used_at = time.time()
    with progress("Making objects", objects) as advance:
        for number in range(objects):
            path = f"{directory}/{object_name(_key(number))}"
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            os.ftruncate(descriptor, _MANIFEST.object_bytes)
            os.close(descriptor)
            age = number * 7919 % 1_000_000  # a use a second, for some days
            os.utime(path, (used_at - age, used_at - age))
            advance()
    return directory


def _remove(root: Path) -> None:
    parts = list(root.glob("*/*"))
    with progress("Removing objects", len(parts)) as advance:
        for part in parts:
            if part.is_dir():
                for entry in os.scandir(part):
                    os.unlink(entry.path)
                part.rmdir()
            advance()


@_app.command(show=False)
def measure(directory: Path, objects: int) -> None:
    """Looks at the objects as an engine does that starts."""
    process, clock = psutil.Process(), MonotonicClock()
    gc.collect()
    rss, cpu, started = process.memory_info().rss, process.cpu_times(), clock.now()
    place = TierPlace("disk", str(directory), _MANIFEST.object_bytes)
    config = KVTierConfig("/kv", 2 * objects * _MANIFEST.object_bytes, {MIN_TOUCHES: 2})
    ledger, epoch_s = TransferLedger(BlockPool(1)), time.time() - clock.now()
    tier = open_tier(TierContext(config, (place,), ledger, clock, None, None, epoch_s, TierPost()))
    poller = select.poll()
    (descriptor,) = tier.pollables()
    poller.register(int(str(descriptor)), select.POLLIN)
    lookups: list[float] = []
    polls: list[float] = []
    prefix, asked_at = _demand(0, objects), clock.now()
    tier.on_queued(prefix, 0)
    is_answered, first_lookup_s = False, 0.0
    while not tier.load_report().is_indexed:
        poller.poll()
        before = clock.now()
        tier.poll()
        now = clock.now()
        polls.append(now - before)
        if is_answered and now > asked_at + _LOOKUP_INTERVAL_S:
            prefix, asked_at, is_answered = _demand(len(lookups), objects), now, False
            tier.on_queued(prefix, 0)
        found = tier.lookup(prefix, 0)
        if not is_answered and found is not None:
            if found != _PREFIX_BLOCKS:
                raise RuntimeError(f"{found} of {_PREFIX_BLOCKS} blocks were found.")
            lookups.append(clock.now() - asked_at)
            first_lookup_s = first_lookup_s or clock.now() - started
            tier.on_dequeued(prefix.request_id)
            is_answered = True
    indexed_s, after = clock.now() - started, process.cpu_times()
    gc.collect()
    measured = Measured(
        first_lookup_s=first_lookup_s,
        lookups_s=lookups,
        indexed_s=indexed_s,
        index_bytes=process.memory_info().rss - rss,
        polls_s=polls,
        cpu_s=after.user + after.system - cpu.user - cpu.system,
    )
    if tier.load_report().num_blocks != objects:
        raise RuntimeError(f"{tier.load_report().num_blocks} of {objects} blocks are indexed.")
    tier.close()
    sys.stdout.buffer.write(msgspec.json.encode(measured))


def _demand(number: int, objects: int) -> PrefixRequest:
    first = number * 7 * _PREFIX_BLOCKS
    keys = [_key((first + index) % objects) for index in range(_PREFIX_BLOCKS)]
    return PrefixRequest(str(number), keys, [])


if __name__ == "__main__":
    _app()
