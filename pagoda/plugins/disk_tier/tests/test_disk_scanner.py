# SPDX-License-Identifier: Apache-2.0
"""The thread finds, removes and tidies up on a real disk, and sleeps while there is nothing to do."""

from __future__ import annotations

import os
import select
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import cached_property
from pathlib import Path

import msgspec
import pytest

from pagoda.ipc.clock import VirtualClock
from pagoda.messages.transfers import TierPlace
from pagoda.plugins.disk_tier import scanner as disk_scanner
from pagoda.plugins.disk_tier.objects import MANIFEST_NAME, Manifest, object_name, open_directory
from pagoda.plugins.disk_tier.scanner import (
    OWN,
    DirectoryFound,
    DiskScanner,
    FanOutListed,
    News,
    ObjectsFound,
    Probe,
    ProbeAnswer,
    Removed,
    ScanEnded,
)

ReadOnly = Callable[[Path], AbstractContextManager[None]]
KEYS = [bytes([number % 5]) + bytes([number]) * 31 for number in range(40)]


class Keeper:
    """A scanner, and what it has told so far."""

    def __init__(self, *directories: TierPlace) -> None:
        self.clock = VirtualClock()
        self.thread = DiskScanner(directories, self.clock)
        self.poller = select.poll()
        self.poller.register(self.thread.fileno(), select.POLLIN)

    def rescan(self) -> list[News]:
        """News of a scan that begins as soon as another one may."""
        self.clock.advance_to(self.clock.now() + 11)
        self.thread.rescan()
        return self.until(ScanEnded)

    def probe(self, request_id: str, keys: Sequence[bytes]) -> list[News]:
        """News up to the answer."""
        self.thread.probe(Probe(request_id), keys)
        return self.until(ProbeAnswer)

    def remove(self, directory: int, keys: Sequence[bytes]) -> list[News]:
        """News up to the first removal."""
        self.thread.remove(directory, keys)
        return self.until(Removed)

    def until(self, kind: type[News]) -> list[News]:
        """News up to the first of that kind."""
        news: list[News] = []
        while not any(isinstance(item, kind) for item in news):
            assert self.poller.poll(30_000), f"no {kind.__name__} came"
            news += self.thread.poll()
        return news

    def has_news(self) -> bool:
        return bool(self.poller.poll(0))


class Disk:
    """Directories of a model and of others under one root, and scanners of them."""

    def __init__(self, root: Path, manifest: Manifest, opened: ExitStack) -> None:
        self.root = root
        self._manifest = manifest
        self._opened = opened
        self.own = self.directory()

    @cached_property
    def other(self) -> TierPlace:
        """The directory of another model; it is made when it is asked for."""
        return self.directory(model_digest="other")

    def directory(self, **changes: object) -> TierPlace:
        changed = msgspec.structs.replace(self._manifest, **changes)
        return TierPlace("disk", str(open_directory(self.root, changed)), changed.object_bytes)

    def keep(self, *more: TierPlace, is_scanned: bool = False) -> Keeper:
        """Opens a scanner of the own directory; the first scan is over if it `is_scanned`."""
        keeper = Keeper(self.own, *more)
        self._opened.callback(keeper.thread.close)
        if is_scanned:
            keeper.until(ScanEnded)
        return keeper


@pytest.fixture
def disk(tmp_path: Path, manifest: Manifest) -> Iterator[Disk]:
    with ExitStack() as opened:
        yield Disk(tmp_path / "kv", manifest, opened)


def put(directory: TierPlace, keys: Sequence[bytes], *, age_s: float = 0) -> None:
    """Files of the right length; nobody here looks into them."""
    for key in keys:
        path = path_of(directory, key)
        path.parent.mkdir(exist_ok=True)
        path.touch()
        os.truncate(path, directory.block_bytes)
        make_old(path, age_s)


def make_old(path: Path, age_s: float) -> None:
    at = time.time() - age_s
    os.utime(path, (at, at))


def path_of(directory: TierPlace, key: bytes) -> Path:
    return Path(directory.path) / object_name(key)


def found(news: Sequence[News], directory: int = OWN) -> set[bytes]:
    return {
        key
        for item in news
        if isinstance(item, ObjectsFound) and item.directory == directory
        for key in item.used_at
    }


def listed(news: Sequence[News], directory: int = OWN) -> dict[int, set[bytes]]:
    return {
        item.fan_out: set(item.used_at)
        for item in news
        if isinstance(item, FanOutListed) and item.directory == directory
    }


