"""An engine over a device and the tiers below it, in virtual time: what moves, who waits, and what is computed."""

from __future__ import annotations

from harness import Harness, assert_complete, make_request
from sim_disk import SimDisk

from pagoda.engine.config import KVTiersConfig
from pagoda.engine.messages import GenerateRequest

LONG = 40
"""Tokens of a prompt that fills ten blocks; the device has room for sixteen."""


def prompt(index: int) -> list[int]:
    return [index] * LONG


def tiered(**fields: object) -> Harness:
    settings = {
        "num_blocks": 16,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "kv_host_slots": 64,
        "kv_tiers": KVTiersConfig(host_bytes=1),
        **fields,
    }
    return Harness(**settings)  # type: ignore[arg-type]


def serve(harness: Harness, name: str, index: int) -> GenerateRequest:
    request = make_request(name, prompt(index), max_tokens=4)
    harness.add(request)
    harness.run()
    assert_complete(harness, [request])
    return request


def cached(harness: Harness, name: str) -> int:
    return harness.finished[name].num_cached_tokens


def test_what_the_device_has_evicted_comes_back_from_host_memory() -> None:
    harness = tiered()
    for name, index in (("a", 1), ("b", 2), ("c", 3), ("again", 1)):
        serve(harness, name, index)
    assert cached(harness, "c") == 0
    assert cached(harness, "again") == 36
    (host,) = harness.core.load().tiers
    assert host.num_loaded >= 8
    harness.check_nothing_left()


def test_a_server_that_starts_again_finds_what_is_on_disk() -> None:
    disk = SimDisk()
    tiers = KVTiersConfig(disk_path="/nowhere", disk_bytes=1000, disk_min_touches=1)
    serve(tiered(disk=disk, kv_tiers=tiers, kv_host_slots=0), "a", 1)
    assert len(disk.objects) == 10
    harness = tiered(disk=disk, kv_tiers=tiers, kv_host_slots=0)
    serve(harness, "b", 1)
    assert cached(harness, "b") == 36
    harness.check_nothing_left()
