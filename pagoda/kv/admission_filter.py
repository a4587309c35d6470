"""How often blocks are passed through: what is worth a place on disk, and what passes by once."""

from __future__ import annotations

_GENERATION = 2**17
_CREDIT_BITS = 16
_MAX_CREDIT = 2**_CREDIT_BITS - 1


class AdmissionFilter:
    """Counts touches of keys, and forgets those that were touched longest ago.

    A conversation goes on behind what has come back: it is known by a prefix that was touched often enough, and as
    many blocks behind it as that has count as if they were, too.

    Two generations: keys are counted in the younger one, and when that has `generation` of them, it becomes the
    older one. So at least the last `generation` keys are remembered, and at most twice as many.
    """

    def __init__(self, min_touches: int, generation: int = _GENERATION) -> None:
        self._min_touches = min_touches
        self._generation = generation
        self._younger: dict[int, int] = {}
        self._older: dict[int, int] = {}

    def touch(self, key: bytes, parent: bytes | None = None, *, is_kept: bool = False) -> bool:
        """Counts one touch, after that of its parent; whether the block is worth a place.

        `is_kept`: it has one. The first block of a prefix has no parent.
        """
        if self._min_touches <= 1:
            return True
        count = min((self._find(key) >> _CREDIT_BITS) + 1, self._min_touches)
        credit = 0 if parent is None else self._find(parent) & _MAX_CREDIT
        is_back = is_kept or count >= self._min_touches
        is_worth_it = is_back or credit > 0
        credit = min(credit + 1, _MAX_CREDIT) if is_back else max(credit - 1, 0)
        self._younger[_start(key)] = count << _CREDIT_BITS | credit
        if len(self._younger) >= self._generation:
            self._older, self._younger = self._younger, {}
        return is_worth_it

    def _find(self, key: bytes) -> int:
        """Touches, and in the lower bits how many blocks behind this one need not wait for theirs."""
        start = _start(key)
        found = self._younger.get(start)
        return self._older.get(start, 0) if found is None else found


def _start(key: bytes) -> int:
    """Of a digest: enough to tell keys apart, and small."""
    return int.from_bytes(key[:8])
