# SPDX-License-Identifier: Apache-2.0
"""Disaggregation, decode side: fetches of KV, and the prefill engines that compute it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from pagoda.kv.block_pool import Block
from pagoda.kv.connector import PrefixRequest
from pagoda.messages.frontend import KVSource
from pagoda.messages.transfers import KVRank
from pagoda.plugins.disaggregation import messages

_RENEWALS = 5
_MAX_RENEWAL_S = 1.0
_PIECE_BYTES = 64 * 2**20
_PIECE_BLOCKS = 256
"""The most that one transfer reads, in bytes of all ranks together, or in blocks where the size of a block is not
known. A worker gives up a transfer that takes too long."""


@dataclass(eq=False)
class Load:
    """Blocks of a KV group that a fetch is filling, from index `start` on."""

    held_id: int
    group: int
    start: int
    blocks: Sequence[Block]
    after_step: int
    num_begun: int = 0
    """Number of leading blocks that transfers read or have read."""
    num_open: int = 0
    """Number of transfers under way."""

    @property
    def is_read(self) -> bool:
        """True if all blocks are read."""
        return self.num_open == 0 and self.num_begun == len(self.blocks)


@dataclass(eq=False)
class Fetch:
    """A request whose KV another engine is asked for."""

    prefix: PrefixRequest
    source: KVSource
    peer: PrefillPeer
    is_token_alone: bool
    """The device had all blocks when the request was queued."""
    moved_at: float
    end: int = 0
    """Leading blocks of the prefix that are known to be computed."""
    block_ids: list[list[int]] = field(default_factory=list)
    """Ids of these in the other engine, by KV group, from the first on that is needed behind `num_blocks`."""
    num_blocks: int | None = None
    """Number of the prefix's blocks that will come; None if not known yet."""
    peer_id: str | None = None
    """Id of the workers that have these blocks."""
    loads: list[Load] = field(default_factory=list)
    is_loaded: bool = False
    has_token: bool = False

    @property
    def is_open(self) -> bool:
        """True if its known blocks can be read."""
        return self.peer.has(self.peer_id)

    @property
    def is_incomplete(self) -> bool:
        """Blocks or the token, or news of them, have yet to come."""
        if self.loads or not self.has_token:
            return True
        return self.num_blocks is None or self.end < self.num_blocks

    @property
    def is_read(self) -> bool:
        """True if all blocks are read. The other engine has yet to say whether it held them all the time."""
        return bool(self.loads) and all(load.is_read for load in self.loads)

    @property
    def is_owed(self) -> bool:
        """True if it is the other engine's turn. Workers limit the duration of reads."""
        return self.is_incomplete and not any(load.num_open for load in self.loads)

    def question(self) -> messages.DecodeMessage | None:
        """Returns what the other engine has yet to answer; None if nothing."""
        transfer_id = self.source.transfer_id
        if self.is_read:
            return messages.KVCheck(transfer_id)
        if self.is_incomplete:
            return messages.KVSubscribe(transfer_id, self.end, len(self.prefix.keys))
        return None


class PrefillPeer:
    """An engine that is asked for KV."""

    def __init__(self, address: str, now: float) -> None:
        self.address = address
        self.welcome: messages.KVWelcome | None = None
        self.refusal: str | None = None
        self.fetches: dict[str, Fetch] = {}
        """Fetches by transfer."""
        self.heard_at = now
        self.renew_at = now

    @property
    def renewal_s(self) -> float:
        if self.welcome is None:
            return _MAX_RENEWAL_S
        return min(self.welcome.lease_s / _RENEWALS, _MAX_RENEWAL_S)

    def has(self, peer_id: str | None) -> bool:
        """True if these are its workers, as far as is known."""
        return self.welcome is not None and self.welcome.peer.peer_id == peer_id

    @property
    def ranks(self) -> Sequence[KVRank]:
        return self.welcome.peer.ranks if self.welcome else ()

    def num_blocks(self) -> int:
        """Blocks of all pools."""
        return self._of_pool() * (1 + max((rank.pool for rank in self.ranks), default=0))

    def _of_pool(self) -> int:
        return min((rank.num_blocks for rank in self.ranks), default=0)

    def pieces(self, group: int, block_ids: Sequence[int]) -> Iterator[Sequence[int]]:
        """Blocks of a KV group, in their order, by the transfers that read them: each from one pool."""
        block_bytes = sum(rank.block_bytes(group) for rank in self.ranks)
        most = max(1, _PIECE_BYTES // block_bytes) if block_bytes else _PIECE_BLOCKS
        of_pool = self._of_pool()
        for _, some in groupby(block_ids, lambda block_id: block_id // of_pool):
            run = list(some)
            yield from (run[start : start + most] for start in range(0, len(run), most))

    def obstacle(self, source: KVSource) -> str | None:
        """Returns a clause that says why nothing can be fetched from a source; None if something can."""
        if self.refusal is not None:
            return self.refusal
        if self.welcome is not None and self.welcome.engine_id != source.engine_id:
            return "another engine is there now"
        return None
