"""The engines that hold KV which this one fetches: the ways to them, what they have said, and patience with them.

Everything asked is asked again while it is not answered, and any answer may come late, twice or never.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pagoda.ipc.clock import Clock
from pagoda.messages.frontend import KVSource
from pagoda.messages.transfers import KVPeer, KVRank
from pagoda.pd.fetch import Fetch
from pagoda.pd.messages import (
    DecodeMessage,
    KVBlocks,
    KVCheck,
    KVCheckResult,
    KVDropped,
    KVHello,
    KVPrefilled,
    KVRefused,
    KVRenew,
    KVRenewed,
    KVWelcome,
    PrefillMessage,
)
from pagoda.pd.peers import PeerLost, Peers

SILENCE_S = 5.0
"""An engine that says nothing for so long, though it is asked, counts as gone."""
STALL_S = 30.0
"""So long may nothing (more) come of a prompt that is not computed yet: the other engine may lack the room that is
held there for requests which wait here behind this one."""
MAX_PREFILL_PEERS = 256
"""Engines to which there are connections at a time."""
_RENEWALS = 5
"""Per lease, at least."""
_MAX_RENEWAL_S = 1.0
_PIECE_BYTES = 64 * 2**20
_PIECE_BLOCKS = 256
"""The most that one transfer reads, of all ranks together; in blocks where it is not known how large they are. A
worker gives up a transfer that takes too long."""

FetchMessage = KVBlocks | KVPrefilled | KVCheckResult | KVDropped


class FetchOwner(Protocol):
    """Whose the fetches are."""

    def take(self, peer: PrefillPeer, fetch: Fetch, message: FetchMessage) -> None:
        """What the peer says of one of its fetches."""
        ...

    def fail(self, fetch: Fetch, reason: str) -> None:
        """Nothing (more) of it will come; a clause says why. It is in no peer's `fetches` any more then."""
        ...

    def tell_of(self, fetch: Fetch) -> None:
        """More may be known of it."""
        ...


