"""The decode engine's half of a handoff: KV of prompts that other engines compute, and the tokens behind them.

A request that is announced with a source is asked for there at once. As soon as its first blocks are computed,
the stack may load it: blocks are taken for all that will come, and read as they come, while the prompt is computed
on. When all is read, the other side is asked whether it was held all the time; only then it counts. Whatever goes
wrong before, nothing of it does.

Everything asked is asked again while it is not answered, and any answer may come late, twice or never.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import NamedTuple

from pagoda.engine.messages import (
    DeviceBlocks,
    KVPeer,
    KVRank,
    KVSource,
    RemoteBlocks,
    TierLoad,
    Transfer,
    TransferEnd,
    WorkerReady,
)
from pagoda.ipc.clock import Clock
from pagoda.kv.block_pool import Block
from pagoda.kv.connector import Demand, Offer
from pagoda.kv.transfers import TransferLedger
from pagoda.pd.holder import FirstToken
from pagoda.pd.messages import (
    KVBlocks,
    KVCheck,
    KVDone,
    KVGone,
    KVHello,
    KVPrefilled,
    KVRefused,
    KVRenew,
    KVRenewed,
    KVVerdict,
    KVWant,
    KVWelcome,
    PrefillMessage,
    digest_of,
)
from pagoda.pd.peers import PeerLost, Peers
from pagoda.pd.sources import SourceSeal

SILENCE_S = 5.0
"""An engine that says nothing for so long, though it is asked, counts as gone."""
STALL_S = 30.0
"""So long may nothing (more) come of a prompt that is not computed yet: the other engine may lack the room that is
held there for requests which wait here behind this one."""
_RENEWALS = 5
"""Per lease, at least."""
_MAX_RENEWAL_S = 1.0
_COMPLAINT_S = 60.0
"""So long is what goes wrong with an engine not said again."""
_PIECE_BYTES = 64 * 2**20
_PIECE_BLOCKS = 256
"""The most that one transfer reads, of all ranks together; in blocks where it is not known how large they are. A
worker gives up a transfer that takes too long."""
_MAX_PEERS = 256
"""Engines to which there are connections at a time."""

_log = logging.getLogger(__name__)


class Arrived(NamedTuple):
    """The token behind a request's prompt."""

    request_id: str
    token: FirstToken


class Failed(NamedTuple):
    """A request's KV cannot be fetched; a clause says why."""

    request_id: str
    reason: str


class _Load:
    """Blocks that are being filled."""

    def __init__(self, held_id: int, start: int, blocks: Sequence[Block], after_step: int) -> None:
        self.held_id = held_id
        self.start = start
        self.end = start + len(blocks)
        self.blocks = blocks
        self.after_step = after_step
        self.next = start
        """The first block that has not begun to be read."""
        self.num_open = 0
        """Transfers under way."""
        self.is_checking = False
        """Whether all is read, and the other side was asked whether it counts."""


class _Fetch:
    """A request whose KV is asked for."""

    def __init__(self, demand: Demand, source: KVSource, start: int, now: float) -> None:
        self.demand = demand
        self.source = source
        self.is_token_alone = start >= len(demand.keys)
        """Whether the device had all blocks when it was announced."""
        self.block_ids: list[int] = []
        """Of the leading blocks that are known to be computed."""
        self.num_blocks: int | None = None
        """How many of the demand's blocks will come; None if that is not known yet."""
        self.peer_id: str | None = None
        """Whose blocks these are."""
        self.load: _Load | None = None
        self.is_loaded = False
        self.has_token = False
        self.moved_at = now
        """When there was something new of it."""

    @property
    def is_incomplete(self) -> bool:
        """Whether something of it has yet to come, be it news, blocks or the token."""
        if self.load is not None or not self.has_token:
            return True
        return self.num_blocks is None or len(self.block_ids) < self.num_blocks

    @property
    def is_owed(self) -> bool:
        """Whether it is for the other engine to do something; how long a read may take is for workers to say."""
        return self.is_incomplete and (self.load is None or self.load.num_open == 0)


class _Peer:
    """An engine at an address."""

    def __init__(self, address: str, now: float) -> None:
        self.address = address
        self.welcome: KVWelcome | None = None
        self.refusal = ""
        self.fetches: dict[str, _Fetch] = {}
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


