# SPDX-License-Identifier: Apache-2.0
"""Promises of the transport interface, with each transport; those of libraries have processes of their own."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from transport_rig import SIZES, House, Memory, make, read, soon

from pagoda.errors import TransportError
from pagoda.plugins.disaggregation.transport import tcp
from pagoda.plugins.disaggregation.transport.base import MemorySpan

TESTED = os.environ.get("PAGODA_TEST_TRANSPORT", "shm;tcp;tcp, encrypted").split(";")


@pytest.fixture(params=TESTED)
def house(request: pytest.FixtureRequest) -> Iterator[House]:
    name, _, encrypted = request.param.partition(", ")
    try:
        house = House(name, encrypts=bool(encrypted))
    except TransportError as error:
        pytest.skip(str(error))
    with contextlib.closing(house):
        yield house


def test_spans_go_where_they_belong(house: House) -> None:
    theirs, ours = house.theirs, house.ours
    before = [ours.bytes_of(region, 0, size) for region, size in enumerate(SIZES)]
    read(
        house.link,
        MemorySpan(0, 100, 4096, ours.address(0, 50)),
        MemorySpan(2, 0, 2**20, ours.address(2, 7)),
        MemorySpan(1, 2**14 - 1, 1, ours.address(1, 0)),
    )
    assert ours.bytes_of(0, 50, 4096) == theirs.bytes_of(0, 100, 4096)
    assert ours.bytes_of(2, 7, 2**20) == theirs.bytes_of(2, 0, 2**20)
    assert ours.bytes_of(1, 0, 1) == theirs.bytes_of(1, 2**14 - 1, 1)
    assert ours.bytes_of(0, 0, 50) == before[0][:50], "nothing beside them is written"
    assert ours.bytes_of(0, 4146, 2**20 - 4146) == before[0][4146:]
    assert ours.bytes_of(2, 7 + 2**20, 100) == before[2][7 + 2**20 : 107 + 2**20]


def test_what_is_written_later_is_read_later(house: House) -> None:
    house.check(house.link)
    house.theirs.memory[7:15] = b"new data"
    house.check(house.link)


def test_many_small_spans(house: House) -> None:
    rng = random.Random(3)
    places = [(rng.randrange(0, 2**20 - 100), 100 * index) for index in range(10_000)]
    read(house.link, *(MemorySpan(0, start, 99, house.ours.address(2, at)) for start, at in places))
    for start, at in places:
        assert house.ours.bytes_of(2, at, 99) == house.theirs.bytes_of(0, start, 99)


def test_nothing_to_read(house: House) -> None:
    read(house.link)


def test_a_read_that_is_late_already_fails(house: House) -> None:
    with pytest.raises(TransportError):
        house.link.read([house.whole] * 64, time.monotonic() - 20)


def test_several_threads_read_by_one_link(house: House) -> None:
    theirs, ours, link = house.theirs, house.ours, house.link

    def work(index: int) -> None:
        for turn in range(20):
            offset = 1000 * index + turn
            read(link, MemorySpan(0, offset, 900, ours.address(0, 1000 * index)))
            assert ours.bytes_of(0, 1000 * index, 900) == theirs.bytes_of(0, offset, 900)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))


def test_several_links_to_one_door(house: House) -> None:
    links = [house.connect() for _ in range(4)]
    for index, link in enumerate(links):
        house.check(link, offset=index)
    links[0].close()
    house.check(links[1], offset=5)


BEYOND = [(3, 0, 1), (0, 2**20, 1), (0, 2**20 - 1, 2), (1, 0, 2**14 + 1), (0, 2**63, 8)]
"""Region, offset and length."""


def test_nothing_else_of_the_process_is_read(house: House) -> None:
    for region, offset, count in BEYOND:
        with pytest.raises(TransportError):
            read(house.link, MemorySpan(region, offset, count, house.ours.address(2)))
    house.check()


def test_a_door_that_is_closed_is_noticed(house: House) -> None:
    link = house.link
    house.exported.close()
    with pytest.raises(TransportError):
        house.check(link)
    with pytest.raises(TransportError):
        house.connect()
    house.exported.close()


def test_a_link_that_is_closed_reads_nothing(house: House) -> None:
    house.link.close()
    house.link.close()
    with pytest.raises(TransportError):
        house.check(house.link)


@pytest.mark.parametrize("closes", ["export", "link"])
def test_closing_ends_a_read_under_way(house: House, closes: str) -> None:
    begun, link = threading.Event(), house.link

    def read_on() -> None:
        """Far more than can have been read before the other side is closed."""
        read(link, house.whole)
        begun.set()
        while True:
            read(link, *[house.whole] * 64)

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read_on)
        assert begun.wait(20)
        (house.exported if closes == "export" else link).close()
        with pytest.raises(TransportError):
            reading.result(20)


def test_a_read_that_fails_leaves_nobody_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    """One share fails in a way that nobody foresaw, while the others go on for a while."""
    begun, goes_on = threading.Event(), threading.Event()
    ended: list[int] = []

    def share(_self: tcp.TcpLink, _spans: object, _deadline: float) -> None:
        if not threading.current_thread().name.startswith("kv-tcp-read"):
            assert begun.wait(20)
            raise MemoryError
        begun.set()
        assert goes_on.wait(20)
        ended.append(1)

    with contextlib.closing(House("tcp")) as house:
        link = house.link
        monkeypatch.setattr(tcp.TcpLink, "_read", share)
        monkeypatch.setattr(tcp, "_STREAM_BYTES", 2**20)
        timer = threading.Timer(0.05, goes_on.set)
        timer.start()
        with pytest.raises(MemoryError):
            read(link, house.whole)
        assert len(ended) == 2
        timer.join()


def test_a_door_of_another_memory_is_not_taken_for_it(house: House) -> None:
    other = Memory(4)
    with contextlib.closing(make(house.name, other).export()) as exported:
        house.check(house.connect(exported), other)
    other.close()


def test_descriptors_that_make_no_sense(house: House) -> None:
    for descriptor in (b"", b"garbage", b"\x93\x01\x02\x03", b"\xc1" * 100):
        with pytest.raises(TransportError):
            house.transport.connect(descriptor, soon())


def test_threads_end_with_doors_and_links() -> None:
    before = set(threading.enumerate())
    for name in ("shm", "tcp"):
        with contextlib.closing(House(name)) as house:
            for _ in range(3):
                read(house.connect(), house.whole)
    for thread in set(threading.enumerate()) - before:
        thread.join(5)
    assert set(threading.enumerate()) == before