class PrefillPeer:
    """An engine at an address."""

    def __init__(self, address: str, now: float) -> None:
        self.address = address
        self.welcome: KVWelcome | None = None
        self.refusal = ""
        self.fetches: dict[str, Fetch] = {}
        """By transfer."""
        self.heard_at = now
        self.renew_at = now

    @property
    def renewal_s(self) -> float:
        if self.welcome is None:
            return _MAX_RENEWAL_S
        return min(self.welcome.lease_s / _RENEWALS, _MAX_RENEWAL_S)

    def has(self, peer_id: str | None) -> bool:
        """Whether these are its workers, as it last said."""
        return self.welcome is not None and self.welcome.peer.peer_id == peer_id

    @property
    def ranks(self) -> Sequence[KVRank]:
        return self.welcome.peer.ranks if self.welcome else ()

    def num_blocks(self) -> int:
        """That every rank has."""
        return min((rank.num_blocks for rank in self.ranks), default=0)

    def piece(self) -> int:
        """How many blocks are read by one transfer."""
        parts = [part for rank in self.ranks for part in rank.parts]
        block_bytes = sum(part.num_heads * part.head_bytes for part in parts)
        return max(1, _PIECE_BYTES // block_bytes) if block_bytes else _PIECE_BLOCKS

    def staleness(self, source: KVSource) -> str | None:
        """Why nothing can be had of a source, if another engine has been here since; a clause."""
        if self.welcome is None or self.welcome.engine_id == source.engine_id:
            return None
        return "another engine is there now"


class PrefillPeers:
    """All of them, by their addresses."""

    def __init__(self, peers: Peers, clock: Clock, owner: FetchOwner, *, also_holds: bool) -> None:
        """An engine that `also_holds` KV does not let others hold it for long while there is no room for it here:
        two of them could wait for each other's.
        """
        self._links = peers
        self._clock = clock
        self._owner = owner
        self._also_holds = also_holds
        self._digest = ""
        self._has_workers = False
        self._peers: dict[str, PrefillPeer] = {}
        self._added_peers: list[KVPeer] = []
        self._removed_peers: list[str] = []

    def find(self, address: str) -> PrefillPeer | None:
        """One to which there is a connection."""
        return self._peers.get(address)

    def of(self, fetch: Fetch) -> PrefillPeer:
        return self._peers[fetch.source.address]

    def at(self, address: str) -> PrefillPeer | None:
        """None where there would be too many, of whom none rests."""
        peer = self._peers.get(address)
        if peer is None and self._has_room():
            peer = self._peers[address] = PrefillPeer(address, self._clock.now())
            self.greet(peer)
        return peer

    def _has_room(self) -> bool:
        """Whether there may be one more; parts from the one that has rested longest if need be."""
        if len(self._peers) < MAX_PREFILL_PEERS:
            return True
        resting = [peer for peer in self._peers.values() if not peer.fetches]
        if not resting:
            return False
        oldest = min(resting, key=lambda peer: peer.heard_at)
        self._links.hang_up(oldest.address)
        self._lose(oldest, "others are asked")
        return True

    def begin(self, peer: PrefillPeer, fetch: Fetch) -> None:
        """Asks there."""
        now = self._clock.now()
        if not peer.fetches:
            peer.heard_at, peer.renew_at = now, now + peer.renewal_s
        peer.fetches[fetch.source.transfer_id] = fetch
        self.send(peer, fetch.want())

    def send(self, peer: PrefillPeer, message: DecodeMessage) -> None:
        self._links.send(peer.address, message)

    def greet(self, peer: PrefillPeer) -> None:
        self.send(peer, KVHello(digest=self._digest))

    # ---- what they say

    def step(self) -> None:
        """Takes what has come, and says again what was not answered."""
        for address, message in self._links.receive():
            peer = self._peers.get(address)
            if peer is not None:
                self._take(peer, message)
        now = self._clock.now()
        for peer in list(self._peers.values()):
            if peer.fetches and now >= peer.renew_at:
                self._renew(peer, now)

    def _take(self, peer: PrefillPeer, message: PrefillMessage | PeerLost) -> None:
        peer.heard_at = self._clock.now()
        match message:
            case PeerLost():
                self._links.hang_up(peer.address)  # there may be another connection by now
                self._lose(peer, message.reason)
            case KVWelcome():
                self._meet(peer, message)
            case KVRefused():
                peer.refusal = message.reason
                for fetch in list(peer.fetches.values()):
                    self._owner.fail(fetch, message.reason)
            case KVRenewed():
                pass
            case KVBlocks() | KVPrefilled() | KVCheckResult() | KVDropped():
                wanted = peer.fetches.get(message.transfer_id)
                if wanted is not None:
                    self._owner.take(peer, wanted, message)

    def _meet(self, peer: PrefillPeer, welcome: KVWelcome) -> None:
        if peer.has(welcome.peer.peer_id):
            return
        self._part(peer)
        peer.welcome = welcome
        if self._has_workers:
            self._added_peers.append(welcome.peer)
        for fetch in list(peer.fetches.values()):
            self._owner.tell_of(fetch)
            reason = peer.staleness(fetch.source)
            if reason is not None:
                self._owner.fail(fetch, reason)
            elif fetch.load is not None and not peer.has(fetch.peer_id):
                self._owner.fail(fetch, "its workers were replaced")

    def _part(self, peer: PrefillPeer) -> None:
        if peer.welcome is not None and self._has_workers:
            self._removed_peers.append(peer.welcome.peer.peer_id)
        peer.welcome = None

    # ---- patience

    def _renew(self, peer: PrefillPeer, now: float) -> None:
        if now - peer.heard_at > SILENCE_S:
            for fetch in list(peer.fetches.values()):
                self._owner.fail(fetch, "it does not answer")
            self._links.hang_up(peer.address)
            self._lose(peer, "it does not answer")
            return
        peer.renew_at = now + peer.renewal_s
        self.send(peer, KVRenew(list(peer.fetches)))
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
        """Of what there is nothing new, a question or its answer may be lost."""
        if fetch.load is not None and fetch.load.is_checking:
            self.send(peer, KVCheck(fetch.source.transfer_id))
        elif fetch.is_incomplete:
            self.send(peer, fetch.want())

    def _lose(self, peer: PrefillPeer, reason: str) -> None:
        """There is no way there any more."""
        self._part(peer)
        del self._peers[peer.address]
        for fetch in list(peer.fetches.values()):
            self._owner.fail(fetch, reason)

    def next_event_at(self) -> float | None:
        """When to call `step` even if nothing comes."""
        return min((peer.renew_at for peer in self._peers.values() if peer.fetches), default=None)

    # ---- the workers

    def workers_ready(self, digest: str) -> None:
        self._digest = digest
        self._has_workers = True
        self._added_peers += [it.welcome.peer for it in self._peers.values() if it.welcome]

    def workers_lost(self) -> None:
        self._has_workers = False
        self._added_peers.clear()
        self._removed_peers.clear()

    def drain_peer_changes(self) -> tuple[list[KVPeer], list[str]]:
        """Whom workers are to be told of: peers from whom blocks will be read, and those from whom none will."""
        added_peers, self._added_peers = self._added_peers, []
        removed_peers, self._removed_peers = self._removed_peers, []
        return added_peers, removed_peers

    def pollables(self) -> list[object]:
        return self._links.pollables()
