# SPDX-License-Identifier: Apache-2.0
"""The engine's scanner of disks on other hosts: their ranks scan, and tell what they find.

It does as `DiskScanner` does. It goes with the workers that it asks; a new one follows with the next workers.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from pagoda.kv.connector import IsThere, OtherBlocks
from pagoda.kv.post import Listener, TierPost
from pagoda.messages.transfers import TierPlace
from pagoda.plugins.disk_tier.directory import TIER
from pagoda.plugins.disk_tier.scanner import OWN, FanOutListed, News, Probe, ProbeAnswer
from pagoda.plugins.disk_tier.words import (
    Listed,
    Look,
    Open,
    Remove,
    Rescan,
    Word,
    decode_news,
    encode_word,
)

logger = logging.getLogger(__name__)

_POLL_BYTES = 2**17
"""Bytes of news that are read at a time, some thousand objects."""


@dataclass(eq=False)
class _Probing:
    """A probe under way. Other blocks are asked for in rounds: which are of use depends on which are there."""

    probe: Probe
    keys: Sequence[bytes]
    others: OtherBlocks | None
    found: list[bytes] | None = None
    """Leading keys that are there; None while that is not known."""
    known: dict[bytes, bool] = field(default_factory=dict)
    """Other blocks, and if they are there."""
    asked: list[bytes] = field(default_factory=list)


class FarScanner:
    """Asks the ranks through the post. Nothing here waits."""

    def __init__(self, directories: Sequence[TierPlace], post: TierPost) -> None:
        self._directories = tuple(directories)
        self._has_other_hosts = len({it.host for it in directories}) > 1
        self._post = post
        self._is_connected = False
        self._unsent: list[Word] = []
        """Words for workers that are not there yet."""
        self._numbers = itertools.count()
        self._asked: dict[int, _Probing] = {}
        """Probes that await an answer, by the number of the question."""
        self._answers: deque[ProbeAnswer] = deque()
        self._inbox: deque[bytes] = deque()
        self._readable = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_closed = False
        post.listen(TIER, Listener(self._take, self._connected))

    def _connected(self) -> None:
        self._is_connected = True
        words, self._unsent = self._unsent, []
        for word in (Open(self._directories), *words):
            self._tell(word)

    def _tell(self, word: Word) -> None:
        if self._is_connected:
            self._post.tell(TIER, encode_word(word))
        else:
            self._unsent.append(word)

    def _take(self, body: bytes) -> None:
        if not self._is_closed:
            self._inbox.append(body)
            os.eventfd_write(self._readable, 1)

    def probe(self, probe: Probe, keys: Sequence[bytes], others: OtherBlocks | None = None) -> None:
        """See `DiskScanner.probe`."""
        probing = _Probing(probe, keys, others)
        if keys:
            self._ask(probing, list(keys), is_prefix=True)
        else:
            self._go_on(probing, [])

    def _ask(self, probing: _Probing, keys: list[bytes], *, is_prefix: bool) -> None:
        number = next(self._numbers)
        self._asked[number] = probing
        probing.asked = keys
        self._tell(Look(number, keys, is_prefix))

    def _go_on(self, probing: _Probing, found: Sequence[bytes]) -> None:
        """The keys that were asked for last are there as `found` says."""
        there = set(found)
        if probing.found is None:
            probing.found = list(itertools.takewhile(there.__contains__, probing.keys))
        else:
            probing.known.update((key, key in there) for key in probing.asked)
        others: list[bytes] = []
        if probing.others is not None:
            num_found, unknown = len(probing.found), dict[bytes, None]()
            others = probing.others(num_found, _guess(probing.known, unknown, guess=True))
            if unknown:
                probing.others(num_found, _guess(probing.known, unknown, guess=False))
                self._ask(probing, list(unknown), is_prefix=False)
                return
        self._answers.append(ProbeAnswer(probing.probe, [*probing.found, *others]))
        os.eventfd_write(self._readable, 1)

    def cancel_probe(self, probe: Probe) -> None:
        """See `DiskScanner.cancel_probe`."""
        self._asked = {
            number: probing for number, probing in self._asked.items() if probing.probe != probe
        }

    def remove(self, directory: int, keys: Sequence[bytes]) -> None:
        """See `DiskScanner.remove`."""
        self._tell(Remove(directory, list(keys)))

    def rescan(self) -> None:
        """See `DiskScanner.rescan`."""
        self._tell(Rescan())

    def poll(self) -> list[News]:
        """See `DiskScanner.poll`."""
        read, news = 0, list[News]()
        while self._inbox and read < _POLL_BYTES:
            body = self._inbox.popleft()
            read += len(body)
            try:
                told = decode_news(body)
            except msgspec.DecodeError as error:
                logger.warning("A worker told what is no news of KV blocks on disk: %s.", error)
                continue
            if not isinstance(told, ProbeAnswer):
                news.append(told)
                self._pass_on(told)
            elif (probing := self._asked.pop(told.probe.number, None)) is not None:
                self._go_on(probing, told.found)
        answers, self._answers = self._answers, deque()
        if not self._inbox and (read or answers):
            os.eventfd_read(self._readable)
        return [*answers, *news]

    def _pass_on(self, news: News) -> None:
        if self._has_other_hosts and isinstance(news, FanOutListed) and news.directory == OWN:
            self._tell(Listed(news.fan_out, list(news.used_at)))

    def fileno(self) -> int:
        """File descriptor that is readable while there are news."""
        return self._readable

    def close(self) -> None:
        self._is_closed = True
        os.close(self._readable)


def _guess(known: dict[bytes, bool], unknown: dict[bytes, None], *, guess: bool) -> IsThere:
    """Says what is known of a key, and guesses what is not; notes such keys."""

    def is_there(key: bytes) -> bool:
        if key not in known:
            unknown[key] = None
        return known.get(key, guess)

    return is_there
