"""Promises of the transport interface, with each transport; those of libraries have processes of their own."""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from transport_rig import SIZES, Memory, make, read, soon

from pagoda.pd.transport import tcp
from pagoda.pd.transport.base import ExportedMemory, MemoryLink, Span, Transport, TransportError

TESTED = os.environ.get("PAGODA_TEST_TRANSPORT", "shm;tcp;tcp, encrypted").split(";")


class Pair:
    """A door, and a link to it."""

    def __init__(self, name: str) -> None:
        self.name = name
        encrypts = name == "tcp, encrypted"
        self.kind = "tcp" if encrypts else name
        self.theirs, self.ours = Memory(1), Memory(2)
        try:
            self.exporter: Transport = make(self.kind, self.theirs, encrypts=encrypts)
            self.fetcher: Transport = make(self.kind, self.ours)
            self.exported: ExportedMemory = self.exporter.export()
            self.link: MemoryLink = self.connect()
        except TransportError as error:
            pytest.skip(str(error))

    def connect(self) -> MemoryLink:
        return self.fetcher.connect(self.exported.descriptor, soon())

    def close(self) -> None:
        self.link.close()
        self.exported.close()
        self.theirs.close()
        self.ours.close()


@pytest.fixture(params=TESTED)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = Pair(request.param)
    yield pair
    pair.close()


def test_spans_go_where_they_belong(pair: Pair) -> None:
    before = [pair.ours.bytes_of(region, 0, size) for region, size in enumerate(SIZES)]
    spans = [
        Span(0, 100, 4096, pair.ours.address(0, 50)),
        Span(2, 0, 2**20, pair.ours.address(2, 7)),
        Span(1, 2**14 - 1, 1, pair.ours.address(1, 0)),
    ]
    read(pair.link, spans)
    assert pair.ours.bytes_of(0, 50, 4096) == pair.theirs.bytes_of(0, 100, 4096)
    assert pair.ours.bytes_of(2, 7, 2**20) == pair.theirs.bytes_of(2, 0, 2**20)
    assert pair.ours.bytes_of(1, 0, 1) == pair.theirs.bytes_of(1, 2**14 - 1, 1)
    assert pair.ours.bytes_of(0, 0, 50) == before[0][:50], "nothing beside them is written"
    assert pair.ours.bytes_of(0, 4146, 2**20 - 4146) == before[0][4146:]
    assert pair.ours.bytes_of(2, 7 + 2**20, 100) == before[2][7 + 2**20 : 107 + 2**20]


def test_what_is_written_later_is_read_later(pair: Pair) -> None:
    theirs, ours = pair.theirs, pair.ours
    read(pair.link, [Span(0, 0, 8, ours.address(0))])
    theirs.memory[0:8] = b"new data"
    read(pair.link, [Span(0, 0, 8, ours.address(0))])
    assert ours.bytes_of(0, 0, 8) == b"new data"


def test_many_small_spans(pair: Pair) -> None:
    rng = random.Random(3)
    places = [(rng.randrange(0, 2**20 - 100), 100 * index) for index in range(10_000)]
    read(pair.link, [Span(0, start, 99, pair.ours.address(2, at)) for start, at in places])
    for start, at in places:
        assert pair.ours.bytes_of(2, at, 99) == pair.theirs.bytes_of(0, start, 99)


def test_nothing_to_read(pair: Pair) -> None:
    read(pair.link, [])


def test_a_read_that_is_late_already_fails(pair: Pair) -> None:
    spans = [Span(2, 0, 3 * 2**20, pair.ours.address(2))] * 64
    with pytest.raises(TransportError):
        pair.link.read(spans, time.monotonic() - 20)


def test_several_threads_read_by_one_link(pair: Pair) -> None:
    def work(index: int) -> None:
        for turn in range(20):
            offset = 1000 * index + turn
            read(pair.link, [Span(0, offset, 900, pair.ours.address(0, 1000 * index))])
            wanted = pair.theirs.bytes_of(0, offset, 900)
            assert pair.ours.bytes_of(0, 1000 * index, 900) == wanted

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))


def test_several_links_to_one_door(pair: Pair) -> None:
    links = [pair.connect() for _ in range(3)]
    for index, link in enumerate([*links, pair.link]):
        read(link, [Span(0, index, 100, pair.ours.address(0))])
        assert pair.ours.bytes_of(0, 0, 100) == pair.theirs.bytes_of(0, index, 100)
    links[0].close()
    read(links[1], [Span(0, 5, 100, pair.ours.address(0))])
    assert pair.ours.bytes_of(0, 0, 100) == pair.theirs.bytes_of(0, 5, 100)
    for link in links:
        link.close()


