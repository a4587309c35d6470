"""What a dispatcher believes to be in the prefix cache of one replica: the keys of the blocks it sent there."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class PrefixIndex:
    """Keys of KV blocks, as many as the replica's cache has blocks; those not sent for the longest time go first.

    It is a guess: the replica also caches answers, and keeps what is in use. A wrong guess costs time, never
    correctness.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def num_cached(self, keys: Sequence[bytes]) -> int:
        """How many leading ones of `keys`, a chain from its root, are there."""
        for count, key in enumerate(keys):
            if key not in self._keys:
                return count
        return len(keys)

    def add(self, keys: Sequence[bytes]) -> None:
        """A prompt with these blocks was sent. Ends of chains go before their roots, as in the block pool."""
        for key in reversed(keys):
            self._keys[key] = None
            self._keys.move_to_end(key)
        self._trim()

    def resize(self, capacity: int) -> None:
        """The replica's cache has another size."""
        self._capacity = capacity
        self._trim()

    def _trim(self) -> None:
        while len(self._keys) > self._capacity:
            self._keys.popitem(last=False)

    def clear(self) -> None:
        """The replica's cache is lost."""
        self._keys.clear()
