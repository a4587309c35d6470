"""Common parts of links that read memory by its address."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import msgspec

from pagoda.pd.transport.base import Region, Span, TransportError

DescriptorT = TypeVar("DescriptorT")


class Piece(NamedTuple):
    """A contiguous piece to read, by addresses."""

    source: int
    """Address in the other process, or of its memory as mapped into this one."""
    target: int
    num_bytes: int


def read_descriptor(descriptor: bytes, kind: type[DescriptorT]) -> DescriptorT:
    """
    Raises:
        TransportError: `descriptor` is none.
    """
    try:
        return msgspec.msgpack.decode(descriptor, type=kind)
    except msgspec.MsgspecError as error:
        raise TransportError(f"the descriptor of the memory makes no sense: {error}") from None


def check_time(deadline: float) -> None:
    """
    Raises:
        TransportError: it is later than `deadline` (`time.monotonic`).
    """
    if time.monotonic() > deadline:
        raise TransportError("it took too long")


def find_pieces(regions: Sequence[Region], spans: Sequence[Span]) -> list[Piece]:
    """Returns the addresses of spans of the exporter's regions.

    Raises:
        TransportError: there is no such memory.
    """
    pieces = []
    for span in spans:
        if not 0 <= span.region < len(regions):
            raise TransportError(f"there is no region {span.region}")
        region = regions[span.region]
        if span.offset < 0 or span.offset + span.num_bytes > region.num_bytes:
            raise TransportError(f"region {span.region} ends before what is to be read")
        pieces.append(Piece(region.address + span.offset, span.target, span.num_bytes))
    return pieces


def batches(spans: Iterable[Span], most_bytes: int, most_spans: int) -> Iterator[list[Span]]:
    """Splits spans, in order, into batches of at most `most_bytes` and `most_spans`."""
    batch: list[Span] = []
    room = most_bytes
    for region, offset, left, target in spans:
        while left:
            count = min(left, room)
            batch.append(Span(region, offset, count, target))
            offset, target, left, room = offset + count, target + count, left - count, room - count
            if room == 0 or len(batch) == most_spans:
                yield batch
                batch, room = [], most_bytes
    if batch:
        yield batch


class Readers:
    """Counts the reads of a link, so that its resources are released when it is closed and no read is left.

    Closing does not wait for reads.
    """

    def __init__(self, release: Callable[[], None]) -> None:
        """`release` is called once, when no thread reads or will read, by `close` or by the last read."""
        self._release = release
        self._turn = threading.Lock()
        """Held by a thread in `read_batches`."""
        self._lock = threading.Lock()
        self._num_reads = 0
        self._closed_at: float | None = None

    @property
    def is_closed(self) -> bool:
        return self._closed_at is not None

    def deadline(self, deadline: float, farewell_s: float) -> float:
        """Returns `deadline`, or an earlier one: `farewell_s` after the link was closed."""
        closed_at = self._closed_at
        return deadline if closed_at is None else min(deadline, closed_at + farewell_s)

    def check(self) -> None:
        """
        Raises:
            TransportError: the link has been closed.
        """
        if self.is_closed:
            raise TransportError("the connection was closed")

    @contextmanager
    def reading(self) -> Iterator[None]:
        """
        Raises:
            TransportError: the link has been closed, before or meanwhile.
        """
        with self._lock:
            self.check()
            self._num_reads += 1
        try:
            yield
            self.check()
        finally:
            with self._lock:
                self._num_reads -= 1
                is_last = self.is_closed and self._num_reads == 0
            if is_last:
                self._release()

    def read_batches(
        self,
        read: Callable[[list[Piece]], None],
        batches: Iterable[list[Span]],
        regions: Sequence[Region],
        deadline: float,
    ) -> None:
        """Calls `read` with each batch of spans of `regions`, for one thread at a time.

        Raises:
            TransportError: the link has been closed, there is no such memory, or it is later than `deadline`.
        """
        with self.reading(), self._turn:
            for batch in batches:
                self.check()
                check_time(deadline)
                read(find_pieces(regions, batch))

    def close(self) -> None:
        """Closes the link; callable twice, from any thread, also from one that reads."""
        with self._lock:
            if self.is_closed:
                return
            self._closed_at = time.monotonic()
            is_idle = self._num_reads == 0
        if is_idle:
            self._release()