BEYOND = [(3, 0, 1), (0, 2**20, 1), (0, 2**20 - 1, 2), (1, 0, 2**14 + 1), (0, 2**63, 8)]
"""Region, offset and length."""


def test_nothing_else_of_the_process_is_read(pair: Pair) -> None:
    for region, offset, count in BEYOND:
        with pytest.raises(TransportError):
            read(pair.link, [Span(region, offset, count, pair.ours.address(2))])
    link = pair.connect()
    read(link, [Span(0, 0, 64, pair.ours.address(0))])
    assert pair.ours.bytes_of(0, 0, 64) == pair.theirs.bytes_of(0, 0, 64), (
        "the memory is exported still"
    )
    link.close()


def test_a_door_that_is_closed_is_noticed(pair: Pair) -> None:
    pair.exported.close()
    with pytest.raises(TransportError):
        read(pair.link, [Span(0, 0, 64, pair.ours.address(0))])
    with pytest.raises(TransportError):
        pair.connect()
    pair.exported.close()


def test_a_link_that_is_closed_reads_nothing(pair: Pair) -> None:
    pair.link.close()
    pair.link.close()
    with pytest.raises(TransportError):
        read(pair.link, [Span(0, 0, 64, pair.ours.address(0))])


@pytest.mark.parametrize("closes", ["export", "link"])
def test_closing_ends_a_read_under_way(pair: Pair, closes: str) -> None:
    begun = threading.Event()

    def read_on() -> None:
        """Far more than can have been read before the other side is closed."""
        spans = [Span(2, 0, 3 * 2**20, pair.ours.address(2))]
        read(pair.link, spans)
        begun.set()
        while True:
            read(pair.link, spans * 64)

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read_on)
        assert begun.wait(20)
        (pair.exported if closes == "export" else pair.link).close()
        with pytest.raises(TransportError):
            reading.result(20)


@pytest.mark.parametrize("fault", ["an error of ours", "no further thread"])
def test_a_read_that_fails_leaves_nobody_writing(
    monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """One share has begun, the next fails in a way that nobody foresaw; the first goes on for a while."""
    pair = Pair("tcp")
    begun, goes_on = threading.Event(), threading.Event()
    num_begun = itertools.count()
    ended: list[int] = []
    start = threading.Thread.start

    def share(_self: tcp.TcpLink, _spans: object, _deadline: float) -> None:
        if not threading.current_thread().name.startswith("kv-tcp-read"):
            assert begun.wait(20)
            raise MemoryError
        begun.set()
        assert goes_on.wait(20)
        ended.append(1)

    def start_one(thread: threading.Thread) -> None:
        if thread.name.startswith("kv-tcp-read") and next(num_begun):
            assert begun.wait(20)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(tcp.TcpLink, "_read", share)
    monkeypatch.setattr(tcp, "_STREAM_BYTES", 2**20)
    if fault == "no further thread":
        monkeypatch.setattr(threading.Thread, "start", start_one)
    timer = threading.Timer(0.05, goes_on.set)
    start(timer)
    with pytest.raises((MemoryError, RuntimeError)):
        read(pair.link, [Span(2, 0, 3 * 2**20, pair.ours.address(2))])
    assert len(ended) == (1 if fault == "no further thread" else 2)
    timer.join()
    monkeypatch.undo()
    pair.close()


def test_a_door_of_another_memory_is_not_taken_for_it(pair: Pair) -> None:
    other = Memory(4)
    exported = make(pair.kind, other).export()
    link = pair.fetcher.connect(exported.descriptor, soon())
    read(link, [Span(0, 0, 64, pair.ours.address(0))])
    assert pair.ours.bytes_of(0, 0, 64) == other.bytes_of(0, 0, 64)
    link.close()
    exported.close()
    other.close()


def test_descriptors_that_make_no_sense(pair: Pair) -> None:
    for descriptor in (b"", b"garbage", b"\x93\x01\x02\x03", b"\xc1" * 100):
        with pytest.raises(TransportError):
            pair.fetcher.connect(descriptor, soon())


def test_threads_end_with_doors_and_links() -> None:
    before = set(threading.enumerate())
    for name in ("shm", "tcp"):
        pair = Pair(name)
        links = [pair.connect() for _ in range(3)]
        read(pair.link, [Span(2, 0, 3 * 2**20, pair.ours.address(2))])
        for link in links:
            link.close()
        pair.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(5)
    assert set(threading.enumerate()) == before
