# SPDX-License-Identifier: Apache-2.0
"""Common parts of links that read memory by its address."""

from __future__ import annotations

import importlib
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import msgspec

from pagoda.errors import TransportError
from pagoda.kv.memory import Region
from pagoda.plugins.disaggregation.transport.base import MemorySpan

DescriptorT = TypeVar("DescriptorT")


class Piece(NamedTuple):
    """A contiguous piece to read, by addresses."""

    source: int
    """Address in the other process, or of its memory as mapped into this one."""
    target: int
    num_bytes: int


def read_descriptor(descriptor: bytes, kind: type[DescriptorT]) -> DescriptorT:
    """Raises TransportError if `descriptor` is malformed."""
    try:
        return msgspec.msgpack.decode(descriptor, type=kind)
    except msgspec.MsgspecError as error:
        raise TransportError(f"the descriptor of the memory makes no sense: {error}") from None


def check_time(deadline: float) -> None:
    """Raises TransportError if `deadline` (`time.monotonic`) has passed."""
    if time.monotonic() > deadline:
        raise TransportError("it took too long")


def find_pieces(regions: Sequence[Region], spans: Sequence[MemorySpan]) -> list[Piece]:
    """Returns the addresses of spans of the exporter's regions.

    Raises TransportError if the exporter has no such memory.
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


def batches(
    spans: Iterable[MemorySpan], most_bytes: int, most_spans: int
) -> Iterator[list[MemorySpan]]:
    """Splits spans, in order, into batches of at most `most_bytes` and `most_spans`."""
    batch: list[MemorySpan] = []
    room = most_bytes
    for region, offset, left, target in spans:
        while left:
            count = min(left, room)
            batch.append(MemorySpan(region, offset, count, target))
            offset, target, left, room = offset + count, target + count, left - count, room - count
            if room == 0 or len(batch) == most_spans:
                yield batch
                batch, room = [], most_bytes
    if batch:
        yield batch


class BatchedLink(ABC):
    """A `MemoryLink` that reads in batches.

    Closing does not wait for reads: what they need is released when no read is left.
    """

    most_bytes: int
    most_spans: int = sys.maxsize
    own_regions: Sequence[Region] = ()

    def __init__(self, regions: Sequence[Region]) -> None:
        self._regions = regions
        self._turn = threading.Lock()
        """Held by the one thread that reads."""
        self.has_failed = False
        """A read has failed, for which something may still be written."""
        self._lock = threading.Lock()
        """Guards all that follows."""
        self._num_reads = 0
        self._closed_at: float | None = None

    @abstractmethod
    def _read(self, pieces: list[Piece], deadline: float) -> None:
        """Raises TransportError, and closes the link, if not all pieces were read."""

    @abstractmethod
    def _release(self) -> None:
        """`close`, or the last read after it, calls this once, when no thread reads or will read."""

    def read(self, spans: Sequence[MemorySpan], deadline: float) -> None:
        with self._reading(), self._turn:
            for batch in batches(spans, self.most_bytes, self.most_spans):
                self._check()
                check_time(deadline)
                pieces = find_pieces(self._regions, batch)
                try:
                    self._read(pieces, deadline)
                except TransportError:
                    self.has_failed = True
                    self.close()
                    raise

    @contextmanager
    def _reading(self) -> Iterator[None]:
        with self._lock:
            self._check()
            self._num_reads += 1
        try:
            yield
            self._check()
        finally:
            with self._lock:
                self._num_reads -= 1
                is_last = self._closed_at is not None and self._num_reads == 0
            if is_last:
                self._release()

    def _check(self) -> None:
        if self._closed_at is not None:
            raise TransportError("the connection was closed")

    def shortened(self, deadline: float, farewell_s: float) -> float:
        """Returns `deadline`, or an earlier one: `farewell_s` after the link was closed."""
        closed_at = self._closed_at
        return deadline if closed_at is None else min(deadline, closed_at + farewell_s)

    def close(self) -> None:
        """Closes the link; callable twice, from any thread, also from one that reads."""
        with self._lock:
            if self._closed_at is not None:
                return
            self._closed_at = time.monotonic()
            is_idle = self._num_reads == 0
        if is_idle:
            self._release()


def load_library(module: str, name: str, remedy: str) -> Any:
    """Raises TransportError if `module` of the library `name` cannot be loaded."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise TransportError(f"{name} cannot be loaded ({error}): {remedy}") from None
