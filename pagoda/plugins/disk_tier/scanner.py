# SPDX-License-Identifier: Apache-2.0
"""A thread that lists directories of objects, probes, removes objects, and tidies up after killed writers.

The thread works in small pieces, so that a probe, for which a request waits, never waits for a scan. After the
first scan it scans again only when something was written, not too often, and only fan-out directories that have
changed.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import stat
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from pagoda.ipc.clock import Clock
from pagoda.kv.connector import OtherBlocks
from pagoda.messages.transfers import TierPlace
from pagoda.plugins.disk_tier.objects import (
    FAN_OUTS,
    FoundFile,
    list_files,
    object_directories,
    object_name,
    read_manifest,
)

logger = logging.getLogger(__name__)

_MIN_SCAN_INTERVAL_S = 10.0
_SCAN_SHARE = 20
"""Scans take at most 1 / this of the time."""
_PIECE = 256
"""Files that are listed or removed before other jobs have their turn."""
_POLL_OBJECTS = 2048
_MAX_BACKLOG = 2**16
"""Approximate objects in news that were not polled yet; a scan waits when there are more."""
_SAME_TICK_S = 2
"""Seconds by which times of a file system may be coarse, and clocks may differ."""
_CLOSE_TIMEOUT_S = 5.0
_UNSURE = -1
"""Stands for a fan-out directory's time of change if it must be listed again."""

OWN = 0
"""Number of the directory from which blocks can be loaded; others under the same root have higher numbers."""


class DirectoryFound(NamedTuple):
    directory: int
    object_bytes: int


class ObjectsFound(NamedTuple):
    """Some of the objects in a directory: all of them once, later those used since they were last listed."""

    directory: int
    used_at: Mapping[bytes, int]
    """Key to seconds since 1970 of the last use."""


class FanOutListed(NamedTuple):
    """Everything in one fan-out directory has been found."""

    directory: int
    fan_out: int
    used_at: Mapping[bytes, int]
    """Last uses, as in `ObjectsFound`, of all objects that are there."""
    listed_at: int
    """Seconds since 1970; what was written later may not be in `used_at`."""


class ScanEnded(NamedTuple):
    """The scan has found everything that was there when it began."""

    seconds: float


class Probe(NamedTuple):
    """Asks for a request which keys are on disk."""

    request_id: str
    number: int = 0
    """Tells the probe from earlier ones for the request, whose answers may still come."""


class ProbeAnswer(NamedTuple):
    probe: Probe
    found: Sequence[bytes]
    """The keys that are there, up to the first that is not; then other blocks that are of use behind these."""


class Removed(NamedTuple):
    """The objects are gone, or cannot be removed: objects found from now on are there."""

    directory: int
    keys: Sequence[bytes]


News = DirectoryFound | ObjectsFound | FanOutListed | ScanEnded | ProbeAnswer | Removed


class Scanner(Protocol):
    """Looks at directories for the engine, which never waits for it; `DiskScanner` says how."""

    def probe(
        self, probe: Probe, keys: Sequence[bytes], others: OtherBlocks | None = None
    ) -> None: ...

    def cancel_probe(self, probe: Probe) -> None: ...

    def remove(self, directory: int, keys: Sequence[bytes]) -> None: ...

    def rescan(self) -> None: ...

    def poll(self) -> list[News]: ...

    def fileno(self) -> int: ...

    def close(self) -> None: ...


class _ScannedDirectory:
    """State of a directory between scans."""

    def __init__(self, number: int, paths: Sequence[str], object_bytes: int) -> None:
        self.number = number
        self.path = paths[0]
        self.counterparts = paths[1:]
        """Directories of the other ranks."""
        self.object_bytes = object_bytes
        self.listed: dict[int, tuple[int, int]] = {}
        """Times at which fan-out directories were listed, in s, and of their last change before, in ns."""


