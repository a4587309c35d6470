"""Engines from which this one fetches KV: connections, what the engines have said, and time-outs.

Every question is repeated until it is answered, and any answer may come late, twice or never.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pagoda.ipc.clock import Clock
from pagoda.kv.block_pool import Block
from pagoda.kv.connector import PrefixRequest
from pagoda.messages.frontend import KVSource
from pagoda.messages.transfers import KVPeer, KVRank
from pagoda.pd import messages
from pagoda.pd.links import PeerLost, Peers

if TYPE_CHECKING:
    from pagoda.pd.connector import RemoteKV

SILENCE_S = 5.0
"""Seconds of silence after which an engine that is asked counts as gone."""
STALL_S = 30.0
"""Seconds without news after which a fetch fails while its prompt is being computed. The other engine may lack
room, which it holds for requests that wait here behind this one."""
MAX_PREFILL_PEERS = 256
_RENEWALS = 5
_MAX_RENEWAL_S = 1.0
_PIECE_BYTES = 64 * 2**20
_PIECE_BLOCKS = 256
"""The most that one transfer reads, in bytes of all ranks together, or in blocks where the size of a block is not
known. A worker gives up a transfer that takes too long."""


class Load:
    """Blocks that a fetch is filling: blocks `start` to `end` of the prompt."""

    def __init__(self, held_id: int, start: int, blocks: Sequence[Block], after_step: int) -> None:
        self.held_id = held_id
        self.start, self.end = start, start + len(blocks)
        self.blocks = blocks
        self.after_step = after_step
        self.next = start
        """First block that no transfer reads yet."""
        self.num_open = 0
        self.is_checking = False
        """All blocks are read, and the other engine was asked whether it held them all the time."""


class Fetch:
    """A request whose KV another engine is asked for."""

    def __init__(
        self, prefix: PrefixRequest, source: KVSource, peer: PrefillPeer, start: int, now: float
    ) -> None:
        self.prefix = prefix
        self.source = source
        self.peer = peer
        self.is_token_alone = start >= len(prefix.keys)
        """The device had all blocks when the request was queued."""
        self.block_ids: list[int] = []
        """Ids, in the other engine, of the leading blocks that are known to be computed."""
        self.num_blocks: int | None = None
        """Number of the prefix's blocks that will come; None if not known yet."""
        self.peer_id: str | None = None
        """Id of the workers that have these blocks."""
        self.load: Load | None = None
        self.is_loaded = False
        self.has_token = False
        self.moved_at = now

    @property
    def is_open(self) -> bool:
        """True if its known blocks can be read."""
        return self.peer.has(self.peer_id)

    @property
    def is_incomplete(self) -> bool:
        """Blocks or the token, or news of them, have yet to come."""
        if self.load is not None or not self.has_token:
            return True
        return self.num_blocks is None or len(self.block_ids) < self.num_blocks

    @property
    def is_owed(self) -> bool:
        """True if it is the other engine's turn. Workers limit the duration of reads."""
        return self.is_incomplete and (self.load is None or self.load.num_open == 0)

    def subscription(self) -> messages.KVSubscribe:
        """Asks for all blocks that nothing is known of."""
        return messages.KVSubscribe(
            self.source.transfer_id, len(self.block_ids), len(self.prefix.keys)
        )


