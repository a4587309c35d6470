# SPDX-License-Identifier: Apache-2.0
"""Requests whose KV does not fit the device, in virtual time: where it lies, and that nothing else is harmed."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from group_models import grouped
from harness import Harness, assert_complete, make_request
from test_tiers import Tiered

from benchmarks.simulation.books import check_books
from benchmarks.simulation.disk import SimDisk, disk_tiers
from pagoda.errors import ConfigError
from pagoda.messages.frontend import FinishReason, GenerateRequest
from pagoda.messages.speculation import SpeculativeConfig
from pagoda.messages.transfers import DeviceBlocks, HostSlots, TierBlocks
from pagoda.plugins.sim.executor import TransferFate

LENGTH = 256
"""Tokens of the longest context, which is four times as long as what the device holds."""


def streaming(**fields: object) -> Tiered:
    """Sixteen blocks of four tokens on the device, and segments of sixteen tokens in host memory."""
    settings = {"segment_tokens": 16, "max_model_len": LENGTH, "per_cold_block_s": 0.001, **fields}
    return Tiered(**settings)


def on_disk(**fields: object) -> Tiered:
    settings = {"disk": SimDisk(), "kv_tiers": disk_tiers(200, 1), "kv_host_slots": 0, **fields}
    return streaming(**settings)


def in_both(**fields: object) -> Tiered:
    tiers = disk_tiers(200, 1, host_bytes=1)
    return streaming(**{"disk": SimDisk(), "kv_tiers": tiers, "kv_host_slots": 16, **fields})


def long_request(
    name: str, length: int = 200, first: int = 1, max_tokens: int = 20, **fields: object
) -> GenerateRequest:
    prompt = [(first + index) % 7 for index in range(length)]
    return make_request(name, prompt, max_tokens=max_tokens, **fields)


def serve(it: Tiered, *requests: GenerateRequest) -> None:
    it.serve(*requests, max_model_len=LENGTH)


def cold_places(it: Tiered, request_id: str) -> list[type[object]]:
    table = it.scheduler.requests[request_id].table
    return [type(hold.place) for segment in table.cold for hold in segment]


def go_on_until(it: Tiered, holds: Callable[[], bool]) -> None:
    while not holds():
        assert it.tick()
        check_books(it.scheduler)


@pytest.mark.parametrize("build", [streaming, on_disk, in_both])
def test_a_request_of_four_times_the_device_goes_on(build: Callable[[], Tiered]) -> None:
    it = build()
    request = long_request("long", max_tokens=50)
    it.add(request)
    go_on_until(it, lambda: len(cold_places(it, "long")) == 12)
    assert it.scheduler.requests["long"].num_output_tokens < 50
    it.run()
    assert_complete(it, [request], LENGTH)
    counters = it.scheduler.counters
    assert (counters.num_preemptions, counters.num_cold_segments) == (0, 15)
    assert counters.num_streamed_bytes > 0


def test_segments_go_to_host_memory_as_long_as_there_is_room_and_then_to_the_disk() -> None:
    it = in_both()
    it.add(long_request("long"))
    go_on_until(it, lambda: len(cold_places(it, "long")) == 9)
    assert cold_places(it, "long") == [HostSlots] * 4 + [TierBlocks] * 5
    it.run()


@pytest.mark.parametrize("model", ["several", "mixed", "state", "all"])
def test_other_groups_stay_on_the_device(model: str) -> None:
    it = streaming(kv_groups=grouped(model, 4), num_blocks=40, kv_host_slots=300)
    serve(it, long_request("long", 230))
    assert it.scheduler.counters.num_cold_segments > 0


def test_drafts_of_a_request_are_computed_over_its_cold_segments_too() -> None:
    it = streaming(max_proposals=4, speculation=SpeculativeConfig(method="auto"))
    serve(it, long_request("long", max_tokens=50))
    assert it.scheduler.counters.num_accepted_tokens > 0


def test_with_several_stages() -> None:
    it = streaming(num_stages=2)
    serve(it, long_request("long"), make_request("short", [3] * 9, max_tokens=30))


# ---- prefixes


@pytest.mark.parametrize("build", [streaming, on_disk])
def test_what_an_earlier_request_left_below_is_read_where_it_lies(
    build: Callable[[], Tiered],
) -> None:
    it = build()
    serve(it, long_request("first"))
    it.fates.begun.clear()
    it.add(long_request("second"))
    go_on_until(it, lambda: "second" in it.finished or bool(cold_places(it, "second")))
    assert len(cold_places(it, "second")) == 12
    it.run()
    assert it.num_cached("second") >= 192
    loaded = [it for it in it.fates.begun if isinstance(it.target, DeviceBlocks)]
    assert sum(len(transfer.target.block_ids) for transfer in loaded) <= 8  # type: ignore[union-attr]


def test_two_at_a_time_hold_the_same_segments() -> None:
    it = streaming(num_blocks=40, kv_host_slots=64)
    requests = [long_request(name, max_tokens=50) for name in ("a", "b")]
    for request in requests:
        it.add(request)
    go_on_until(it, lambda: all(len(cold_places(it, name)) > 8 for name in ("a", "b")))
    (host,) = it.tiers.storeys
    assert host.num_held < 2 * 9 * 4
    it.run()
    assert_complete(it, requests, LENGTH)


def test_a_restarted_server_goes_on_from_the_disk() -> None:
    disk = SimDisk()
    serve(on_disk(disk=disk), long_request("before"))
    it = on_disk(disk=disk)
    serve(it, long_request("after"))
    assert it.num_cached("after") >= 160


# ---- others come, and it makes way


def test_a_request_with_priority_takes_its_blocks_and_it_comes_back_to_its_segments() -> None:
    it = streaming()
    low = long_request("low", priority=5, max_tokens=40)
    it.add(low)
    go_on_until(it, lambda: len(cold_places(it, "low")) > 8)
    high = make_request("high", [2] * 44, max_tokens=4)
    it.add(high)
    it.run()
    assert it.scheduler.counters.num_preemptions == 1
    assert_complete(it, [low, high], LENGTH)


def test_two_for_whom_the_storeys_have_no_room_run_one_after_the_other() -> None:
    it = streaming(num_blocks=24, kv_host_slots=60)
    requests = [long_request("first"), long_request("second", first=3)]
    for request in requests:
        it.add(request)
    short = make_request("short", [5] * 8, max_tokens=4)
    it.add(short)
    it.run()
    assert list(it.finished) == ["short", "first", "second"]
    assert_complete(it, [*requests, short], LENGTH)


def test_one_that_grows_takes_the_room_below_of_the_one_behind_it() -> None:
    it = streaming(num_blocks=24, kv_host_slots=60)
    first = long_request("first", 100, max_tokens=150)
    second = long_request("second", 100, 3, max_tokens=100)
    it.add(first)
    it.add(second)
    it.run()
    assert it.scheduler.counters.num_preemptions == 1
    assert list(it.finished) == ["first", "second"]
    assert_complete(it, [first, second], LENGTH)


def test_an_abort_gives_everything_back() -> None:
    it = in_both()
    it.add(long_request("long"))
    go_on_until(it, lambda: len(cold_places(it, "long")) > 6)
    it.core.abort("long")
    check_books(it.scheduler)
    it.run()


# ---- when things break


@pytest.mark.parametrize("build", [streaming, on_disk, in_both])
def test_when_the_worker_dies_it_is_computed_again(build: Callable[[], Tiered]) -> None:
    it = build()
    request = long_request("long")
    it.add(request)
    go_on_until(it, lambda: len(cold_places(it, "long")) > 8)
    it.lose_the_worker()
    check_books(it.scheduler)
    it.run()
    assert_complete(it, [request], LENGTH)


def test_when_the_engine_dies_the_answer_goes_on_where_it_was() -> None:
    disk = SimDisk()
    it = on_disk(disk=disk)
    request = long_request("long", max_tokens=50)
    it.add(request)
    go_on_until(it, lambda: len(it.tokens["long"]) > 10)
    so_far = it.tokens["long"]
    after = on_disk(disk=disk)
    after.serve(request.__class__(**_with_answer(request, so_far)), max_model_len=LENGTH)
    assert after.num_cached("long") > 0


def _with_answer(request: GenerateRequest, output: list[int]) -> dict[str, object]:
    fields = {name: getattr(request, name) for name in request.__struct_fields__}
    return {**fields, "output_token_ids": list(output)}


def test_objects_that_vanish_are_computed_again() -> None:
    disk = SimDisk()
    it = on_disk(disk=disk)
    request = long_request("long", max_tokens=40)
    it.add(request)
    go_on_until(it, lambda: len(cold_places(it, "long")) > 10)
    for key in list(disk.objects)[::7]:
        del disk.objects[key]
    it.run()
    assert_complete(it, [request], LENGTH)
    assert it.scheduler.counters.num_lost_segments >= 1


def test_a_directory_that_has_gone_is_lost_once() -> None:
    """Also what the request finds there behind the segments that it has cold."""
    disk = SimDisk()
    it = on_disk(disk=disk)
    serve(it, long_request("before", max_tokens=4))
    disk.objects.clear()
    serve(it, long_request("after", max_tokens=40))
    assert it.scheduler.counters.num_lost_segments == 1


def test_objects_that_vanish_again_and_again_end_the_request_alone() -> None:
    disk = SimDisk()
    it = on_disk(disk=disk)
    short = make_request("short", [5] * 8, max_tokens=30)
    it.add(long_request("long"))
    it.add(short)
    while "long" not in it.finished:
        assert it.tick()
        if it.scheduler.requests["long"].table.cold if "long" in it.scheduler.requests else False:
            disk.objects.clear()
    assert "could not be read from a tier" in (it.finished["long"].error or "")
    it.run()
    assert_complete(it, [short], LENGTH)


def test_a_disk_that_takes_nothing_ends_the_request_with_one_clear_error() -> None:
    it = on_disk()
    request = long_request("long")
    it.fates.store = TransferFate(failed=tuple(range(16)))
    it.add(request)
    it.run()
    last = it.finished["long"]
    assert last.finish_reason is FinishReason.ERROR
    assert "it was not to be" in (last.error or "")
    assert "--kv-disk-bytes" in (last.error or "")


@pytest.mark.parametrize("build", [on_disk, in_both])
def test_a_disk_that_hangs_in_mid_stream_loses_nothing(build: Callable[[], Tiered]) -> None:
    """Others go on meanwhile, and it is asked again when it has rested."""
    disk = SimDisk()
    it = build(disk=disk)
    request, short = long_request("long", max_tokens=40), make_request("short", [5] * 8)
    it.add(request)
    go_on_until(it, lambda: len(cold_places(it, "long")) == 12 and not it.tiers.ledger.num_open)
    there, began = set(disk.objects), it.clock.now()
    it.fates.begun.clear()
    disk.hang(15.0)
    it.add(short)
    go_on_until(it, lambda: "short" in it.finished)
    assert it.clock.now() < began + 5
    it.run()
    assert_complete(it, [request, short], LENGTH)
    assert it.clock.now() > began + 15
    assert it.scheduler.counters.num_lost_segments == 2
    assert there <= disk.objects.keys()
    written = [key for it in it.fates.begun for key in getattr(it.target, "keys", ())]
    assert there.isdisjoint(written)


def test_segments_are_not_sought_in_each_step_while_a_disk_rests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk = SimDisk()
    it = on_disk(disk=disk)
    cold = it.scheduler.kv.cold
    assert cold is not None
    it.add(long_request("long", max_tokens=40))
    go_on_until(it, lambda: len(cold_places(it, "long")) == 12 and not it.tiers.ledger.num_open)
    disk.hang(15.0)
    it.add(make_request("short", [5] * 8, max_tokens=40))
    go_on_until(it, lambda: cold.is_back_soon)
    sought: list[int] = []
    num_shared = cold.num_shared

    def count(*given: Any) -> int:
        sought.append(1)
        return num_shared(*given)

    monkeypatch.setattr(cold, "num_shared", count)
    first_step = it.scheduler.batcher.next_step
    go_on_until(it, lambda: "short" in it.finished)
    num_steps = it.scheduler.batcher.next_step - first_step
    assert cold.is_back_soon
    assert num_steps > 16
    assert 0 < len(sought) <= 1 + num_steps // 8


def test_a_disk_that_never_answers_again_ends_the_request_with_one_clear_error() -> None:
    disk = SimDisk()
    it = on_disk(disk=disk)
    it.add(long_request("long", max_tokens=40))
    go_on_until(it, lambda: len(cold_places(it, "long")) > 6)
    disk.hang(1e9)
    it.run()
    assert "could not be read from a tier" in (it.finished["long"].error or "")
    assert it.clock.now() < 60


def test_what_was_read_and_what_lies_in_host_memory_stays() -> None:
    disk = SimDisk()
    it = in_both(disk=disk)
    request = long_request("long", max_tokens=40)
    it.add(request)
    go_on_until(it, lambda: len(cold_places(it, "long")) == 12)
    table = it.scheduler.requests["long"].table
    keys = [hold.place.keys for segment in table.cold[4:] for hold in segment]
    del disk.objects[keys[3][1]]
    go_on_until(it, lambda: it.scheduler.counters.num_lost_segments > 0)
    assert cold_places(it, "long") in ([], [HostSlots] * 4 + [TierBlocks] * 3)
    go_on_until(it, lambda: bool(cold_places(it, "long")))
    assert cold_places(it, "long") == [HostSlots] * 4 + [TierBlocks] * 3
    it.run()
    assert_complete(it, [request], LENGTH)
    assert it.scheduler.counters.num_lost_segments == 1


def test_losses_with_progress_in_between_are_survived() -> None:
    disk = SimDisk()
    it = on_disk(disk=disk)
    request = long_request("long", max_tokens=50)
    it.add(request)
    counters = it.scheduler.counters
    for count in range(6):
        at = len(it.tokens["long"]) + 5
        go_on_until(it, lambda at=at: len(it.tokens["long"]) >= at)  # type: ignore[misc]
        (hold,) = it.scheduler.requests["long"].table.cold[-1]
        del disk.objects[hold.place.keys[0]]  # type: ignore[union-attr]
        go_on_until(it, lambda count=count: counters.num_lost_segments > count)  # type: ignore[misc]
    it.run()
    assert_complete(it, [request], LENGTH)


def test_a_first_scan_that_never_ends_is_not_awaited_for_ever() -> None:
    it = on_disk(disk=SimDisk(lambda: 1e6))
    it.add(long_request("long"))
    go_on_until(it, lambda: "long" in it.finished)
    assert "/nowhere does not answer" in (it.finished["long"].error or "")
    assert 10 <= it.clock.now() < 25
    beside = in_both(disk=SimDisk(lambda: 1e6), kv_host_slots=64)
    serve(beside, long_request("long"))


def test_a_write_that_never_ends_is_not_awaited_for_ever() -> None:
    it = on_disk()
    it.fates.store = TransferFate(delay_s=1e6)
    short = make_request("short", [5] * 8, max_tokens=30)
    it.add(long_request("long"))
    it.add(short)
    go_on_until(it, lambda: {"long", "short"} == it.finished.keys())
    assert "/nowhere does not answer" in (it.finished["long"].error or "")
    assert 60 <= it.clock.now() < 70
    assert_complete(it, [short], LENGTH)


def test_nobody_makes_way_for_a_disk_that_takes_nothing() -> None:
    """What the one behind has lies there, so that its room would be of no use."""
    it = in_both(num_blocks=60, max_num_batched_tokens=32, kv_host_slots=20)
    first, second = long_request("first", 120, max_tokens=130), long_request("second", 200, 3, 40)
    it.add(first)
    it.add(second)
    go_on_until(it, lambda: TierBlocks in cold_places(it, "second"))
    it.fates.store = TransferFate(failed=tuple(range(16)))
    it.run()
    assert it.scheduler.counters.num_preemptions == 0


# ---- what the storeys do not hold


def test_what_all_storeys_together_do_not_hold_is_not_promised() -> None:
    with pytest.raises(
        ConfigError, match=r"do not hold one sequence of 256 tokens; raise --kv-host"
    ):
        streaming(kv_host_slots=40)


def test_a_request_that_is_too_long_is_refused_when_it_comes() -> None:
    it = streaming()
    (chunk,) = it.core.add(long_request("long", 300))  # type: ignore[misc]
    assert "the context holds 256" in (chunk.error or "")


# ---- others keep their latency


def gaps(it: Harness, request_id: str) -> list[float]:
    """Seconds between tokens of a request, until it ends."""
    times: list[float] = []
    count = 0
    while request_id in it.scheduler.requests:
        assert it.tick()
        if len(it.tokens[request_id]) > count:
            count = len(it.tokens[request_id])
            times.append(it.clock.now())
    return [after - before for before, after in pairwise(times)]


def test_others_hardly_notice_a_request_that_streams_for_long() -> None:
    """A step of it takes twenty times as long as one of theirs."""
    fields = {"max_model_len": 1024, "kv_host_slots": 256, "per_cold_block_s": 0.002}
    short = make_request("short", [5] * 8, max_tokens=400)
    alone = streaming(**fields, num_blocks=256)
    alone.add(short)
    before = sorted(gaps(alone, "short"))
    it = streaming(**fields, num_blocks=220)
    it.add(make_request("long", [index % 7 for index in range(900)], max_tokens=100))
    go_on_until(it, lambda: len(it.tokens["long"]) > 2)
    it.add(short)
    beside = sorted(gaps(it, "short"))
    p99 = len(before) * 99 // 100
    assert beside[p99] <= 1.3 * before[p99]
    assert sum(beside) <= 1.3 * sum(before)
    assert beside[-1] > 10 * before[-1]
    assert len(it.tokens["long"]) > 4
    it.run()