def test_all_objects_are_found_with_the_time_of_their_last_use(disk: Disk) -> None:
    ages = {key: 1000 * number for number, key in enumerate(KEYS)}
    ages[KEYS[3]], ages[KEYS[7]] = -(10**9), int(time.time()) + 5000  # times that cannot be
    for key, age_s in ages.items():
        put(disk.own, [key], age_s=age_s)
    news = disk.keep().until(ScanEnded)
    assert found(news) == set(KEYS)
    assert listed(news) == {
        fan_out: {key for key in KEYS if key[0] == fan_out} for fan_out in range(5)
    }
    for item in news:
        for key, at in item.used_at.items() if isinstance(item, ObjectsFound) else ():
            wanted = max(0, min(time.time(), time.time() - ages[key]))
            assert at == pytest.approx(wanted, abs=30)


def test_foreign_files_are_no_objects_and_are_left_alone(disk: Disk) -> None:
    put(disk.own, KEYS[:1])
    fan_out = path_of(disk.own, KEYS[0]).parent
    foreign = [
        fan_out / "notes.txt",
        Path(disk.own.path) / "readme",
        disk.root / "other.txt",
    ]
    for path in foreign:
        path.write_text("mine")
        make_old(path, 10**6)
    directory = fan_out / KEYS[5].hex()[2:]
    directory.mkdir()
    (disk.root / ("a" * 64)).mkdir()  # no manifest in it
    link = fan_out / KEYS[10].hex()[2:]
    link.symlink_to(path_of(disk.own, KEYS[0]))
    assert found(disk.keep().until(ScanEnded)) == {KEYS[0]}
    assert all(path.exists() for path in [*foreign, directory, link])


