"""Where KV can come from and go to besides the device: one interface, in two halves.

The engine's half decides. It knows keys, blocks and transfers, no bytes and no torch. The worker's half copies. It
knows bytes and places, no requests. What one asks of the other is a `Transfer` (`pagoda.messages`).

A request that may find KV elsewhere is announced when it is queued. Once `lookup` knows how much there is, blocks
are taken for it and a transfer fills them; meanwhile the request waits in a state of its own. What has come is
published like computed blocks, and then the request is admitted by the common way and finds it on the device.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from pagoda.messages.frontend import KVSource
from pagoda.messages.load import TierLoad
from pagoda.messages.transfers import KVPeer, Transfer, TransferEnd
from pagoda.messages.worker import WorkerReady

if TYPE_CHECKING:
    from pagoda.kv.block_pool import Block  # which workers, who share this module, never see


class PrefixRequest(msgspec.Struct, frozen=True):
    """What a request could use."""

    request_id: str
    keys: Sequence[bytes]
    """Of the full blocks of its tokens, root first, without the block of its last token, which is computed; with
    that one where `source` says the token behind."""
    token_ids: Sequence[int]
    """Of these blocks, as they were when the request was queued."""
    source: KVSource | None = None
    """Another engine that has them, or will."""


class CachedBlock(NamedTuple):
    """A block that is full and findable on the device, and that a request has just passed through."""

    block: Block
    key: bytes
    parent: bytes | None
    """None for the first block of a prefix."""
    token_ids: Sequence[int]
    """Of this block."""


class KVConnector(Protocol):
    """The engine's half of one place for KV."""

    @property
    def tier(self) -> str:
        """Its name in metrics and logs."""
        ...

    @property
    def has_own_timeout(self) -> bool:
        """Whether it knows by itself how long to wait; else nobody waits longer than the stack's patience."""
        ...

    @property
    def is_cache(self) -> bool:
        """Whether what is here was kept from before; else it was computed for whoever loads it."""
        ...

    def on_queued(self, prefix: PrefixRequest, start: int) -> None:
        """A request is queued that finds `keys[:start]` on the device: time to look for the others.

        Every announcement is followed by one `forget`.
        """
        ...

    def lookup(self, prefix: PrefixRequest, start: int) -> int | None:
        """How many blocks from `keys[start]` on, without a gap, can come from here; None: not known yet.

        Where there are no such keys, 0: a request may have got further on the device than it was announced. Or
        None while there is something else to wait for.

        Free of side effects, and may be asked again.
        """
        ...

    def prefetch(self, prefix: PrefixRequest, start: int) -> None:
        """The request cannot be loaded yet: brings what is slow to reach nearer."""
        ...

    def load(
        self, prefix: PrefixRequest, start: int, blocks: Sequence[Block], after_step: int
    ) -> int:
        """Begins to fill `blocks` with `keys[start:]`; returns its id in the ledger: one transfer, or several.

        No more blocks than `lookup` has just found. The ends of loads are for whoever asked for them, who says
        `loaded` what became of it.
        """
        ...

    def loaded(self, keys: Sequence[bytes], failed: Sequence[int]) -> None:
        """A load of `keys` from here has ended; those at the indices `failed` did not come."""
        ...

    def save(self, cached_blocks: Sequence[CachedBlock]) -> int:
        """Blocks that may be kept here, in the order of a prefix. Whether they are is up to the connector.

        Returns how many leading ones it is done with. It stops only where it would store more blocks than
        `TransferLedger.store_room`; the others are offered again, while they can be found.
        """
        ...

    def on_dequeued(self, request_id: str) -> None:
        """The request is admitted, finished or aborted: nothing will be asked for it any more."""
        ...

    def workers_ready(self, ready: WorkerReady) -> None:
        """Workers have started, with empty device and host memory."""
        ...

    def workers_lost(self) -> None:
        """All that was in the memory of workers is gone. The ledger has dropped all transfers."""
        ...

    def poll(self) -> bool | Collection[str]:
        """Takes news from wherever the connector looks; True if any `lookup` that said None may know now, or the
        requests whose lookups may.
        """
        ...

    def pollables(self) -> list[object]:
        """File descriptors that become readable with news."""
        ...

    def load_report(self) -> TierLoad: ...

    def close(self) -> None: ...


class LandingPlace(Protocol):
    """Memory nearer to the device, into which a tier further off brings blocks before they are loaded.

    Whoever reserves slots opens the transfer into them, and settles each when it has ended. When workers are lost,
    reservations are gone and must not be settled.
    """

    def reserve(self, prefix: PrefixRequest, index: int) -> int | None:
        """A slot for the block of `prefix.keys[index]`; None if it is there or on its way, or there is no room."""
        ...

    def settle(self, key: bytes, *, is_good: bool) -> None:
        """The transfer into the slot that was reserved for `key` has ended."""
        ...


class BlockMemory(Protocol):
    """The KV tensors of one rank, registered with the worker's half."""

    @property
    def block_bytes(self) -> int:
        """Of one block in all layers of this rank."""
        ...

    def read(self, block_id: int, into: memoryview) -> None:
        """Copies a block out; `into` has `block_bytes`."""
        ...

    def write(self, block_id: int, source: memoryview) -> None:
        """Copies a block in."""
        ...


class TransferWorker(Protocol):
    """The worker's half. Copies beside the steps, in threads of its own."""

    def add_peers(self, peers: Sequence[KVPeer]) -> None:
        """Transfers from now on may name these."""
        ...

    def remove_peers(self, peer_ids: Sequence[str]) -> None:
        """No transfer names these any more; what still runs from there fails."""
        ...

    def start(self, transfers: Sequence[Transfer]) -> None:
        """Begins transfers; none of them makes the caller wait."""
        ...

    def step_done(self, step: int) -> None:
        """The worker has executed all steps up to this one."""
        ...

    def poll(self) -> list[TransferEnd]:
        """Those that have ended since the last call. A transfer ends when no thread touches its blocks."""
        ...

    def close(self) -> None:
        """Ends the threads, and waits for them."""
        ...
