"""How often blocks are passed through: what is worth a place on disk, and what passes by once."""

from __future__ import annotations

_GENERATION = 2**17


class TouchCounter:
    """Counts touches of keys, and forgets those that were touched longest ago.

    Two generations: keys are counted in the younger one, and when that has `generation` of them, it becomes the
    older one. So at least the last `generation` keys are remembered, and at most twice as many.
    """

    def __init__(self, min_touches: int, generation: int = _GENERATION) -> None:
        self._min_touches = min_touches
        self._generation = generation
        self._younger: dict[int, int] = {}
        self._older: dict[int, int] = {}

    def touch(self, key: bytes) -> bool:
        """Counts one touch; whether it is at least the `min_touches`-th."""
        if self._min_touches <= 1:
            return True
        start = int.from_bytes(key[:8])  # of a digest: enough to tell keys apart, and small
        before = self._younger.get(start)
        if before is None:
            before = self._older.get(start, 0)
        count = min(before + 1, self._min_touches)
        self._younger[start] = count
        if len(self._younger) >= self._generation:
            self._older, self._younger = self._younger, {}
        return count >= self._min_touches
