"""Requests in line, sorted by `order_key`, with sums of what the ones in front need."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from operator import attrgetter
from typing import NamedTuple

from pagoda.engine.request import OrderKey, Request

_MAX_CHUNK = 128
_key = attrgetter("order_key")


class Reserved(NamedTuple):
    """Sequences and blocks that some requests keep, or will need."""

    num_seqs: int
    num_blocks: int


class WaitingQueue:
    """A sorted list in chunks: adding, removing and summing take O(length / _MAX_CHUNK + _MAX_CHUNK)."""

    def __init__(self) -> None:
        self._chunks: list[list[Request]] = []
        """None of them is empty."""
        self._block_sums: list[int] = []
        """`reserved_blocks` of each chunk's requests, added up."""
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Request]:
        for chunk in self._chunks:
            yield from chunk

    def add(self, request: Request) -> None:
        """`reserved_blocks` must not change while the request is in line."""
        index = min(self._chunk_of(request.order_key), len(self._chunks) - 1)
        if index < 0:
            self._chunks.append([request])
            self._block_sums.append(request.reserved_blocks)
        else:
            chunk = self._chunks[index]
            insort(chunk, request, key=_key)
            self._block_sums[index] += request.reserved_blocks
            if len(chunk) > _MAX_CHUNK:
                self._split(index)
        self._length += 1

    def remove(self, request: Request) -> None:
        index = self._chunk_of(request.order_key)
        chunk = self._chunks[index]
        del chunk[bisect_left(chunk, request.order_key, key=_key)]
        self._block_sums[index] -= request.reserved_blocks
        if not chunk:
            del self._chunks[index], self._block_sums[index]
        self._length -= 1

    def after(self, key: OrderKey) -> Iterator[Request]:
        """Requests behind `key`; the queue must not change meanwhile."""
        index = self._chunk_of(key)
        if index < len(self._chunks):
            chunk = self._chunks[index]
            yield from chunk[bisect_right(chunk, key, key=_key) :]
            for chunk in self._chunks[index + 1 :]:
                yield from chunk

    def ahead_of(self, key: OrderKey) -> Reserved:
        """Requests in front of `key`, and the blocks they need."""
        index = self._chunk_of(key)
        num_seqs = sum(len(chunk) for chunk in self._chunks[:index])
        num_blocks = sum(self._block_sums[:index])
        if index < len(self._chunks):
            chunk = self._chunks[index]
            end = bisect_left(chunk, key, key=_key)
            num_seqs += end
            num_blocks += sum(request.reserved_blocks for request in chunk[:end])
        return Reserved(num_seqs, num_blocks)

    def _chunk_of(self, key: OrderKey) -> int:
        """Index of the chunk in which `key` belongs; the number of chunks if it is behind all."""
        return bisect_left(self._chunks, key, key=lambda chunk: chunk[-1].order_key)

    def _split(self, index: int) -> None:
        chunk = self._chunks[index]
        half = len(chunk) // 2
        front, back = chunk[:half], chunk[half:]
        self._chunks[index : index + 1] = [front, back]
        sums = [sum(request.reserved_blocks for request in part) for part in (front, back)]
        self._block_sums[index : index + 1] = sums
