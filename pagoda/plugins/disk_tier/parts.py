# SPDX-License-Identifier: Apache-2.0
"""Parts of objects, each of one place in a block, for contexts that are streamed layer by layer.

An object's checksum is of all of it. So the first part that is wanted of one comes with all others, whose own
sums are kept in memory: parts that are read alone are checked by them.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from crc32c import crc32c

from pagoda.plugins.disk_tier.objects import ALIGNMENT, HEADER_BYTES, ObjectError, ObjectFiles
from pagoda.worker.kv.segments import BlockPart
from pagoda.worker.kv.staging import SegmentUnreadableError

MOST_KNOWN = 2**16
"""Objects whose sums are kept: those of a context of a million tokens in blocks of 16."""
_RELEASE_THE_GIL = 1


class ObjectParts:
    """The parts of one rank's objects."""

    def __init__(self, files: ObjectFiles, parts: Sequence[BlockPart]) -> None:
        self._files = files
        self._parts = parts
        self.begins = [(HEADER_BYTES + part.first) % ALIGNMENT for part in parts]
        self._sums: OrderedDict[bytes, list[int]] = OrderedDict()
        """CRC-32C of each part by key, those that were used last at the end."""
        self._lock = threading.Lock()

    def open_reader(self) -> ObjectPartReader:
        return ObjectPartReader(self._files, self)

    def known(self, key: bytes) -> list[int] | None:
        with self._lock:
            sums = self._sums.get(key)
            if sums is not None:
                self._sums.move_to_end(key)
            return sums

    def remember(self, key: bytes, payload: memoryview) -> None:
        """Keeps the sums of an object that has been checked."""
        sums = [_sum(payload[part.first : part.end]) for part in self._parts]
        with self._lock:
            self._sums[key] = sums
            if len(self._sums) > MOST_KNOWN:
                self._sums.popitem(last=False)

    def span(self, place: int) -> tuple[int, int]:
        """First byte of a place's part in an object, and the one behind it."""
        part = self._parts[place]
        return HEADER_BYTES + part.first, HEADER_BYTES + part.end


class ObjectPartReader:
    """Reads parts for one thread."""

    def __init__(self, files: ObjectFiles, parts: ObjectParts) -> None:
        self._files, self._parts = files, parts
        self._buffer = files.new_buffer()

    def read(self, key: bytes, place: int, into: memoryview) -> None:
        begin, end = self._parts.span(place)
        first = begin - begin % ALIGNMENT
        try:
            sums = self._parts.known(key)
            if sums is None:
                self._files.read(key, self._buffer)
                self._parts.remember(key, self._files.payload(self._buffer))
                into[begin - first : end - first] = self._buffer[begin:end]
                return
            num_bytes = -(-(end - first) // ALIGNMENT) * ALIGNMENT
            self._files.read_part(key, first, into[:num_bytes])
            if _sum(into[begin - first : end - first]) != sums[place]:
                raise ObjectError("a part of it has changed")
        except ObjectError as error:
            raise SegmentUnreadableError(str(error)) from error


def _sum(part: memoryview) -> int:
    return crc32c(part, gil_release_mode=_RELEASE_THE_GIL)
