"""Two engines with their workers in one directory: real processes, a real disk, a quota that both run into."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec

from pagoda.kv.objects import Manifest, ObjectFiles, open_directory, parse_name

QUOTA_BLOCKS = 40
SERVER = """
import random
import select
import sys
import time
from pathlib import Path

import msgspec

from pagoda.messages.transfers import DiskObjects, KVDirectory, TransferEnd
from pagoda.ipc.clock import VirtualClock
from pagoda.kv.block_pool import BlockPool
from pagoda.kv.connector import PrefixRequest, CachedBlock
from pagoda.kv.disk_tier import DiskTier
from pagoda.kv.disk_scanner import DiskScanner
from pagoda.kv.objects import ObjectFiles
from pagoda.kv.objects import Manifest, ObjectError
from pagoda.kv.transfers import TransferLedger

seed, directory, quota = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
manifest = msgspec.json.decode(sys.argv[4], type=Manifest)
files = ObjectFiles(directory, manifest)
buffer = files.new_buffer()
clock = VirtualClock()
pool = BlockPool(64)
ledger = TransferLedger(pool)
tier = DiskTier(
    [KVDirectory(str(directory), files.object_bytes)],
    ledger,
    clock,
    DiskScanner,
    quota_bytes=quota,
    min_touches=1,
    epoch_s=time.time(),
)
poller = select.poll()
poller.register(tier.pollables()[0], select.POLLIN)
counts = {"loaded": 0, "missed": 0, "stored": 0, "wrong": 0}


def listen(until):
    while not until():
        assert poller.poll(30_000), "no news"
        tier.poll()


def content(key):
    return key * (files.payload_bytes // 32)


def work():
    for transfer in ledger.drain():
        failed = []
        is_store = isinstance(transfer.target, DiskObjects)
        keys = (transfer.target if is_store else transfer.source).keys
        for index, key in enumerate(keys):
            try:
                if is_store:
                    files.payload(buffer)[:] = content(key)
                    files.write(key, buffer)
                    counts["stored"] += 1
                else:
                    files.read(key, buffer)
                    counts["wrong"] += bytes(files.payload(buffer)) != content(key)
                    counts["loaded"] += 1
            except ObjectError:
                counts["missed"] += 1
                failed.append(index)
        assert ledger.close(TransferEnd(transfer.transfer_id, transfer.generation, failed, "gone"))


listen(lambda: tier.load_report().is_indexed)
print("ready", flush=True)
sys.stdin.readline()
dice = random.Random(seed)
for number in range(400):
    key = dice.randrange(1, 80).to_bytes(1) * 32
    prefix = PrefixRequest(str(number), [key], [])
    tier.on_queued(prefix, 0)
    listen(lambda: tier.lookup(prefix, 0) is not None)
    (block,) = pool.allocate(1)
    if tier.lookup(prefix, 0):
        tier.load(prefix, 0, [block], -1)
    else:
        pool.publish(block, key)
        tier.save([CachedBlock(block, key, None, [])])
    work()
    pool.release([block])
    clock.advance_to(clock.now() + 1)
tier.close()
print(msgspec.json.encode(counts).decode(), flush=True)
"""


def test_two_servers_write_and_evict_in_one_directory(tmp_path: Path, manifest: Manifest) -> None:
    manifest = msgspec.structs.replace(manifest, payload_bytes=64 * 1024)
    directory = open_directory(tmp_path, manifest)
    files = ObjectFiles(directory, manifest)
    quota = QUOTA_BLOCKS * files.object_bytes
    arguments = [str(directory), str(quota), msgspec.json.encode(manifest).decode()]
    servers = [
        subprocess.Popen(
            [sys.executable, "-c", SERVER, str(seed), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in (1, 2)
    ]
    try:
        for server in servers:
            assert server.stdout is not None
            assert server.stdout.readline() == "ready\n"
        for server in servers:
            assert server.stdin is not None
            server.stdin.write("go\n")
            server.stdin.flush()
        printed = [server.communicate(timeout=60)[0] for server in servers]
    finally:
        for server in servers:
            server.kill()
            server.wait()
    for line in printed:
        counts = msgspec.json.decode(line, type=dict[str, int])
        assert counts["wrong"] == 0
        assert counts["loaded"] > 50
        assert counts["stored"] > 40
    buffer = files.new_buffer()
    objects = [path for path in directory.glob("??/*") if not path.name.startswith(".")]
    for path in objects:
        key = parse_name(path.parent.name, path.name)
        assert key is not None
        files.read(key, buffer)
        assert bytes(files.payload(buffer)) == key * (files.payload_bytes // 32)
    assert len(objects) <= 2 * QUOTA_BLOCKS  # each keeps the quota with what it knows
    assert not list(directory.glob("??/.tmp-*"))
