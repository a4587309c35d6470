# SPDX-License-Identifier: Apache-2.0
"""Admission: the next waiting request, its prefix in the cache, and whether blocks and slots are free for it."""

from __future__ import annotations

import math
from typing import NamedTuple

from pagoda.engine.kv_hooks import KVHooks
from pagoda.engine.request import OrderKey, Request
from pagoda.engine.request_queue import RequestQueue
from pagoda.kv.block_table import PrefixHit
from pagoda.kv.manager import KVManager

_BLOCKED_STEPS = 16
"""Steps after which a request that did not fit is looked at again, when nothing became free."""

_FRONT: OrderKey = (-(2**63), -math.inf, -1)
"""A key that sorts in front of every order key."""


class _Blocked(NamedTuple):
    """A waiting request that did not fit, and what was there at the time."""

    request: Request
    step: int
    num_unreserved: int
    num_running: int


class Candidates:
    """The front of the line, as the step sees it that is planned."""

    def __init__(self, kv: KVManager, queue: RequestQueue) -> None:
        self.hooks = KVHooks()
        self.step = 0
        """The step that is planned next."""
        self._kv = kv
        self._queue = queue
        self._blocked: _Blocked | None = None

    def first(self, behind: OrderKey = _FRONT) -> Request | None:
        """The first waiting request behind `behind` that may go on, if there is room for it."""
        waiting = self._queue.waiting
        return self.hooks.first_ready(waiting.after(behind)) if waiting else None

    def fitting_prefix(self, request: Request) -> PrefixHit | None:
        """The request's cached prefix if it can be admitted now, else None.

        A request whose last sample is still pending waits for it.
        """
        queue = self._queue
        can_run = queue.has_slot and not request.num_pending_samples
        if not can_run or self._is_still_blocked(request):
            return None
        hit = self.find_prefix(request)
        while not queue.has_room(request, hit, in_turn=False):
            if queue.is_full or not self.hooks.make_room():
                num_unreserved, num_running = queue.num_unreserved, len(queue.running)
                self._blocked = _Blocked(request, self.step, num_unreserved, num_running)
                return None
        return hit

    def find_prefix(self, request: Request) -> PrefixHit:
        """The cached prefix on the rank that is chosen for a request, of several that attend to their own.

        That is the one with the fewest tokens that requests there hold or have to compute, those of this request
        included; of those with room for it, if there are any. What a tier near a rank has need not be computed
        there; among equals, the rank whose device has more of it is chosen. The request holds no blocks yet.
        """
        kv, table = self._kv, request.table
        if kv.num_ranks == 1:
            return kv.find_prefix(table, request.token_ids)
        loads = [0] * kv.num_ranks
        for running in self._queue.running:
            loads[running.table.rank] += 2 * running.num_tokens - running.num_computed_tokens
        for loading in self._queue.loading:
            loads[loading.table.rank] += loading.num_tokens
        found: list[tuple[bool, int, int, int, PrefixHit]] = []
        for rank, load in enumerate(loads):
            table.rank = rank
            hit = kv.find_prefix(table, request.token_ids)
            lacks_room = not self._queue.has_room(request, hit, in_turn=False)
            num_there = hit.num_blocks + self.hooks.num_near(request, hit)
            weight = load - num_there * kv.block_size
            found.append((lacks_room, weight, -hit.num_blocks, rank, hit))
        *_, table.rank, hit = min(found, key=lambda it: it[:4])
        return hit

    def _is_still_blocked(self, request: Request) -> bool:
        """True if nothing became free since the request last did not fit: looking at a long prompt costs time."""
        blocked = self._blocked
        return (
            blocked is not None
            and blocked.request is request
            and self.step < blocked.step + _BLOCKED_STEPS
            and self._queue.num_unreserved <= blocked.num_unreserved
            and len(self._queue.running) == blocked.num_running > 0
        )

    def forget_blocked(self) -> None:
        """Something may have become free that `_is_still_blocked` does not see."""
        self._blocked = None
