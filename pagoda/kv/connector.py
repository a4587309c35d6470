# SPDX-License-Identifier: Apache-2.0
"""Connectors: one interface, in two halves, to places that keep KV besides the device.

The engine's half (`KVConnector`) decides: it knows keys, blocks and transfers, but no bytes and no torch. The
worker's half (`pagoda.worker.kv`) copies: it knows bytes and places, but no requests. The engine asks a worker for
`Transfer`s (`pagoda.messages.transfers`).

`on_queued` tells connectors of a request that may find KV elsewhere. Once `lookup` knows how many blocks there
are, blocks are allocated and a transfer fills them; meanwhile the request waits. Loaded blocks are published
like computed ones, and the request is then admitted as usual and finds them on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from pagoda.kv.block_keys import GroupKeys
from pagoda.kv.block_pool import Block
from pagoda.messages.frontend import KVSource
from pagoda.messages.load import TierLoad
from pagoda.messages.worker import WorkerReady
from pagoda.parallel.segments import ALL_ON_FIRST, BlockRanks

if TYPE_CHECKING:
    from pagoda.kv.storeys import Storey

IsThere = Callable[[bytes], bool]
"""True if a place that can be slow to look at has the block of a key."""
OtherBlocks = Callable[[int, IsThere], list[bytes]]
"""Keys of those blocks of other groups in a slow place that are needed where so many leading blocks of a prefix
are there."""


class PrefixRequest(msgspec.Struct, frozen=True):
    """The blocks that a queued request could load."""

    request_id: str
    keys: Sequence[bytes]
    """Keys of the full blocks of its tokens, root first. The block of the last token, which is always computed, is
    included only with `source`: the source tells the token behind it."""
    token_ids: Sequence[int]
    """Tokens of these blocks, as they were when the request was queued."""
    source: KVSource | None = None
    """Another engine that has the blocks, or will have them."""
    group: int = 0
    """KV group of the blocks."""
    ratio: int = 1
    """Smallest blocks of any group in each of these blocks."""
    ranks: BlockRanks = ALL_ON_FIRST
    """Ranks on which the blocks are to lie, while a lookup or a load goes on."""
    other_blocks: OtherBlocks | None = None
    """Looks for blocks of other groups; None without such groups. Any thread may call it."""

    def leading(self, num_blocks: int) -> PrefixRequest:
        """The first blocks alone."""
        return msgspec.structs.replace(self, keys=self.keys[:num_blocks])

    def of_group(self, group: int, ratio: int, num_blocks: int) -> PrefixRequest:
        """The leading blocks of another group, each of which is `ratio` blocks of group 0."""
        is_whole = group == 0 and num_blocks == len(self.keys)
        keys = self.keys if is_whole else GroupKeys(self.keys, group, ratio, num_blocks)
        return PrefixRequest(
            self.request_id, keys, self.token_ids, self.source, group, ratio, self.ranks
        )


class CachedBlock(NamedTuple):
    """A full block, findable on the device, that a request has just passed through."""

    block: Block
    key: bytes
    parent: bytes | None
    """Key of the block before it; None for the first block of a prefix."""
    token_ids: Sequence[int]
    group: int = 0
    """KV group that the block belongs to."""
    is_needed: bool = False
    """The request was preempted and will need the block again, which was weighed against computing it."""


def by_rank(cached_blocks: Iterable[CachedBlock]) -> list[list[CachedBlock]]:
    """Blocks of each rank that has any: a transfer is between places of one rank."""
    found: dict[int, list[CachedBlock]] = {}
    for cached in cached_blocks:
        found.setdefault(cached.block.rank, []).append(cached)
    return list(found.values())


class KVConnector(Protocol):
    tier: str
    has_own_timeout: bool
    """The connector ends its waits itself; others are ended after `LOAD_TIMEOUT_S`."""
    is_cache: bool
    """Blocks were kept from earlier requests, rather than computed for the request that loads them."""

    def on_queued(self, prefix: PrefixRequest, start: int) -> None:
        """A request is queued that finds `keys[:start]` on the device. One `on_dequeued` follows."""

    def on_dequeued(self, request_id: str) -> None:
        """The request is admitted, finished or aborted: no lookup for it follows."""

    def lookup(self, prefix: PrefixRequest, start: int) -> int | None:
        """Number of blocks from `keys[start]` on, without a gap, that can be loaded from here.

        None while that is not known; `poll` names the request when it may be. `start` may be at or behind the
        end of the keys: then 0, or None while there is something else to wait for. Repeating the call changes
        nothing.
        """

    def prefetch(self, prefix: PrefixRequest, start: int) -> None:
        """The request cannot be loaded yet: moves blocks that are slow to read to a nearer tier."""

    def load(
        self, prefix: PrefixRequest, start: int, blocks: Sequence[Block], after_step: int
    ) -> int:
        """Begins to fill `blocks` of one rank, at most as many as `lookup` has just found, with `keys[start:]`.

        Returns the id in the ledger, under which the load ends.
        """

    def save(self, cached_blocks: Sequence[CachedBlock]) -> int:
        """Keeps blocks, given in the order of a prefix, or does not. All or none of them are needed again.

        Returns the number of leading blocks that are settled. Only a lack of `TransferLedger.room_for` leaves
        blocks over; these are given again while they can be found.
        """

    @property
    def storey(self) -> Storey | None:
        """The place in which steps read segments of running requests; None if they cannot."""

    def workers_ready(self, ready: WorkerReady) -> None: ...

    def workers_lost(self) -> None:
        """Everything in the workers' memory is gone. The ledger has dropped all transfers."""

    def poll(self) -> Collection[str]:
        """Reads what the tier has heard. Returns the requests whose lookups may have another answer now."""

    def pollables(self) -> list[object]:
        """File descriptors and sockets that become readable when `poll` has something to read."""

    def load_report(self) -> TierLoad: ...

    def close(self) -> None: ...