def test_files_of_another_length_are_removed_with_a_warning(
    disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    put(disk.own, KEYS)
    for key in KEYS[1:]:
        os.truncate(path_of(disk.own, key), 100)
    assert found(disk.keep().until(ScanEnded)) == {KEYS[0]}
    assert not any(path_of(disk.own, key).exists() for key in KEYS[1:])
    (message,) = caplog.messages
    assert f"{len(KEYS) - 1} of a wrong length were removed" in message
    assert "100 bytes instead of 12288" in message


def test_what_a_killed_writer_left_is_removed_once_it_is_old(disk: Disk) -> None:
    put(disk.own, KEYS[:1])
    fan_out = path_of(disk.own, KEYS[0]).parent
    places = [fan_out, Path(disk.own.path)]
    for place in places:
        for name, age_s in ((".tmp-old", 700), (".tmp-new", 500)):
            (place / name).write_bytes(b"half")
            make_old(place / name, age_s)
    disk.keep().until(ScanEnded)
    for place in places:
        assert [path.name for path in place.glob(".tmp-*")] == [".tmp-new"]


def test_directories_of_other_models_are_found_behind_the_own_one(disk: Disk) -> None:
    other = disk.directory(model_digest="other", payload_bytes=50_000)
    put(disk.own, KEYS[:3])
    put(other, KEYS[2:6])
    news = disk.keep().until(ScanEnded)
    assert found(news) == set(KEYS[:3])
    (meeting,) = [item for item in news if isinstance(item, DirectoryFound)]
    assert meeting == DirectoryFound(1, other.block_bytes)
    assert found(news, 1) == set(KEYS[2:6])
    kinds = [item.directory for item in news if isinstance(item, FanOutListed)]
    assert kinds == sorted(kinds)


@pytest.mark.parametrize(
    "content",
    [
        b'{"format_version": 9}',
        b'{"model": "\xff"}',
        b"[" * 60_000,
        b'{"payload_bytes": -1000000000000}',
        b"",
        None,
    ],
    ids=["version", "no-text", "deep", "negative", "empty", "pipe"],
)
def test_a_directory_whose_manifest_means_nothing_is_left_out_with_a_warning(
    disk: Disk, caplog: pytest.LogCaptureFixture, content: bytes | None
) -> None:
    manifest = Path(disk.other.path) / MANIFEST_NAME
    if content is None:
        manifest.unlink()
        os.mkfifo(manifest)
    else:
        manifest.write_bytes(content)
    put(disk.own, KEYS)
    put(disk.other, KEYS)
    keeper = disk.keep()
    news = keeper.until(ScanEnded)
    assert found(news) == set(KEYS)
    assert not any(isinstance(item, DirectoryFound) for item in news)
    assert caplog.text.count("its manifest cannot be understood") == 1
    assert keeper.probe("1", KEYS) == [ProbeAnswer(Probe("1"), KEYS)]


def test_work_that_breaks_is_answered_and_other_work_goes_on(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put(disk.own, KEYS)
    keeper = disk.keep(is_scanned=True)

    def broken(*_: object) -> None:
        raise ValueError("nobody foresaw this")

    with monkeypatch.context() as patch:
        patch.setattr(disk_scanner, "object_name", broken)
        assert keeper.probe("1", KEYS) == [ProbeAnswer(Probe("1"), ())]
        assert keeper.remove(OWN, KEYS[:1]) == [Removed(OWN, KEYS[:1])]
        patch.setattr(disk_scanner, "list_files", broken)
        keeper.clock.advance_to(11)
        keeper.thread.rescan()
        while caplog.text.count("ValueError: nobody foresaw this") < 3:
            keeper.thread.probe(Probe("2"), [])
            keeper.until(ProbeAnswer)
    assert keeper.probe("3", KEYS) == [ProbeAnswer(Probe("3"), KEYS)]
    fresh = bytes(32)
    put(disk.own, [fresh])
    assert fresh in found(keeper.rescan())


def test_other_ranks_are_part_of_the_own_directory(disk: Disk) -> None:
    second = disk.directory(tensor_parallel_rank=1)
    put(disk.own, KEYS[:4])
    put(second, KEYS[:4])
    put(second, KEYS[4:5], age_s=500)
    put(second, KEYS[5:6], age_s=700)  # of no use without that of rank 0
    keeper = disk.keep(second)
    news = keeper.until(ScanEnded)
    assert not any(isinstance(item, DirectoryFound) for item in news)
    assert found(news) == set(KEYS[:4])
    assert path_of(second, KEYS[4]).exists()
    assert not path_of(second, KEYS[5]).exists()
    assert keeper.remove(OWN, KEYS[:2]) == [Removed(OWN, KEYS[:2])]
    for directory in (disk.own, second):
        assert [path_of(directory, key).exists() for key in KEYS[:4]] == [False, False, True, True]


def test_many_removals_are_told_in_parts(disk: Disk) -> None:
    keys = [number.to_bytes(32) for number in range(600)]
    for directory in (disk.own, disk.other):
        put(directory, keys)
    keeper = disk.keep(is_scanned=True)
    keeper.thread.remove(1, keys)
    removed: list[bytes] = []
    while len(removed) < len(keys):
        parts = [item for item in keeper.until(Removed) if isinstance(item, Removed)]
        assert all(len(part.keys) <= 256 for part in parts)
        removed += [key for part in parts for key in part.keys]
    assert removed == keys
    assert [len(list(Path(it.path).glob("*/*"))) for it in (disk.own, disk.other)] == [600, 0]


def test_what_cannot_be_removed_is_told_as_well(
    disk: Disk, read_only: ReadOnly, caplog: pytest.LogCaptureFixture
) -> None:
    put(disk.own, KEYS)
    keeper = disk.keep(is_scanned=True)
    with read_only(Path(disk.own.path)):
        keeper.thread.remove(OWN, [*KEYS, bytes(32)])
        assert [len(item.keys) for item in keeper.until(Removed)] == [len(KEYS) + 1]
    assert all(path_of(disk.own, key).exists() for key in KEYS)
    assert caplog.text.count("WARNING") == 1


def test_a_probe_that_is_forgotten_before_its_turn_is_not_answered(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = disk.keep(is_scanned=True)
    has_begun, may_go_on = threading.Event(), threading.Event()
    name = disk_scanner.object_name

    def hanging(key: bytes) -> str:
        has_begun.set()
        assert may_go_on.wait(30)
        return name(key)

    monkeypatch.setattr(disk_scanner, "object_name", hanging)
    for number in range(4):
        keeper.thread.probe(Probe(str(number)), KEYS)
    assert has_begun.wait(30)
    keeper.thread.cancel_probe(Probe("0"))  # too late
    keeper.thread.cancel_probe(Probe("1"))
    keeper.thread.cancel_probe(Probe("2"))
    may_go_on.set()
    answers: list[News] = []
    while ProbeAnswer(Probe("3"), []) not in answers:
        answers += keeper.until(ProbeAnswer)
    assert sorted(answers) == [ProbeAnswer(Probe("0"), []), ProbeAnswer(Probe("3"), [])]


def test_a_probe_finds_objects_up_to_the_first_that_is_none(disk: Disk) -> None:
    keeper = disk.keep(is_scanned=True)
    put(disk.own, [*KEYS[:4], *KEYS[5:9:2]])
    os.truncate(path_of(disk.own, KEYS[3]), 7)
    path_of(disk.own, KEYS[6]).mkdir()
    path_of(disk.own, KEYS[8]).symlink_to("/dev/zero")
    for number, num_found in enumerate([3, 2, 1, 0, 0, 1, 0, 1, 0]):
        name = str(number)
        assert keeper.probe(name, KEYS[number:]) == [
            ProbeAnswer(Probe(name), KEYS[number : number + num_found])
        ]


def test_probes_are_answered_while_nobody_takes_what_a_scan_finds(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_scanner, "_PIECE", 4)
    monkeypatch.setattr(disk_scanner, "_MAX_BACKLOG", 8)
    monkeypatch.setattr(disk_scanner, "_POLL_OBJECTS", 2)
    put(disk.own, KEYS)
    keeper = disk.keep()
    keeper.thread.probe(Probe("1"), KEYS)
    news = keeper.until(ProbeAnswer)
    assert not any(isinstance(item, ScanEnded) for item in news)
    news += keeper.until(ScanEnded)
    assert found(news) == set(KEYS)
    assert not keeper.has_news()


def test_a_rescan_waits_until_the_last_one_is_long_ago(disk: Disk) -> None:
    keeper = disk.keep(is_scanned=True)
    put(disk.own, KEYS)
    keeper.clock.advance_to(9)
    keeper.thread.rescan()
    assert keeper.probe("1", []) == [ProbeAnswer(Probe("1"), [])]
    keeper.clock.advance_to(11)
    assert not keeper.has_news()  # nobody has asked
    keeper.thread.rescan()
    assert found(keeper.until(ScanEnded)) == set(KEYS)


def test_a_rescan_lists_what_has_changed_only(disk: Disk) -> None:
    for directory in (disk.own, disk.other):
        put(directory, KEYS)
        for fan_out in range(5):
            make_old(Path(directory.path) / f"{fan_out:02x}", 3600)
    keeper = disk.keep(is_scanned=True)
    path_of(disk.own, KEYS[0]).unlink()
    path_of(disk.other, KEYS[1]).unlink()
    news = keeper.rescan()
    assert listed(news) == {0: {key for key in KEYS[1:] if key[0] == 0}}
    assert listed(news, 1) == {1: {key for key in KEYS[2:] if key[0] == 1}}


def test_a_rescan_tells_one_by_one_only_what_was_used_since(disk: Disk) -> None:
    keys = [bytes([0, number]) * 16 for number in range(20)]
    put(disk.own, keys, age_s=5000)
    keeper = disk.keep()
    assert found(keeper.until(ScanEnded)) == set(keys)
    put(disk.own, keys[3:4])  # used by another server
    new, copied = b"\0" + b"n" * 31, b"\0" + b"c" * 31
    put(disk.own, [new])
    put(disk.own, [copied], age_s=9000)
    news = keeper.rescan()
    assert found(news) == {keys[3], new}
    assert listed(news) == {0: {*keys, new, copied}}


def test_a_fan_out_directory_that_has_just_changed_is_listed_again(
    disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    put(disk.own, KEYS[:1])
    put(disk.other, KEYS)
    keeper = disk.keep(is_scanned=True)
    shutil.rmtree(disk.other.path)  # nobody misses it
    news = keeper.rescan()
    # Within one tick of the file system's clock a second change leaves the same time.
    assert listed(news) == {0: {KEYS[0]}}
    assert listed(news, 1) == {fan_out: set() for fan_out in range(5)}
    assert not caplog.messages


def test_directories_that_are_gone_are_empty_and_one_warning(
    disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    put(disk.own, KEYS)
    put(disk.other, KEYS)
    keeper = disk.keep(is_scanned=True)
    shutil.rmtree(disk.root)
    assert keeper.probe("1", KEYS) == [ProbeAnswer(Probe("1"), [])]
    keeper.remove(OWN, KEYS)
    news = keeper.rescan()
    empty: dict[int, set[bytes]] = {fan_out: set() for fan_out in range(5)}
    assert listed(news) == listed(news, 1) == empty
    assert not found(news)
    warnings = [record.getMessage() for record in caplog.records]
    assert len([line for line in warnings if disk.own.path in line]) == 1
    assert not listed(keeper.rescan())
    assert len(caplog.records) == len(warnings)
    put(disk.directory(), KEYS)
    assert found(keeper.rescan()) == set(KEYS)


def test_closing_ends_the_thread_in_the_middle_of_a_scan(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_scanner, "_PIECE", 2)
    monkeypatch.setattr(disk_scanner, "_MAX_BACKLOG", 4)
    put(disk.own, KEYS)
    keeper = Keeper(disk.own)
    assert keeper.poller.poll(30_000)
    keeper.thread.close()
    assert not keeper.thread.thread.is_alive()
