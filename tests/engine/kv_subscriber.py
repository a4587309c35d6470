# SPDX-License-Identifier: Apache-2.0
"""A subscriber as one for vLLM is written: types of its own for the wire, and a view of what is cached."""

from __future__ import annotations

import msgspec
import zmq

from pagoda.kv.block_pool import BlockPool


class StoredOnTheWire(msgspec.Struct, tag="BlockStored"):
    """The fields of vLLM's type."""

    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[str] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class RemovedOnTheWire(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class ClearedOnTheWire(msgspec.Struct, tag="AllBlocksCleared"):
    pass


EventOnTheWire = StoredOnTheWire | RemovedOnTheWire | ClearedOnTheWire


class BatchOnTheWire(msgspec.Struct, array_like=True):
    ts: float
    events: list[EventOnTheWire]
    data_parallel_rank: int | None = None


class CacheView:
    """State of a subscriber that applies every event takes to be cached. Nothing may be stored or removed twice.

    Only of what is on disk, all that was there before is not told, and may be removed.
    """

    def __init__(self) -> None:
        self.keys: set[bytes | int] = set()
        """Keys of blocks on the device."""
        self.host_keys: set[bytes | int] = set()
        self.disk_keys: set[bytes | int] = set()
        self.ranks: set[int | None] = set()

    def apply(self, payload: bytes) -> list[EventOnTheWire]:
        batch = msgspec.msgpack.decode(payload, type=BatchOnTheWire)
        self.ranks.add(batch.data_parallel_rank)
        for event in batch.events:
            match event:
                case StoredOnTheWire():
                    assert len(event.token_ids) == len(event.block_hashes) * event.block_size > 0
                    keys = self._keys_in(event.medium)
                    assert keys.isdisjoint(event.block_hashes)
                    keys.update(event.block_hashes)
                case RemovedOnTheWire():
                    keys = self._keys_in(event.medium)
                    assert event.medium == "DISK" or keys.issuperset(event.block_hashes)
                    keys.difference_update(event.block_hashes)
                case ClearedOnTheWire():
                    for keys in (self.keys, self.host_keys, self.disk_keys):
                        keys.clear()
            if not isinstance(event, ClearedOnTheWire):
                assert len(set(event.block_hashes)) == len(event.block_hashes) > 0
        return batch.events

    def _keys_in(self, medium: str | None) -> set[bytes | int]:
        return {"GPU": self.keys, "CPU": self.host_keys, "DISK": self.disk_keys}[medium or ""]


def assert_knows(keys: set[bytes | int], pool: BlockPool) -> None:
    """A subscriber takes to be cached what a tier's pool has, of all KV groups."""
    assert len(keys) == pool.num_known
    assert all(isinstance(key, bytes) and pool.holds(key) for key in keys)


class Subscriber:
    """Listens at one port, asks for what it missed at another, and keeps a view of one replica."""

    def __init__(self, publish_port: int, replay_port: int) -> None:
        self._context = zmq.Context()
        self._publications = self._context.socket(zmq.SUB)
        self._publications.setsockopt(zmq.RCVHWM, 10)
        self._publications.setsockopt(zmq.RCVBUF, 4096)
        self._publications.setsockopt(zmq.SUBSCRIBE, b"kv-events")
        self._publications.connect(f"tcp://127.0.0.1:{publish_port}")
        self._replays = self._context.socket(zmq.DEALER)
        self._replays.connect(f"tcp://127.0.0.1:{replay_port}")
        self.view = CacheView()
        self.events: list[EventOnTheWire] = []
        self.last_number: int | None = None
        self.num_replays = 0

    def receive(self, timeout_s: float = 60.0) -> bool:
        """Takes one message, after a replay if some are missing before it; False if none came."""
        if not self._publications.poll(1000 * timeout_s):
            return False
        topic, number_bytes, payload = self._publications.recv_multipart()
        assert topic == b"kv-events"
        number = int.from_bytes(number_bytes, "big")
        if self.last_number is None or number > self.last_number + 1:
            self.replay()
        self._take(number, payload)
        return True

    def replay(self) -> None:
        """Asks for all that comes after the last number."""
        self.num_replays += 1
        first = 0 if self.last_number is None else self.last_number + 1
        self._replays.send_multipart([b"", first.to_bytes(8, "big")])
        while True:
            assert self._replays.poll(60_000)
            empty, number_bytes, payload = self._replays.recv_multipart()
            assert empty == b""
            if payload == b"":
                assert int.from_bytes(number_bytes, "big", signed=True) == -1
                return
            self._take(int.from_bytes(number_bytes, "big"), payload)

    def _take(self, number: int, payload: bytes) -> None:
        if self.last_number is not None and number <= self.last_number:
            return
        self.last_number = number
        self.events += self.view.apply(payload)

    def close(self) -> None:
        self._context.destroy(linger=0)
