# SPDX-License-Identifier: Apache-2.0
"""Policies of the disk tier: admission, pauses of writing, eviction, and the quota."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from pagoda.ipc.clock import Clock
from pagoda.kv.block_keys import group_key
from pagoda.plugins.disk_tier.index import DiskIndex
from pagoda.plugins.disk_tier.scanner import OWN, Removed

_GENERATION = 2**17
_CREDIT_BITS = 16
_MAX_CREDIT = 2**_CREDIT_BITS - 1
_IS_WORTH_IT = 2**_CREDIT_BITS
_COUNT_SHIFT = _CREDIT_BITS + 1

_HIGH_PERCENT = 95
_LOW_PERCENT = 85
"""Percentages of the quota: at the high mark objects are removed down to the low mark."""
_MAX_REMOVING = 512
"""Objects that the scanner is asked to remove at a time."""

_BUDGET_S = 3600.0

_FAILURES_BEFORE_PAUSE = 3
_FIRST_PAUSE_S = 10.0
_LONGEST_PAUSE_S = 300.0


class AdmissionFilter:
    """Counts how often requests pass through blocks; a block is worth a place once that is often enough.

    A conversation continues behind the prefix that it repeats. Each block of a prefix that was touched often
    enough gives one credit, and each credit lets one block behind that prefix in at its first touch.

    A prefix is of use if all KV groups have what is needed at its end, so blocks of other groups are worth as much
    as the block of group 0 that ends where they end. Where group 0 is not offered it, they count by themselves.

    Counts are kept in two generations. When the younger one has `generation` keys it becomes the older one, so at
    least the last `generation` keys are remembered and at most twice as many.
    """

    def __init__(self, min_touches: int, generation: int = _GENERATION) -> None:
        self._min_touches = min_touches
        self._generation = generation
        self._younger: dict[int, int] = {}
        self._older: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._younger) + len(self._older)

    def touch(
        self, key: bytes, parent: bytes | None = None, group: int = 0, *, is_kept: bool = False
    ) -> bool:
        """Counts one touch of a block of a KV group; returns whether it is worth a place.

        The parent, and the block of group 0 that ends with it, must have been touched before; the first block of a
        prefix has no parent. `is_kept`: the block has a place already.
        """
        if self._min_touches <= 1:
            return True
        if group and (in_first := self._find(_short(group_key(key, group), 0))):
            return bool(in_first & _IS_WORTH_IT)
        short = _short(key, group)
        count = min((self._find(short) >> _COUNT_SHIFT) + 1, self._min_touches)
        credit = 0 if parent is None else self._find(_short(parent, group)) & _MAX_CREDIT
        is_back = is_kept or count >= self._min_touches
        is_worth_it = is_back or credit > 0
        credit = min(credit + 1, _MAX_CREDIT) if is_back else max(credit - 1, 0)
        self._younger[short] = count << _COUNT_SHIFT | is_worth_it * _IS_WORTH_IT | credit
        if len(self._younger) >= self._generation:
            self._older, self._younger = self._younger, {}
        return is_worth_it

    def _find(self, short: int) -> int:
        """Touches of a key; below these, whether the last one was worth a place, and the credit."""
        found = self._younger.get(short)
        return self._older.get(short, 0) if found is None else found


def _short(key: bytes, group: int) -> int:
    """First 64 bits of a digest, which all groups share, and the group: enough to tell keys apart, and small."""
    return int.from_bytes(key[:8]) << 8 | group


class WriteBackoff:
    """Pauses stores after some failures in a row, and twice as long each time that they fail again.

    A full disk answers every write slowly, and with the same error.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._num_failures = 0
        self._ends_at = 0.0
        self._next_pause_s = _FIRST_PAUSE_S

    @property
    def is_on(self) -> bool:
        return self._num_failures >= _FAILURES_BEFORE_PAUSE and self._clock.now() < self._ends_at

    def failed(self) -> float | None:
        """Counts a failed store. Returns the seconds of the pause if this failure starts the first one."""
        if self.is_on:  # begun before the pause
            return None
        self._num_failures += 1
        if self._num_failures < _FAILURES_BEFORE_PAUSE:
            return None
        pause_s = self._next_pause_s
        self._ends_at = self._clock.now() + pause_s
        self._next_pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return pause_s if self._num_failures == _FAILURES_BEFORE_PAUSE else None

    def succeeded(self) -> bool:
        """Ends all pauses after a store that did not fail; returns whether there was one."""
        was_paused = self._num_failures >= _FAILURES_BEFORE_PAUSE
        self._num_failures = 0
        self._next_pause_s = _FIRST_PAUSE_S
        return was_paused


class Silence:
    """Tells when a disk that owes an answer has given none for too long."""

    def __init__(self, clock: Clock, timeout_s: float) -> None:
        self._clock = clock
        self._timeout_s = timeout_s
        self._since: float | None = None

    def asked(self) -> None:
        """The disk owes an answer from now on, if it did not before."""
        if self._since is None:
            self._since = self._clock.now()

    def heard(self, *, owes_more: bool) -> None:
        """The disk has said something, or nothing is wanted of it any more."""
        self._since = self._clock.now() if owes_more else None

    @property
    def is_long(self) -> bool:
        return self._since is not None and self._clock.now() >= self._since + self._timeout_s

    @property
    def is_long_at(self) -> float | None:
        """Time at which the silence will be long; None if it is already, or there is none."""
        return None if self._since is None or self.is_long else self._since + self._timeout_s