class PrefillPeer:
    def __init__(self, address: str, now: float) -> None:
        self.address = address
        self.welcome: messages.KVWelcome | None = None
        self.refusal = ""
        self.fetches: dict[str, Fetch] = {}
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
        return min((rank.num_blocks for rank in self.ranks), default=0)

    def piece(self) -> int:
        """Number of blocks that one transfer reads."""
        parts = [part for rank in self.ranks for part in rank.parts]
        block_bytes = sum(part.num_heads * part.head_bytes for part in parts)
        return max(1, _PIECE_BYTES // block_bytes) if block_bytes else _PIECE_BLOCKS

    def staleness(self, source: KVSource) -> str | None:
        """Returns a clause that says why if nothing can be fetched from a source any more; else None."""
        if self.welcome is None or self.welcome.engine_id == source.engine_id:
            return None
        return "another engine is there now"


class PrefillPeers:
    """All of these engines, by address."""

    def __init__(self, links: Peers, clock: Clock, owner: RemoteKV, *, also_holds: bool) -> None:
        """An engine that `also_holds` KV fails fetches for which there is no room here for long: two such engines
        could wait for each other's room.
        """
        self.by_address: dict[str, PrefillPeer] = {}
        self._links = links
        self._clock = clock
        self._owner = owner
        self._also_holds = also_holds
        self._digest = ""
        self._has_workers = False
        self._idle: dict[str, None] = {}
        """Addresses of peers without fetches, idle for longest first."""
        self._renewals: list[tuple[float, str]] = []
        """Heap of times and addresses; an entry counts if it is the peer's `renew_at` and the peer has fetches."""
        self._added_peers: list[KVPeer] = []
        self._removed_peers: list[str] = []

    def at(self, address: str) -> PrefillPeer | None:
        """Returns the peer at an address, newly connected if need be; None if there are too many busy ones."""
        peer = self.by_address.get(address)
        if peer is None and self._has_room():
            peer = self.by_address[address] = PrefillPeer(address, self._clock.now())
            self._idle[address] = None
            self.greet(peer)
        return peer

    def _has_room(self) -> bool:
        """Makes room for one more connection, if need be by ending the one that has been idle for longest."""
        if len(self.by_address) < MAX_PREFILL_PEERS:
            return True
        oldest = next(iter(self._idle), None)
        if oldest is None:
            return False
        self._links.hang_up(oldest)
        self._lose(self.by_address[oldest], "others are asked")
        return True

    def begin(self, fetch: Fetch) -> None:
        peer = fetch.peer
        if not peer.fetches:
            self._idle.pop(peer.address, None)
            peer.heard_at = self._clock.now()
            self._schedule_renewal(peer)
        peer.fetches[fetch.source.transfer_id] = fetch
        self.send(peer, fetch.subscription())

    def end(self, fetch: Fetch) -> None:
        """Forgets a fetch, and releases its lease if there is still a connection."""
        peer, transfer_id = fetch.peer, fetch.source.transfer_id
        if self.by_address.get(peer.address) is not peer:
            return
        if peer.fetches.pop(transfer_id, None) is not None and not peer.fetches:
            self._idle[peer.address] = None
        self.send(peer, messages.KVRelease([transfer_id]))

    def send(self, peer: PrefillPeer, message: messages.DecodeMessage) -> None:
        self._links.send(peer.address, message)

    def greet(self, peer: PrefillPeer) -> None:
        self.send(peer, messages.KVHello(digest=self._digest))

    # ---- what peers say

    def step(self) -> None:
        """Applies messages that have come, and repeats questions that were not answered."""
        for address, message in self._links.receive():
            peer = self.by_address.get(address)
            if peer is not None:
                self._apply(peer, message)
        now = self._clock.now()
        while (at := self.next_event_at()) is not None and at <= now:
            _, address = heapq.heappop(self._renewals)
            self._renew(self.by_address[address], now)

    def _apply(self, peer: PrefillPeer, message: messages.PrefillMessage | PeerLost) -> None:
        peer.heard_at = self._clock.now()
        match message:
            case PeerLost():
                self._links.hang_up(peer.address)  # there may be another connection by now
                self._lose(peer, message.reason)
            case messages.KVWelcome():
                self._apply_welcome(peer, message)
            case messages.KVRefused():
                peer.refusal = message.reason
                for fetch in list(peer.fetches.values()):
                    self._owner.fail(fetch, message.reason)
            case messages.KVRenewed():
                pass
            case _:
                wanted = peer.fetches.get(message.transfer_id)
                if wanted is not None:
                    self._owner.apply(wanted, message)

    def _apply_welcome(self, peer: PrefillPeer, welcome: messages.KVWelcome) -> None:
        if peer.has(welcome.peer.peer_id):
            return
        self._remove_workers(peer)
        peer.welcome = welcome
        if self._has_workers:
            self._added_peers.append(welcome.peer)
        for fetch in list(peer.fetches.values()):
            self._owner.on_change(fetch)
            reason = peer.staleness(fetch.source)
            if reason is not None:
                self._owner.fail(fetch, reason)
            elif fetch.load is not None and not peer.has(fetch.peer_id):
                self._owner.fail(fetch, "its workers were replaced")

    def _remove_workers(self, peer: PrefillPeer) -> None:
        if peer.welcome is not None and self._has_workers:
            self._removed_peers.append(peer.welcome.peer.peer_id)
        peer.welcome = None

    # ---- time-outs

    def _schedule_renewal(self, peer: PrefillPeer) -> None:
        peer.renew_at = self._clock.now() + peer.renewal_s
        heapq.heappush(self._renewals, (peer.renew_at, peer.address))

    def _renew(self, peer: PrefillPeer, now: float) -> None:
        if now - peer.heard_at > SILENCE_S:
            for fetch in list(peer.fetches.values()):
                self._owner.fail(fetch, "it does not answer")
            self._links.hang_up(peer.address)
            self._lose(peer, "it does not answer")
            return
        self._schedule_renewal(peer)
        self.send(peer, messages.KVRenew(list(peer.fetches)))
        named = {fetch.peer_id for fetch in peer.fetches.values()} - {None}
        if peer.welcome is None or not all(map(peer.has, named)):
            self.greet(peer)
        for fetch in list(peer.fetches.values()):
            is_old = now - fetch.moved_at > STALL_S
            if is_old and fetch.is_owed:
                self._owner.fail(fetch, f"nothing more of it came for {STALL_S:g} s")
            elif is_old and self._also_holds and fetch.load is None:
                self._owner.fail(fetch, f"there was no room for it for {STALL_S:g} s")
            elif fetch.moved_at < now - peer.renewal_s:
                self._ask_again(peer, fetch)

    def _ask_again(self, peer: PrefillPeer, fetch: Fetch) -> None:
        """Repeats the question about a fetch without news: the question or its answer may be lost."""
        if fetch.load is not None and fetch.load.is_checking:
            self.send(peer, messages.KVCheck(fetch.source.transfer_id))
        elif fetch.is_incomplete:
            self.send(peer, fetch.subscription())

    def _lose(self, peer: PrefillPeer, reason: str) -> None:
        self._remove_workers(peer)
        del self.by_address[peer.address]
        self._idle.pop(peer.address, None)
        for fetch in list(peer.fetches.values()):
            self._owner.fail(fetch, reason)

    def next_event_at(self) -> float | None:
        while self._renewals:
            at, address = self._renewals[0]
            peer = self.by_address.get(address)
            if peer is not None and peer.fetches and peer.renew_at == at:
                return at
            heapq.heappop(self._renewals)
        return None

    # ---- the workers

    def workers_ready(self, digest: str) -> None:
        self._digest = digest
        self._has_workers = True
        peers = self.by_address.values()
        self._added_peers += [peer.welcome.peer for peer in peers if peer.welcome]

    def workers_lost(self) -> None:
        self._has_workers = False
        self._added_peers.clear()
        self._removed_peers.clear()

    def drain_peer_changes(self) -> tuple[list[KVPeer], list[str]]:
        """Peers to announce to the workers, and ids of peers to withdraw, since the last call."""
        added, self._added_peers = self._added_peers, []
        removed, self._removed_peers = self._removed_peers, []
        return added, removed

    def pollables(self) -> list[object]:
        return self._links.pollables()