class DiskScanner:
    """Scans directories of objects for the engine, which never waits for a disk itself.

    Rank 0's directory stands for all ranks: an object that another rank lacks fails to load, and is removed
    then. Directories of other models under the same root are scanned too, since all share one quota. The first
    scan begins at once. No method waits for the disk, or raises for what is on it. The thread ends with the
    process if not before.
    """

    def __init__(self, directories: Sequence[TierPlace], clock: Clock) -> None:
        self._clock = clock
        paths = [directory.path for directory in directories]
        self._own = _ScannedDirectory(OWN, paths, directories[0].block_bytes)
        self._root = os.path.dirname(paths[0])
        self._directories = [self._own]
        """Directories by their number."""
        self._complaints: set[tuple[str, str]] = set()
        """Paths and what was wrong with them when it was last told."""
        self._misfits: list[FoundFile] = []
        self._changed = threading.Condition()
        # What both threads see, under `_changed`:
        self._probes: OrderedDict[Probe, tuple[Sequence[bytes], OtherBlocks | None]] = OrderedDict()
        self._removals: deque[tuple[int, Sequence[bytes]]] = deque()
        self._kept: deque[tuple[int, Collection[bytes]]] = deque()
        self._news: deque[News] = deque()
        self._backlog = 0
        self._is_scanning = True
        self._next_scan_at = 0.0
        self._is_closing = False
        self._readable = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.thread = threading.Thread(target=self._run, name="kv-disk-scanner", daemon=True)
        self.thread.start()

    # ---- the engine's side

    def probe(self, probe: Probe, keys: Sequence[bytes], others: OtherBlocks | None = None) -> None:
        """Looks for keys that have not been found so far, and for other blocks; a `ProbeAnswer` follows.

        `others` looks for these by the number of leading keys that are there.
        """
        with self._changed:
            self._probes[probe] = keys, others
            self._changed.notify()

    def cancel_probe(self, probe: Probe) -> None:
        """The request waits for the answer no more; it may still come."""
        with self._changed:
            self._probes.pop(probe, None)

    def remove(self, directory: int, keys: Sequence[bytes]) -> None:
        """Removes objects, those of all ranks if the directory is `OWN`; a `Removed` follows."""
        with self._changed:
            self._removals.append((directory, keys))
            self._changed.notify()

    def rescan(self) -> None:
        """Starts a scan after something was written, unless one is running or has just ended."""
        with self._changed:
            if not self._is_scanning and self._clock.now() >= self._next_scan_at:
                self._is_scanning = True
                self._changed.notify()

    def remove_others(self, fan_out: int, keys: Collection[bytes]) -> None:
        """Removes what nobody asks for: all in a fan-out directory but these keys, unless it has just come."""
        with self._changed:
            self._kept.append((fan_out, keys))
            self._changed.notify()

    def poll(self) -> list[News]:
        """Returns news in order, but the latest `ProbeAnswer` first; as many as can be read quickly."""
        news: list[News] = []
        weight = 0
        with self._changed:
            while self._news and weight < _POLL_OBJECTS:
                news.append(self._news.popleft())
                weight += _weight(news[-1])
            self._backlog -= weight
            if news and not self._news:
                os.eventfd_read(self._readable)
            self._changed.notify()
        return news

    def fileno(self) -> int:
        """File descriptor that is readable while there are news."""
        return self._readable

    def close(self) -> None:
        """Waits for the thread, unless the disk does not answer."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self.thread.join(_CLOSE_TIMEOUT_S)
        if not self.thread.is_alive():
            os.close(self._readable)

    # ---- the thread's side

    def _run(self) -> None:
        scan = self._scan()
        while True:
            asked = removal = kept = None
            with self._changed:
                self._changed.wait_for(self._has_something_to_do)
                if self._is_closing:
                    return
                if self._probes:
                    asked = self._probes.popitem(last=False)
                elif self._removals:
                    removal = self._removals.popleft()
                elif self._kept:
                    kept = self._kept.popleft()
            try:
                if asked is not None:
                    self._tell(self._answer(asked[0], *asked[1]))
                elif removal is not None:
                    self._remove(*removal)
                elif kept is not None:
                    self._remove_others(*kept)
                elif next(scan, None) is None:
                    scan = self._scan()
            except Exception:
                # What breaks one piece of work is not to end all others: requests wait for answers.
                logger.exception("Looking into KV blocks in %s failed.", self._root)
                if asked is not None:
                    self._tell(ProbeAnswer(asked[0], ()))
                elif removal is not None:
                    self._tell(Removed(*removal))
                elif kept is None:
                    self._stop_scanning(0.0)
                    scan = self._scan()

    def _has_something_to_do(self) -> bool:
        may_scan = self._is_scanning and self._backlog < _MAX_BACKLOG
        is_asked = self._probes or self._removals or self._kept
        return bool(self._is_closing or is_asked or may_scan)

    def _tell(self, news: News) -> None:
        with self._changed:
            if isinstance(news, ProbeAnswer):  # a request waits for it
                self._news.appendleft(news)
            else:
                self._news.append(news)
            self._backlog += _weight(news)
            os.eventfd_write(self._readable, 1)

    def _answer(
        self, probe: Probe, keys: Sequence[bytes], others: OtherBlocks | None
    ) -> ProbeAnswer:
        found = list(itertools.takewhile(self._is_there, keys))
        if others is not None:
            found += others(len(found), self._is_there)
        return ProbeAnswer(probe, found)

    def _is_there(self, key: bytes) -> bool:
        own = self._own
        try:
            status = os.stat(f"{own.path}/{object_name(key)}", follow_symlinks=False)
        except OSError as error:
            if not isinstance(error, FileNotFoundError):
                self._complain(own.path, error)
            return False
        return stat.S_ISREG(status.st_mode) and status.st_size == own.object_bytes

    def _remove(self, directory: int, keys: Sequence[bytes]) -> None:
        """Removes one piece; the rest has its turn after more urgent work."""
        piece, rest = keys[:_PIECE], keys[_PIECE:]
        home = self._directories[directory]
        for path, key in itertools.product((home.path, *home.counterparts), piece):
            self._unlink(f"{path}/{object_name(key)}", path)
        self._tell(Removed(directory, piece))
        if rest:
            with self._changed:
                self._removals.appendleft((directory, rest))

    def _unlink(self, path: str, directory: str) -> None:
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            self._complain(directory, error)

    # ---- scanning: generators that yield between two pieces

    def _scan(self) -> Iterator[bool]:
        started = self._clock.now()
        self._misfits.clear()
        yield from self._list(self._own)
        if self._misfits:
            logger.warning(
                "KV blocks in %s: %d of a wrong length were removed, the first %s with %d bytes instead of %d.",
                self._own.path,
                len(self._misfits),
                self._misfits[0].path,
                self._misfits[0].num_bytes,
                self._own.object_bytes,
            )
        self._find_others()
        for directory in self._directories[1:]:
            yield from self._list(directory)
        seconds = self._clock.now() - started
        self._stop_scanning(seconds)
        self._tell(ScanEnded(seconds))

    def _stop_scanning(self, seconds: float) -> None:
        interval = max(_MIN_SCAN_INTERVAL_S, _SCAN_SHARE * seconds)
        with self._changed:
            self._is_scanning = False
            self._next_scan_at = self._clock.now() + interval

    def _find_others(self) -> None:
        """Adds other models' directories. Those that are gone stay: their objects must be forgotten."""
        known = {path for it in self._directories for path in (it.path, *it.counterparts)}
        try:
            paths = object_directories(self._root)
        except OSError as error:
            self._complain(self._root, error)
            return
        for path in paths:
            if path not in known:
                self._meet(path)

    def _meet(self, path: str) -> None:
        try:
            manifest = read_manifest(Path(path))
        except OSError as error:
            self._complain(path, error)
            return
        if manifest is None:
            self._complain(path, "its manifest cannot be understood; it is not counted")
            return
        number = len(self._directories)
        self._directories.append(_ScannedDirectory(number, [path], manifest.object_bytes))
        self._tell(DirectoryFound(number, manifest.object_bytes))

    def _list(self, directory: _ScannedDirectory) -> Iterator[bool]:
        try:
            for path in (directory.path, *directory.counterparts):
                self._tidy(list_files(path))
            self._complaints = {it for it in self._complaints if it[0] != directory.path}
        except OSError as error:
            # Another model's directory may be removed at any time, and nobody here misses it.
            if directory.number == OWN or not isinstance(error, FileNotFoundError):
                self._complain(directory.path, error)
        for number, fan_out in enumerate(FAN_OUTS):
            try:
                yield from self._list_fan_out(directory, number, f"/{fan_out}")
            except FileNotFoundError:
                if directory.listed.pop(number, None) is not None:
                    listed_at = int(time.time()) - _SAME_TICK_S
                    self._tell(FanOutListed(directory.number, number, {}, listed_at))
            except OSError as error:
                self._complain(directory.path, error)
            yield True

    def _list_fan_out(
        self, directory: _ScannedDirectory, number: int, fan_out: str
    ) -> Iterator[bool]:
        path = directory.path + fan_out
        changed_at = os.stat(path).st_mtime_ns
        last_listed_at, last_changed_at = directory.listed.get(number, (0, _UNSURE))
        if last_changed_at == changed_at:
            return
        now = int(time.time())
        listed_at = now - _SAME_TICK_S
        everything: dict[bytes, int] = {}
        files = list_files(path)
        while piece := list(itertools.islice(files, _PIECE)):
            used_at = self._collect_objects(directory, piece, now)
            everything |= used_at
            # What is known and was not used since would only be work for the engine.
            news = {key: at for key, at in used_at.items() if at >= last_listed_at}
            if news:
                self._tell(ObjectsFound(directory.number, news))
            yield True
        # What changes within one tick of the file system's clock shows no other time.
        is_sure = changed_at < listed_at * 10**9
        directory.listed[number] = listed_at, changed_at if is_sure else _UNSURE
        self._tell(FanOutListed(directory.number, number, everything, listed_at))
        for counterpart in directory.counterparts:
            yield True
            self._remove_orphans(counterpart + fan_out, everything.keys())

    def _collect_objects(
        self, directory: _ScannedDirectory, files: Sequence[FoundFile], now: int
    ) -> dict[bytes, int]:
        """Returns the last uses of the objects among `files`, and removes worthless files."""
        used_at: dict[bytes, int] = {}
        for found in files:
            if found.key is None:
                self._tidy([found])
            elif directory.number == OWN and found.num_bytes != directory.object_bytes:
                # An object appears whole; only something else than a writer can have cut it.
                self._misfits.append(found)
                self._unlink(found.path, directory.path)
            else:
                used_at[found.key] = max(0, min(int(found.used_at), now))
        return used_at

    def _tidy(self, files: Iterable[FoundFile]) -> None:
        now = time.time()
        for found in files:
            if found.is_left_over(now):
                self._unlink(found.path, os.path.dirname(found.path))

    def _remove_others(self, fan_out: int, keys: Collection[bytes]) -> None:
        kept = set(keys)
        for path in (self._own.path, *self._own.counterparts):
            self._remove_orphans(f"{path}/{FAN_OUTS[fan_out]}", kept)

    def _remove_orphans(self, path: str, keys: Collection[bytes]) -> None:
        """Removes objects that another rank has and rank 0 lacks: they are never loaded."""
        now = time.time()
        with contextlib.suppress(FileNotFoundError):
            for found in list_files(path):
                is_orphan = found.key is not None and found.key not in keys
                if (is_orphan or found.is_temporary) and found.is_stale(now):
                    self._unlink(found.path, path)

    # ---- warnings

    def _complain(self, path: str, problem: OSError | str) -> None:
        """Logs a problem once while it lasts."""
        if isinstance(problem, OSError):
            problem = problem.strerror or str(problem)
        if (path, problem) not in self._complaints:
            self._complaints.add((path, problem))
            logger.warning("KV blocks in %s: %s.", path, problem)


def _weight(news: News) -> int:
    """Approximate time to apply the news, in objects."""
    match news:
        case ObjectsFound():
            return len(news.used_at) + 1
        case FanOutListed():
            return len(news.used_at) // 8 + 1
        case Removed():
            return len(news.keys) // 8 + 1
        case _:
            return 1