class SwapBudget:
    """Bounds what is written because preempted requests need it again, and is read once at most: an SSD wears.

    As many blocks as the quota holds may be written at once, and as many again in each `_BUDGET_S`.
    """

    def __init__(self, num_blocks: int, clock: Clock) -> None:
        self._clock = clock
        self._most = num_blocks
        self._left = float(num_blocks)
        self._counted_at = clock.now()

    def take(self, count: int) -> int:
        """Returns how many of `count` blocks may be written now."""
        now = self._clock.now()
        gained = self._most * (now - self._counted_at) / _BUDGET_S
        self._left, self._counted_at = min(self._most, self._left + gained), now
        count = min(count, int(self._left))
        self._left -= count
        return count


class Evictor:
    """Keeps a quota: removes the least recently used objects, of any directory, before the quota is used up.

    The scanner removes them later. Objects that are being removed are out of the index but still on disk: they
    take room, and scans find them.
    """

    def __init__(
        self,
        index: DiskIndex,
        remove: Callable[[int, Sequence[bytes]], object],
        quota_bytes: int,
        forget: Callable[[int, bytes], object],
        num_sharers: int = 1,
    ) -> None:
        """`num_sharers` may hold equal parts of the quota each."""
        self._num_sharers = num_sharers
        self._index = index
        self._remove = remove
        self._quota_bytes = quota_bytes
        self._high_bytes = quota_bytes * _HIGH_PERCENT // 100
        self._low_bytes = quota_bytes * _LOW_PERCENT // 100
        self._forget = forget
        self.storing: set[bytes] = set()
        """Keys of objects that are being written."""
        self.holds: Counter[bytes] = Counter()
        """Holds by key of objects in `OWN` that running requests read; never zero. These are not removed."""
        self._removing: set[tuple[int, bytes]] = set()
        self._removing_bytes = 0
        self._is_evicting = False
        """True from the high mark until the low mark is reached."""
        self._wanted_bytes = 0
        """Bytes for which there is to be room then, below the high mark."""

    def is_removing(self, directory: int, key: bytes) -> bool:
        return (directory, key) in self._removing

    def is_changing(self, key: bytes) -> bool:
        """True while the object in `OWN` is being written or removed."""
        return key in self.storing or self.is_removing(OWN, key)

    def make_room(self, count: int) -> int:
        """Returns how many of `count` further objects may be written now."""
        each = self._index.object_bytes(OWN)
        # No more than evictions make room for: one long prompt must not replace everything else.
        room = self._high_bytes - min(self._used_bytes, self._low_bytes)
        count = min(count, max(1, room // each))
        self.check(count * each)
        taken = self._used_bytes + self._removing_bytes
        return min(count, max(0, self._quota_bytes - taken) // each)

    @property
    def num_holdable(self) -> int:
        """The most objects that may be held here."""
        return self._high_bytes // self._num_sharers // self._index.object_bytes(OWN)

    def has_room_for(self, count: int) -> bool:
        """True if so many further objects may be written now, which are to be held. If not, others that nobody
        holds are being removed, as far as there are any."""
        wanted = count * self._index.object_bytes(OWN)
        if self._used_bytes + self._removing_bytes + wanted <= self._quota_bytes:
            return True
        self._is_evicting = True
        self._wanted_bytes = wanted
        self.evict()
        return False

    def check(self, further_bytes: int = 0) -> None:
        """Evicts if the high mark is passed, or would be with `further_bytes`; other servers may have written."""
        if self._used_bytes + further_bytes > self._high_bytes:
            self._is_evicting = True
            self.evict()

    def evict(self) -> None:
        """Removes the least recently used objects, the next part when the last one is gone."""
        keys: dict[int, list[bytes]] = {}
        target = min(self._low_bytes, self._high_bytes - self._wanted_bytes)
        num_spared = 0
        while self._is_evicting and len(self._removing) < _MAX_REMOVING:
            oldest = self._index.oldest()
            if oldest is None or self._used_bytes <= target or num_spared > len(self.holds):
                self._is_evicting, self._wanted_bytes = False, 0
                break
            directory, key = oldest
            if directory == OWN and key in self.holds:
                self._index.touch(OWN, key, 0)  # it goes behind all others
                num_spared += 1
                continue
            keys.setdefault(directory, []).append(key)
            self._drop_from_index(directory, key)
        for directory, some in keys.items():
            self._remove(directory, some)

    def discard(self, keys: Sequence[bytes]) -> None:
        """Removes bad objects, unknown ones too: those of another rank may be there."""
        fresh = [key for key in keys if not self.is_removing(OWN, key)]
        for key in fresh:
            self._drop_from_index(OWN, key)
        if fresh:
            self._remove(OWN, fresh)

    def removed(self, news: Removed) -> None:
        self._removing.difference_update((news.directory, key) for key in news.keys)
        self._removing_bytes -= len(news.keys) * self._index.object_bytes(news.directory)

    def _drop_from_index(self, directory: int, key: bytes) -> None:
        self._forget(directory, key)
        self._removing.add((directory, key))
        self._removing_bytes += self._index.object_bytes(directory)

    @property
    def _used_bytes(self) -> int:
        """Bytes of all objects that are there or are being written."""
        return self._index.num_bytes + len(self.storing) * self._index.object_bytes(OWN)
