# SPDX-License-Identifier: Apache-2.0
"""Requests whose KV does not fit the device, in virtual time: where it lies, and that nothing else is harmed."""

from __future__ import annotations

import pytest
from harness import make_request
from test_tiers import Tiered

from benchmarks.simulation.disk import SimDisk, disk_tiers

LENGTH = 256


def streaming(**fields: object) -> Tiered:
    """Sixteen blocks of four tokens on the device; segments of sixteen tokens."""
    settings = {"segment_tokens": 16, "max_model_len": LENGTH, "per_cold_block_s": 0.001, **fields}
    return Tiered(**settings)


def prompt_of(length: int, first: int = 1) -> list[int]:
    return [(first + index) % 7 for index in range(length)]


def on_disk(**fields: object) -> Tiered:
    return streaming(disk=SimDisk(), kv_tiers=disk_tiers(200, 1), kv_host_slots=0, **fields)


def in_both(**fields: object) -> Tiered:
    return streaming(
        disk=SimDisk(), kv_tiers=disk_tiers(200, 1, host_bytes=1), kv_host_slots=16, **fields
    )


@pytest.mark.parametrize("build", [streaming, on_disk, in_both])
def test_a_request_of_four_times_the_device_gives_the_same_tokens(build: type[Tiered]) -> None:
    it = build()
    request = make_request("long", prompt_of(200), max_tokens=50)
    it.serve(request, max_model_len=LENGTH)
    assert it.scheduler.counters.num_preemptions == 0
