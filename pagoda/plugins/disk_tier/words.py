# SPDX-License-Identifier: Apache-2.0
"""Messages between an engine and the scanners of disks on other hosts."""

from __future__ import annotations

from typing import Any

import msgspec

from pagoda.messages.transfers import TierPlace
from pagoda.plugins.disk_tier.scanner import (
    DirectoryFound,
    FanOutListed,
    News,
    ObjectsFound,
    ProbeAnswer,
    Removed,
    ScanEnded,
)


class Open(msgspec.Struct, frozen=True, tag="open"):
    """The first word to new workers: the directories of all ranks. Those of rank 0 stand for all."""

    directories: tuple[TierPlace, ...]


class Look(msgspec.Struct, frozen=True, tag="look"):
    """Question which keys are there. A `ProbeAnswer` to the probe of this number follows."""

    number: int
    keys: list[bytes]
    is_prefix: bool
    """Keys behind one that is not there are of no use."""


class Remove(msgspec.Struct, frozen=True, tag="remove"):
    """See `DiskScanner.remove`."""

    directory: int
    keys: list[bytes]


class Rescan(msgspec.Struct, frozen=True, tag="rescan"):
    """See `DiskScanner.rescan`."""


class Listed(msgspec.Struct, frozen=True, tag="listed"):
    """Everything that rank 0 has in a fan-out directory; what only other hosts have is of no use."""

    fan_out: int
    keys: list[bytes]


Word = Open | Look | Remove | Rescan | Listed

_KINDS: tuple[Any, ...] = (
    DirectoryFound,
    ObjectsFound,
    FanOutListed,
    ScanEnded,
    ProbeAnswer,
    Removed,
)


def encode_word(word: Word) -> bytes:
    return msgspec.msgpack.encode(word)


def decode_word(body: bytes) -> Word:
    """Raises msgspec.DecodeError: that is no word."""
    word: Word = msgspec.msgpack.decode(body, type=Word)
    return word


def encode_news(news: News) -> bytes:
    return msgspec.msgpack.encode((_KINDS.index(type(news)), news))


def decode_news(body: bytes) -> News:
    """Raises msgspec.DecodeError: that is no news."""
    kind, rest = msgspec.msgpack.decode(body, type=tuple[int, msgspec.Raw])
    if not 0 <= kind < len(_KINDS):
        raise msgspec.DecodeError(f"There is no news of kind {kind}.")
    news: News = msgspec.msgpack.decode(rest, type=_KINDS[kind])
    return news
