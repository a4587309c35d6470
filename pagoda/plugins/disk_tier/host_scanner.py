# SPDX-License-Identifier: Apache-2.0
"""The worker's half of `FarScanner`: the first rank of each host scans the directories of all ranks there.

All ranks have the same keys, so only the first rank of all tells its news; others remove what they are told to,
and what the first rank lacks.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Sequence
from functools import partial

from pagoda.ipc.clock import MonotonicClock
from pagoda.kv.connector import IsThere
from pagoda.messages.transfers import TierPlace
from pagoda.plugins.disk_tier.scanner import OWN, DiskScanner, Probe
from pagoda.plugins.disk_tier.words import (
    Listed,
    Look,
    Open,
    Remove,
    Rescan,
    decode_word,
    encode_news,
)


class HostScanner:
    """Scans for one rank once its engine has said `Open`, if that is the rank's task."""

    def __init__(self, place: TierPlace, tell: Callable[[bytes], None]) -> None:
        """`place` is that of the rank; `tell` sends news to the engine, from any thread."""
        self._place = place
        self._tell = tell
        self._tells = False
        self._scanner: DiskScanner | None = None
        self._stop = -1
        """File descriptor that ends the thread; there is none before the thread."""
        self._thread: threading.Thread | None = None

    def hear(self, body: bytes) -> None:
        """Does what the engine asks; never waits for the disk. Raises msgspec.DecodeError: it is no word."""
        word = decode_word(body)
        if isinstance(word, Open):
            self._open(word.directories)
        elif self._scanner is not None:
            self._do(self._scanner, word)

    def _open(self, directories: Sequence[TierPlace]) -> None:
        if self._scanner is not None:
            raise ValueError("The directories of KV blocks are scanned already.")
        here = [it for it in directories if it.host == self._place.host]
        if here[0] != self._place:
            return
        self._tells = directories[0] == self._place
        self._stop = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._scanner = DiskScanner(here, MonotonicClock())
        self._thread = threading.Thread(
            target=self._pass_on, args=(self._scanner,), name="kv-disk-news", daemon=True
        )
        self._thread.start()

    def _do(self, scanner: DiskScanner, word: Look | Remove | Rescan | Listed) -> None:
        match word:
            case Look(number, keys, is_prefix) if self._tells:
                probe = Probe("", number)
                if is_prefix:
                    scanner.probe(probe, keys)
                else:
                    scanner.probe(probe, (), partial(_all_there, keys))
            case Remove(directory, keys) if self._tells or directory == OWN:
                scanner.remove(directory, keys)
            case Rescan():
                scanner.rescan()
            case Listed(fan_out, keys) if not self._tells:
                scanner.remove_others(fan_out, keys)

    def _pass_on(self, scanner: DiskScanner) -> None:
        poll = select.poll()
        poll.register(scanner.fileno(), select.POLLIN)
        poll.register(self._stop, select.POLLIN)
        while self._stop not in (fd for fd, _ in poll.poll()):
            for news in scanner.poll():
                if self._tells:
                    self._tell(encode_news(news))

    def close(self) -> None:
        """Ends the threads, unless the disk does not answer."""
        scanner, self._scanner = self._scanner, None
        if scanner is not None and self._thread is not None:
            os.eventfd_write(self._stop, 1)
            self._thread.join()
            scanner.close()
            os.close(self._stop)


def _all_there(keys: Sequence[bytes], _num_found: int, is_there: IsThere) -> list[bytes]:
    return [key for key in keys if is_there(key)]
