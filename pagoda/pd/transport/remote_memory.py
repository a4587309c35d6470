"""What is common to links that read memory by its address."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from pagoda.pd.transport.base import Region, Span, TransportError

DescriptorT = TypeVar("DescriptorT")


class Piece(NamedTuple):
    """A contiguous piece to read, by addresses."""

    source: int
    """An address in the other process, or of its memory where this one has it."""
    target: int
    num_bytes: int


def read_descriptor(descriptor: bytes, kind: type[DescriptorT]) -> DescriptorT:
    """
    Raises:
        TransportError: it is none.
    """
    try:
        return msgspec.msgpack.decode(descriptor, type=kind)
    except msgspec.MsgspecError as error:
        raise TransportError(f"what describes the door makes no sense: {error}") from None


def find_pieces(regions: Sequence[Region], spans: Sequence[Span]) -> list[Piece]:
    """Where spans of the other side's regions lie.

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


def batches(pieces: Sequence[Piece], most_bytes: int, most_pieces: int) -> Iterator[list[Piece]]:
    """All of them in their order, cut where one would be too much."""
    batch: list[Piece] = []
    room = most_bytes
    for source, target, left in pieces:
        while left:
            count = min(left, room)
            batch.append(Piece(source, target, count))
            source, target, left, room = source + count, target + count, left - count, room - count
            if room == 0 or len(batch) == most_pieces:
                yield batch
                batch, room = [], most_bytes
    if batch:
        yield batch