class RemoteKV:
    """A `KVConnector` over engines that hold KV; the engine's loop calls `step` before the scheduler acts."""

    tier = "remote"
    gives_up = True
    is_cache = False

    def __init__(
        self,
        peers: Peers,
        ledger: TransferLedger,
        clock: Clock,
        *,
        seal: SourceSeal,
        engine_id: str,
        also_holds: bool = False,
        fails: bool = False,
    ) -> None:
        """`engine_id` is this engine's. With `fails`, requests whose KV cannot be fetched are to fail; else they
        compute it.

        An engine that `also_holds` KV does not let others hold it for long while there is no room for it here:
        two of them could wait for each other's.
        """
        self._links = peers
        self._ledger = ledger
        self._clock = clock
        self._seal = seal
        self._engine_id = engine_id
        self._also_holds = also_holds
        self._fails = fails
        self._digest = ""
        self._vocab_size = 0
        self._has_workers = False
        self._peers: dict[str, _Peer] = {}
        """By address."""
        self._fetches: dict[str, _Fetch] = {}
        """By request; each is in one peer's too."""
        self._copies: dict[int, tuple[_Fetch, _Load]] = {}
        """By transfer in the ledger."""
        self._met: list[KVPeer] = []
        self._parted: list[str] = []
        self._news: list[Arrived | Failed] = []
        self._told: set[str] = set()
        """Requests of whom there is news."""
        self._complaints: dict[tuple[str, str], float] = {}
        """When what was last said of whom, the latest last."""
        self._num_loaded = 0
        self._num_failed = 0

    # ---- requests that could use KV

    def announce(self, demand: Demand, start: int) -> None:
        source = demand.source
        if source is None or demand.request_id in self._fetches:
            return
        if not self._seal.has_made(source):
            problem = "no engine with the secret of this one has made it"
            self._give_up(demand.request_id, "the kv_source of a request", problem)
            return
        if source.engine_id == self._engine_id:  # what it has is found on the device
            self.release(source)
            return
        peer = self._peer_at(source.address)
        if peer is None:
            self._give_up(
                demand.request_id, source.address, f"{_MAX_PEERS} other engines are asked"
            )
            return
        obstacle = self._obstacle(peer, source)
        if obstacle is not None:
            self.release(source)
            self._give_up(demand.request_id, source.address, obstacle)
            return
        now = self._clock.now()
        if not peer.fetches:
            peer.heard_at, peer.renew_at = now, now + peer.renewal_s
        fetch = _Fetch(demand, source, start, now)
        self._fetches[demand.request_id] = peer.fetches[source.transfer_id] = fetch
        self._links.send(peer.address, _want(fetch))

    def _peer_at(self, address: str) -> _Peer | None:
        """None where there would be too many, of whom none rests."""
        peer = self._peers.get(address)
        if peer is None and self._has_room_for_peer():
            peer = self._peers[address] = _Peer(address, self._clock.now())
            self._links.send(address, KVHello(digest=self._digest))
        return peer

    def _has_room_for_peer(self) -> bool:
        """Whether there may be one more; parts from the one that has rested longest if need be."""
        if len(self._peers) < _MAX_PEERS:
            return True
        resting = [peer for peer in self._peers.values() if not peer.fetches]
        if not resting:
            return False
        oldest = min(resting, key=lambda peer: peer.heard_at)
        self._links.hang_up(oldest.address)
        self._lose(oldest, "others are asked")
        return True

    def _obstacle(self, peer: _Peer, source: KVSource) -> str | None:
        if peer.refusal:
            return peer.refusal
        if source.transfer_id in peer.fetches:
            return "another request fetches it already"
        return _staleness(peer, source)

    def release(self, source: KVSource) -> None:
        """A request here will not fetch it; unless another does, nobody will.

        That is said to who is connected. To others it is not worth a connection: their leases run out.
        """
        peer = self._peers.get(source.address)
        is_wanted = peer is None or source.transfer_id in peer.fetches
        if not is_wanted and self._seal.has_made(source):
            self._links.send(source.address, KVDone([source.transfer_id]))

    def lookup(self, demand: Demand, start: int) -> int | None:
        fetch = self._fetches.get(demand.request_id)
        if fetch is None or fetch.is_loaded:
            return 0
        if start >= len(demand.keys):  # all that is missing is the token
            return 0 if fetch.has_token else None
        if fetch.num_blocks is None or (fetch.num_blocks > start and not self._is_open(fetch)):
            return None
        return max(0, fetch.num_blocks - start)

    def _is_open(self, fetch: _Fetch) -> bool:
        """Whether its blocks can be read, as far as they are known."""
        return self._peers[fetch.source.address].has(fetch.peer_id)

    def prefetch(self, demand: Demand, start: int) -> None:
        """There is nothing nearer to bring blocks to."""

    def forget(self, request_id: str) -> None:
        fetch = self._fetches.get(request_id)
        if fetch is not None:
            self._close(fetch, "nobody waits for it any more")

    # ---- loads

    def load(self, demand: Demand, start: int, blocks: Sequence[Block], after_step: int) -> int:
        fetch = self._fetches[demand.request_id]
        held_id = self._ledger.hold(blocks)
        fetch.load = _Load(held_id, start, blocks, after_step)
        fetch.moved_at = self._clock.now()
        self._pull(fetch, fetch.load)
        return held_id

    def _pull(self, fetch: _Fetch, load: _Load) -> None:
        """Begins to read what is computed."""
        first, end = load.next, min(len(fetch.block_ids), load.end)
        if end <= first or fetch.peer_id is None:
            return
        block_ids = fetch.block_ids[first:end]
        if max(block_ids) >= self._peers[fetch.source.address].num_blocks() or min(block_ids) < 0:
            self._fail(fetch, "it named blocks that it does not have")
            return
        piece = self._peers[fetch.source.address].piece()
        for start in range(first, end, piece):
            load.next = min(start + piece, end)
            blocks = load.blocks[start - load.start : load.next - load.start]
            transfer_id = self._ledger.open(
                self,
                RemoteBlocks(fetch.peer_id, fetch.block_ids[start : load.next]),
                DeviceBlocks([block.block_id for block in blocks]),
                blocks,
                after_step=load.after_step,
            )
            self._copies[transfer_id] = fetch, load
            load.num_open += 1

    def transfer_ended(self, transfer: Transfer, end: TransferEnd) -> None:
        fetch, load = self._copies.pop(transfer.transfer_id)
        if fetch.load is not load:
            return  # nobody waits for it any more
        if end.failed:
            self._fail(fetch, f"it could not be read ({end.error})")
            return
        load.num_open -= 1
        fetch.moved_at = self._clock.now()
        if load.next == load.end and load.num_open == 0:
            load.is_checking = True
            self._links.send(fetch.source.address, KVCheck(fetch.source.transfer_id))

    def transfer_lost(self, transfer: Transfer) -> None:
        del self._copies[transfer.transfer_id]

    def loaded(self, keys: Sequence[bytes], failed: Sequence[int]) -> None:
        """What came was counted when it did."""

    def offer(self, offers: Sequence[Offer]) -> int:
        """Nothing is kept here."""
        return len(offers)

    def _fail(self, fetch: _Fetch, reason: str) -> None:
        """Nothing (more) of it will come; what has come does not count."""
        request_id, load = fetch.demand.request_id, fetch.load
        if fetch.is_loaded:
            self._close(fetch, reason)
            return
        if load is not None:
            self._num_failed += len(load.blocks)
        self._close(fetch, reason)
        if load is None:
            self._give_up(request_id, fetch.source.address, reason)
        else:
            self._complain(fetch.source.address, reason)

    def _close(self, fetch: _Fetch, reason: str) -> None:
        """Ends the load, if there is one, with nothing, and the lease on the other side."""
        request_id, source = fetch.demand.request_id, fetch.source
        load, fetch.load = fetch.load, None
        if load is not None:
            self._ledger.settle(load.held_id, list(range(len(load.blocks))), reason)
        del self._fetches[request_id]
        peer = self._peers.get(source.address)
        if peer is not None:
            peer.fetches.pop(source.transfer_id, None)
            self._links.send(source.address, KVDone([source.transfer_id]))
        self._told.add(request_id)

    def _give_up(self, request_id: str, whom: str, reason: str) -> None:
        self._complain(whom, reason)
        if self._fails:
            self._news.append(Failed(request_id, reason))

    def _complain(self, whom: str, reason: str) -> None:
        """Once a minute: what goes wrong with one request may go wrong with thousands."""
        now = self._clock.now()
        while self._complaints:
            oldest = next(iter(self._complaints))
            if now - self._complaints[oldest] < _COMPLAINT_S:
                break
            del self._complaints[oldest]
        if (whom, reason) not in self._complaints:
            self._complaints[whom, reason] = now
            _log.warning("KV cannot be fetched from %s: %s", whom, reason)

    # ---- what others say

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

    def take_news(self) -> list[Arrived | Failed]:
        """First tokens, and requests that are to fail, since the last call."""
        news, self._news = self._news, []
        return news

    def take_peers(self) -> tuple[list[KVPeer], list[str]]:
        """Whom workers are to be told of: peers from whom blocks will be read, and those from whom none will."""
        met, self._met = self._met, []
        parted, self._parted = self._parted, []
        return met, parted

    def _take(self, peer: _Peer, message: PrefillMessage | PeerLost) -> None:
        peer.heard_at = self._clock.now()
        match message:
            case PeerLost():
                self._lose(peer, message.reason)
            case KVWelcome():
                self._meet(peer, message)
            case KVRefused():
                peer.refusal = message.reason
                for fetch in list(peer.fetches.values()):
                    self._fail(fetch, message.reason)
            case KVRenewed():
                pass
            case KVBlocks() | KVPrefilled() | KVVerdict() | KVGone():
                wanted = peer.fetches.get(message.transfer_id)
                if wanted is not None:
                    was_open, num_blocks = self._is_open(wanted), wanted.num_blocks
                    self._take_of(peer, wanted, message)
                    is_open = message.transfer_id in peer.fetches and self._is_open(wanted)
                    if is_open > was_open or wanted.num_blocks != num_blocks:
                        self._told.add(wanted.demand.request_id)

    def _take_of(
        self, peer: _Peer, fetch: _Fetch, message: KVBlocks | KVPrefilled | KVVerdict | KVGone
    ) -> None:
        match message:
            case KVBlocks():
                self._take_blocks(peer, fetch, message)
            case KVPrefilled():
                self._take_token(fetch, message)
            case KVVerdict():
                self._take_verdict(fetch, is_valid=message.is_valid)
            case KVGone():
                self._fail(fetch, message.reason)

    def _meet(self, peer: _Peer, welcome: KVWelcome) -> None:
        if peer.has(welcome.peer.peer_id):
            return
        self._part(peer)
        peer.welcome = welcome
        if self._has_workers:
            self._met.append(welcome.peer)
        for fetch in list(peer.fetches.values()):
            self._told.add(fetch.demand.request_id)
            reason = _staleness(peer, fetch.source)
            if reason is not None:
                self._fail(fetch, reason)
            elif fetch.load is not None and not peer.has(fetch.peer_id):
                self._fail(fetch, "its workers were replaced")

    def _part(self, peer: _Peer) -> None:
        if peer.welcome is not None and self._has_workers:
            self._parted.append(peer.welcome.peer.peer_id)
        peer.welcome = None

    def _take_blocks(self, peer: _Peer, fetch: _Fetch, message: KVBlocks) -> None:
        keys, num_known = fetch.demand.keys, len(fetch.block_ids)
        end = message.first + len(message.block_ids)
        if not 0 <= message.first <= num_known < end <= len(keys):
            return  # known already, or there is a gap: it is asked for again
        if message.key != keys[end - 1]:
            self._fail(fetch, "it is of other tokens than the request's")
            return
        if fetch.peer_id not in (None, message.peer_id):
            self._fail(fetch, "its workers were replaced")
            return
        if not peer.has(message.peer_id):
            self._links.send(peer.address, KVHello(digest=self._digest))
        fetch.peer_id = message.peer_id
        fetch.block_ids += message.block_ids[num_known - message.first :]
        self._expect(fetch, message.num_blocks)
        if fetch.load is not None:
            self._pull(fetch, fetch.load)

    def _expect(self, fetch: _Fetch, num_blocks: int) -> None:
        fetch.moved_at = self._clock.now()
        if fetch.num_blocks is None:
            fetch.num_blocks = min(max(num_blocks, len(fetch.block_ids)), len(fetch.demand.keys))

    def _take_token(self, fetch: _Fetch, message: KVPrefilled) -> None:
        if fetch.has_token:
            return
        fetch.has_token = True
        self._expect(fetch, message.num_blocks)
        self._told.add(fetch.demand.request_id)
        if message.token_id < self._vocab_size:
            token = FirstToken(
                message.key, message.token_id, message.logprobs, message.num_cached_tokens
            )
            self._news.append(Arrived(fetch.demand.request_id, token))
        if fetch.is_loaded or fetch.is_token_alone:
            self._close(fetch, "all has come")

    def _take_verdict(self, fetch: _Fetch, *, is_valid: bool) -> None:
        load = fetch.load
        if load is None or not load.is_checking:
            return
        if not is_valid:
            self._fail(fetch, "it was not held all the time while it was read")
            return
        self._num_loaded += len(load.blocks)
        self._ledger.settle(load.held_id, [])
        fetch.load = None
        fetch.is_loaded = True
        if fetch.has_token:
            self._close(fetch, "all has come")

    # ---- patience

    def _renew(self, peer: _Peer, now: float) -> None:
        if now - peer.heard_at > SILENCE_S:
            for fetch in list(peer.fetches.values()):
                self._fail(fetch, "it does not answer")
            self._links.hang_up(peer.address)
            self._lose(peer, "it does not answer")
            return
        peer.renew_at = now + peer.renewal_s
        self._links.send(peer.address, KVRenew(list(peer.fetches)))
        named = {fetch.peer_id for fetch in peer.fetches.values()} - {None}
        if peer.welcome is None or not all(map(peer.has, named)):
            self._links.send(peer.address, KVHello(digest=self._digest))
        for fetch in list(peer.fetches.values()):
            is_old = now - fetch.moved_at > STALL_S
            if is_old and fetch.is_owed:
                self._fail(fetch, f"nothing more of it came for {STALL_S:g} s")
            elif is_old and self._also_holds and fetch.load is None:
                self._fail(fetch, f"there was no room for it for {STALL_S:g} s")
            elif fetch.moved_at < now - peer.renewal_s:
                self._ask_again(peer, fetch)

    def _ask_again(self, peer: _Peer, fetch: _Fetch) -> None:
        """Of what there is nothing new, a question or its answer may be lost."""
        if fetch.load is not None and fetch.load.is_checking:
            self._links.send(peer.address, KVCheck(fetch.source.transfer_id))
        elif fetch.is_incomplete:
            self._links.send(peer.address, _want(fetch))

    def _lose(self, peer: _Peer, reason: str) -> None:
        """There is no way there any more."""
        self._part(peer)
        del self._peers[peer.address]
        for fetch in list(peer.fetches.values()):
            self._fail(fetch, reason)

    def next_event_at(self) -> float | None:
        """When to call `step` even if nothing comes."""
        return min((peer.renew_at for peer in self._peers.values() if peer.fetches), default=None)

    # ---- the workers, and the engine's loop

    def workers_ready(self, ready: WorkerReady) -> None:
        self._digest = digest_of(ready)
        self._vocab_size = ready.vocab_size
        self._has_workers = True
        self._met += [peer.welcome.peer for peer in self._peers.values() if peer.welcome]

    def workers_lost(self) -> None:
        """The ledger has dropped all loads."""
        self._has_workers = False
        self._met.clear()
        self._parted.clear()
        for fetch in list(self._fetches.values()):
            if fetch.load is not None:
                fetch.load = None
                self._close(fetch, "the workers were lost")

    def poll(self) -> Collection[str]:
        told, self._told = self._told, set()
        return told

    def pollables(self) -> list[object]:
        return self._links.pollables()

    def load_report(self) -> TierLoad:
        return TierLoad(
            name=self.tier,
            num_blocks=0,
            num_total_blocks=0,
            num_loaded=self._num_loaded,
            num_failed=self._num_failed,
        )

    def close(self) -> None:
        for fetch in list(self._fetches.values()):
            self._close(fetch, "the engine ends")


def _want(fetch: _Fetch) -> KVWant:
    return KVWant(fetch.source.transfer_id, len(fetch.block_ids), len(fetch.demand.keys))


def _staleness(peer: _Peer, source: KVSource) -> str | None:
    if peer.welcome is None or peer.welcome.engine_id == source.engine_id:
        return None
    return "another engine is there now"
