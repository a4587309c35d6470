# SPDX-License-Identifier: Apache-2.0
"""A prefix of sixteen blocks, and what tests of tiers need around it."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagoda.kv.block_pool import BlockPool
from pagoda.kv.connector import CachedBlock, PrefixRequest
from pagoda.messages.transfers import Transfer, TransferEnd
from pagoda.messages.worker import Capabilities, WorkerReady

BLOCK_SIZE = 4
READY = WorkerReady(
    capabilities=Capabilities(
        block_sizes=(BLOCK_SIZE,), max_batch_tokens=1, max_batch_seqs=1, max_model_len=1
    ),
    num_blocks=64,
    block_size=BLOCK_SIZE,
    max_model_len=64,
    vocab_size=100,
    summary="",
    kv_host_slots=8,
)


def chain(count: int) -> list[bytes]:
    return [bytes([index]) * 32 for index in range(count)]


PREFIX = PrefixRequest("r", chain(16), list(range(64)))


def cached_blocks_of(
    pool: BlockPool, prefix: PrefixRequest, start: int, end: int
) -> list[CachedBlock]:
    """Blocks `start` to `end` of a prefix, which are cached on the device from then on."""
    cached_blocks = []
    for index in range(start, end):
        key, rank = prefix.keys[index], prefix.ranks.of(index)
        block = pool.find(key, rank)
        if block is None or block.rank != rank:
            (block,) = pool.allocate(1, rank)
            pool.publish(block, key)
            pool.release([block])
        parent = prefix.keys[index - 1] if index else None
        tokens = prefix.token_ids[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]
        cached_blocks.append(CachedBlock(block, key, parent, tokens))
    return cached_blocks


def end_of(transfer: Transfer, failed: list[int] | None = None, error: str = "") -> TransferEnd:
    return TransferEnd(transfer.transfer_id, transfer.generation, failed or [], error)


def mount(*arguments: str) -> None:
    """Skips the test if this user, or this system, cannot mount."""
    try:
        done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if done.returncode:
        pytest.skip(f"this user may not mount here: {done.stderr.strip()}")


@contextlib.contextmanager
def mounted(directory: Path, *arguments: str) -> Iterator[None]:
    mount(*arguments, str(directory))
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


@contextlib.contextmanager
def small_file_system(directory: Path, size: str) -> Iterator[Path]:
    directory.mkdir()
    with mounted(directory, "-t", "tmpfs", "-o", f"size={size}", "tmpfs"):
        yield directory
