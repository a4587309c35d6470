# SPDX-License-Identifier: Apache-2.0
"""Two engines with their workers in one directory on a real disk, with a quota that both run into."""

from __future__ import annotations

import random
import select
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from small_objects import small_manifest

from pagoda.ipc.clock import VirtualClock
from pagoda.kv.block_pool import BlockPool
from pagoda.kv.connector import CachedBlock, PrefixRequest
from pagoda.kv.plugin import TierContext
from pagoda.kv.post import TierPost
from pagoda.kv.transfers import TransferLedger
from pagoda.messages.transfers import TierBlocks, TierPlace, TransferEnd
from pagoda.messages.worker_config import KVTierConfig
from pagoda.plugins.disk_tier.directory import MIN_TOUCHES
from pagoda.plugins.disk_tier.objects import ObjectError, ObjectFiles, open_directory, parse_name
from pagoda.plugins.disk_tier.tier import open_tier

QUOTA_BLOCKS = 40


class Server:
    """An engine, its workers and its requests, each for one of 80 blocks."""

    def __init__(self, seed: int, files: ObjectFiles) -> None:
        self.files = files
        self.dice = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.buffer = files.new_buffer()
        self.clock = VirtualClock()
        self.pool = BlockPool(64)
        self.ledger = TransferLedger(self.pool)
        place = TierPlace("disk", str(files.directory), files.object_bytes)
        config = KVTierConfig("/kv", QUOTA_BLOCKS * files.object_bytes, {MIN_TOUCHES: 1})
        self.tier = open_tier(
            TierContext(
                config, (place,), self.ledger, self.clock, None, None, time.time(), TierPost()
            )
        )
        self.poller = select.poll()
        self.poller.register(self.tier.pollables()[0], select.POLLIN)

    def poll(self) -> None:
        assert self.poller.poll(30_000), "no news"
        self.tier.poll()

    def serve(self) -> None:
        while not self.tier.load_report().is_indexed:
            self.poll()
        for number in range(400):
            key = self.dice.randrange(1, 80).to_bytes(1) * 32
            prefix = PrefixRequest(str(number), [key], [])
            self.tier.on_queued(prefix, 0)
            while self.tier.lookup(prefix, 0) is None:
                self.poll()
            (block,) = self.pool.allocate(1)
            if self.tier.lookup(prefix, 0):
                self.tier.load(prefix, 0, [block], -1)
            else:
                self.pool.publish(block, key, None, [])
                self.tier.save([CachedBlock(block, key, None, [])])
            self.work()
            self.pool.release([block])
            self.clock.advance_to(self.clock.now() + 1)
        self.tier.close()

    def work(self) -> None:
        for transfer in self.ledger.drain():
            is_store = isinstance(transfer.target, TierBlocks)
            (key,) = (transfer.target if is_store else transfer.source).keys
            failed = []
            payload = self.files.payload(self.buffer)
            try:
                if is_store:
                    payload[:] = content(self.files, key)
                    self.files.write(key, self.buffer)
                else:
                    self.files.read(key, self.buffer)
                    assert payload == content(self.files, key)
                self.counts["stored" if is_store else "loaded"] += 1
            except ObjectError:
                failed = [0]
            end = TransferEnd(transfer.transfer_id, transfer.generation, failed, "gone")
            assert self.ledger.close(end)


def content(files: ObjectFiles, key: bytes) -> bytes:
    return key * (files.payload_bytes // 32)


def test_two_servers_write_and_evict_in_one_directory(tmp_path: Path) -> None:
    manifest = small_manifest(64 * 1024)
    files = ObjectFiles(open_directory(tmp_path, manifest), manifest)
    servers = [Server(seed, files) for seed in (1, 2)]
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(Server.serve, servers))
    for server in servers:
        assert server.counts["loaded"] > 50
        assert server.counts["stored"] > 40
    buffer = files.new_buffer()
    objects = [path for path in files.directory.glob("??/*") if not path.name.startswith(".")]
    for path in objects:
        key = parse_name(path.parent.name, path.name)
        assert key is not None
        files.read(key, buffer)
        assert files.payload(buffer) == content(files, key)
    assert len(objects) <= 2 * QUOTA_BLOCKS  # each keeps the quota with what it knows
    assert not list(files.directory.glob("??/.tmp-*"))
