# SPDX-License-Identifier: Apache-2.0
"""Pages of the KV cache, taken from the system before requests write to them.

The first write to a page waits until the system has found and cleared it: one to four milliseconds for a megabyte,
tens of milliseconds for the prompt of a small model. The engine hands out fresh blocks in the order of their
numbers, so a thread keeps the pages of the next ones ready.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

from pagoda.backend.kv_store import KVStore
from pagoda.ipc.machine import available_memory_bytes
from pagoda.messages.worker import StepPlan

AHEAD_TOKENS = 2**13
"""Tokens whose pages are kept ready: prompts come in faster than pages can be taken."""
_AHEAD_BYTES = 2**30
"""Most bytes that are kept ready."""
_REFILLS = 8
"""Parts of it: as soon as one is used up, the next is ordered."""


class KVPopulator:
    """Keeps blocks ready behind the highest one in use; does nothing where a store has no pages to take."""

    def __init__(
        self,
        store: KVStore,
        block_sizes: Sequence[int],
        workers_on_host: int = 1,
        available_bytes: Callable[[], int] = available_memory_bytes,
    ) -> None:
        """`block_sizes` are in tokens, by KV group; a token is in a block of each."""
        self._store = store  # whose memory is touched as long as this lives
        self._num_blocks = store.num_blocks
        self._block_bytes = store.block_bytes
        self._workers_on_host = workers_on_host
        self._available_bytes = available_bytes
        ahead = sum(-(-AHEAD_TOKENS // size) for size in block_sizes)
        self._ahead = max(1, min(ahead, _AHEAD_BYTES // self._block_bytes))
        self._ordered = 0
        self._next_look = 0
        """The first block whose use is a reason to look whether more should be ordered."""
        self._pages = store.open_pages()

    def use(self, plan: StepPlan) -> None:
        """Takes note of the blocks that a step begins to use."""
        starts = chain.from_iterable(start.block_ids for start in plan.starts)
        new = chain(starts, (new.block_ids for new in plan.new_blocks))
        # Of other ranks' blocks, some count as if they were this one's.
        highest = max((max(ids) % self._num_blocks for ids in new if ids), default=-1)
        if highest >= self._next_look:
            self.keep_ready_behind(highest)

    def keep_ready_behind(self, block_id: int) -> None:
        """Orders the blocks behind this one, unless memory has become too short for the rest of the cache.

        Others may have taken what was free when the cache was planned. Then its pages are taken as they are used.
        """
        self._next_look = block_id + max(1, self._ahead // _REFILLS)
        rest = (self._num_blocks - self._ordered) * self._block_bytes * self._workers_on_host
        if self._pages is None or rest == 0 or rest > self._available_bytes():
            return
        self._ordered = max(self._ordered, min(block_id + 1 + self._ahead, self._num_blocks))
        self._pages.advance(self._ordered)

    def wait(self) -> None:
        """Waits until what was ordered is there."""
        if self._pages is not None:
            self._pages.wait()
