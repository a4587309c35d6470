# SPDX-License-Identifier: Apache-2.0
"""In-flight prefixes: requests wait for blocks that a running request with the same prefix computes.

Several answers to one prompt arrive together, and so do chats under one system prompt. None of their blocks is
cached yet, so all would compute the same; instead one does, and the others find its blocks chunk by chunk. Where
prefixes end at snapshots of states alone, they find them snapshot by snapshot.
"""

from __future__ import annotations

from pagoda.engine.request import Request
from pagoda.kv.block_table import PrefixHit
from pagoda.kv.manager import KVManager

_MAX_WAITING = 32
"""Requests that a step passes over because others compute their blocks."""


class InFlightPrefixes:
    """Running requests by the key of the block behind the usable prefix that each of them has published."""

    def __init__(self, kv: KVManager) -> None:
        self._kv = kv
        self._by_key: dict[tuple[int, bytes], Request] = {}
        """Requests by rank, as one does not see blocks of another, and key."""
        self._keys: dict[Request, tuple[int, bytes]] = {}
        self._num_left = _MAX_WAITING
        """Requests that the step may still pass over."""

    def begin_step(self) -> None:
        self._num_left = _MAX_WAITING

    def advance(self, request: Request) -> None:
        """A running request was admitted, or has published blocks."""
        self.leave(request)
        index = self._num_usable(request)
        key = self._kv.next_key(request.table, request.token_ids, index)
        if key is not None and (place := (request.table.rank, key)) not in self._by_key:
            self._by_key[place] = request
            self._keys[request] = place

    def _num_usable(self, request: Request) -> int:
        return self._kv.layout.usable(request.table.num_published)

    def leave(self, request: Request) -> None:
        """The request does not run any more."""
        place = self._keys.pop(request, None)
        if place is not None:
            del self._by_key[place]

    def clear(self) -> None:
        self._by_key.clear()
        self._keys.clear()

    def is_awaiting(self, request: Request) -> bool:
        """True if the request was told to wait, and its provider has published nothing of use since."""
        provider, num_usable = request.provider, request.num_provided_blocks
        if (
            not self._num_left
            or provider not in self._keys
            or self._num_usable(provider) != num_usable
        ):
            return False
        self._num_left -= 1
        return True

    def should_wait(self, request: Request, hit: PrefixHit) -> bool:
        """True if a request in line had better wait for blocks behind `hit`: one of no lower priority computes at
        least half of what it would have to compute."""
        if not self._num_left:
            return False
        request.provider = None
        key = self._kv.reusable_key(request.table, request.token_ids, hit.num_blocks)
        provider = None if key is None else self._by_key.get((request.table.rank, key))
        if provider is None or provider.order_key[0] > request.order_key[0]:
            return False
        num_shared = self._kv.num_shared_tokens(
            (request.table, request.token_ids),
            (provider.table, provider.token_ids),
            hit.num_blocks,
        )
        num_hit_tokens = hit.num_blocks * self._kv.block_size
        if 2 * num_shared < request.num_tokens - num_hit_tokens:
            return False
        request.provider, request.num_provided_blocks = provider, self._num_usable(provider)
        self._num_left -= 1
        return True
