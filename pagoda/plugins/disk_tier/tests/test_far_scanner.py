# SPDX-License-Identifier: Apache-2.0
"""Disks of two hosts, scanned by the ranks there: three ranks, of which two share a host."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import Queue

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagoda.kv.connector import IsThere
from pagoda.kv.post import TierPost
from pagoda.messages.transfers import TierPlace, TierWord
from pagoda.plugins.disk_tier.far_scanner import FarScanner
from pagoda.plugins.disk_tier.host_scanner import HostScanner
from pagoda.plugins.disk_tier.objects import ALIGNMENT, object_name
from pagoda.plugins.disk_tier.scanner import (
    OWN,
    FanOutListed,
    News,
    ObjectsFound,
    Probe,
    ProbeAnswer,
    Removed,
    ScanEnded,
)
from pagoda.plugins.disk_tier.words import Look, decode_word, encode_news

KEYS = [bytes([number % 3]) + bytes([number]) * 31 for number in range(12)]


class Hosts:
    """The engine's scanner, and the ranks."""

    def __init__(self, root: Path) -> None:
        self.places = [
            TierPlace("disk", str(root / host / f"{rank}"), ALIGNMENT, host)
            for rank, host in enumerate(["a", "b", "b"])
        ]
        for place in self.places:
            os.makedirs(place.path)
        self.told: Queue[bytes] = Queue()
        self.post = TierPost()
        self.ranks = [HostScanner(place, self.told.put) for place in self.places]
        self.scanner = FarScanner(self.places, self.post)

    def put(self, rank: int, keys: Sequence[bytes], age_s: float = 0.0) -> None:
        for key in keys:
            path = self.path(rank, key)
            path.parent.mkdir(exist_ok=True)
            path.touch()
            os.truncate(path, ALIGNMENT)
            os.utime(path, (time.time() - age_s,) * 2)

    def path(self, rank: int, key: bytes) -> Path:
        return Path(self.places[rank].path) / object_name(key)

    def deliver(self) -> None:
        for word in self.post.drain():
            for rank in self.ranks:
                rank.hear(word.body)

    def until(self, kind: type[News]) -> list[News]:
        news: list[News] = []
        while not any(isinstance(it, kind) for it in news):
            self.deliver()
            if not (news_now := self.scanner.poll()):
                self.post.take(TierWord("disk", self.told.get(timeout=30)))
            news += news_now
        self.deliver()
        return news

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        self.scanner.close()


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    hosts = Hosts(tmp_path)
    yield hosts
    hosts.close()


def test_what_the_first_rank_has_is_found(hosts: Hosts) -> None:
    hosts.put(0, KEYS[:6])
    hosts.put(1, KEYS[:9])
    hosts.post.workers_ready()
    news = hosts.until(ScanEnded)
    found = {key for it in news if isinstance(it, ObjectsFound) for key in it.used_at}
    assert found == set(KEYS[:6])
    hosts.scanner.probe(Probe("r", 7), KEYS)
    assert ProbeAnswer(Probe("r", 7), KEYS[:6]) in hosts.until(ProbeAnswer)


def test_a_probe_before_the_workers_are_there_is_answered_once_they_are(hosts: Hosts) -> None:
    hosts.put(0, KEYS[:2])
    hosts.scanner.probe(Probe("early", 1), KEYS[:4])
    hosts.scanner.probe(Probe("cancelled", 2), KEYS[:4])
    hosts.scanner.cancel_probe(Probe("cancelled", 2))
    hosts.post.workers_ready()
    answers = [it for it in hosts.until(ProbeAnswer) if isinstance(it, ProbeAnswer)]
    assert answers == [ProbeAnswer(Probe("early", 1), KEYS[:2])]


def test_all_ranks_remove_what_goes(hosts: Hosts) -> None:
    for rank in range(3):
        hosts.put(rank, KEYS[:4])
    hosts.post.workers_ready()
    hosts.until(ScanEnded)
    hosts.scanner.remove(OWN, KEYS[:3])
    assert Removed(OWN, KEYS[:3]) in hosts.until(Removed)
    while any(hosts.path(rank, key).exists() for rank in range(3) for key in KEYS[:3]):
        pass
    assert all(hosts.path(rank, KEYS[3]).exists() for rank in range(3))


def test_what_the_first_rank_lacks_goes_on_other_hosts_unless_it_has_just_come(
    hosts: Hosts,
) -> None:
    hosts.put(0, KEYS[:3], age_s=2000.0)
    for rank in (1, 2):
        hosts.put(rank, KEYS[:6], age_s=2000.0)
        hosts.put(rank, KEYS[6:9])
    hosts.post.workers_ready()
    listed = [it for it in hosts.until(ScanEnded) if isinstance(it, FanOutListed)]
    assert {key for it in listed for key in it.used_at} == set(KEYS[:3])
    while any(hosts.path(rank, key).exists() for rank in (1, 2) for key in KEYS[3:6]):
        pass
    kept = [*KEYS[:3], *KEYS[6:9]]
    assert all(hosts.path(rank, key).exists() for rank in (1, 2) for key in kept)


def test_news_that_cannot_be_read_is_passed_over(
    hosts: Hosts, caplog: pytest.LogCaptureFixture
) -> None:
    for body in (b"", b"\xc1", encode_news(ScanEnded(1.0))[:-1], b"\x92\x63\xc0"):
        hosts.post.take(TierWord("disk", body))
    hosts.post.take(TierWord("disk", encode_news(ScanEnded(1.0))))
    assert hosts.scanner.poll() == [ScanEnded(1.0)]
    assert caplog.text.count("what is no news") == 4


@given(there=st.sets(st.sampled_from(KEYS)), wanted=st.lists(st.sampled_from(KEYS), unique=True))
def test_other_blocks_are_found_as_if_the_disk_were_here(
    there: set[bytes], wanted: list[bytes]
) -> None:
    """In a few rounds: one half as far as it goes, then the last of the other half that is there."""
    chain, ends = wanted[: len(wanted) // 2], wanted[len(wanted) // 2 :]

    def others(num_found: int, is_there: IsThere) -> list[bytes]:
        found = []
        for key in chain[num_found % 2 :]:
            if not is_there(key):
                break
            found.append(key)
        return [*found, *[key for key in reversed(ends) if is_there(key)][:1]]

    post = TierPost()
    scanner = FarScanner([TierPlace("disk", "/d", 1, "a")], post)
    post.workers_ready()
    scanner.probe(Probe("r", 1), KEYS[:4], others)
    answers: list[News] = []
    num_rounds = 0
    while not answers:
        for word in post.drain():
            look = decode_word(word.body)
            if isinstance(look, Look):
                num_rounds += 1
                found = [key for key in look.keys if key in there]
                news = encode_news(ProbeAnswer(Probe("", look.number), found))
                post.take(TierWord("disk", news))
        answers += scanner.poll()
    scanner.close()
    leading = [key for index, key in enumerate(KEYS[:4]) if there >= set(KEYS[: index + 1])]
    expected = [*leading, *others(len(leading), there.__contains__)]
    assert answers == [ProbeAnswer(Probe("r", 1), expected)]
    assert num_rounds <= 3
