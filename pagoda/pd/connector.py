"""The decode engine's half of a handoff: KV of prompts that other engines compute, and the tokens behind them.

A queued request with a source is asked for there at once. As soon as the first blocks are computed the request may
load: blocks are allocated for all that will come, and read as they come, while the other engine goes on computing.
When everything is read, the other engine is asked whether it held the blocks all the time; only then they count.
Whatever goes wrong before, none of them counts.

`pagoda.pd.prefill_peers` decides which engine is asked, how often, and how long an answer may take.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from functools import partial
from typing import NamedTuple

from pagoda.ipc.clock import Clock
from pagoda.kv.block_pool import Block
from pagoda.kv.connector import CachedBlock, PrefixRequest
from pagoda.kv.transfers import TransferLedger
from pagoda.messages.frontend import KVSource
from pagoda.messages.load import TierLoad
from pagoda.messages.transfers import DeviceBlocks, RemoteBlocks, TransferEnd
from pagoda.messages.worker import WorkerReady
from pagoda.pd import messages
from pagoda.pd.links import Peers
from pagoda.pd.prefill_peers import (
    MAX_PREFILL_PEERS,
    Fetch,
    Load,
    PrefillPeer,
    PrefillPeers,
)
from pagoda.pd.transfer_tokens import TransferTokens

_COMPLAINT_S = 60.0
"""Seconds for which a problem of an engine is not logged again."""
_log = logging.getLogger(__name__)


class Arrived(NamedTuple):
    """The token behind a request's prompt has come."""

    request_id: str
    token: messages.KVPrefilled


class Failed(NamedTuple):
    """A request's KV cannot be fetched; `reason` is a clause."""

    request_id: str
    reason: str


class RemoteKV:
    """A `KVConnector` over engines that export KV. The engine's loop calls `step` before the scheduler acts."""

    tier = "remote"
    has_own_timeout = True
    is_cache = False

    def __init__(
        self,
        peers: Peers,
        ledger: TransferLedger,
        clock: Clock,
        *,
        tokens: TransferTokens,
        engine_id: str,
        also_holds: bool = False,
        fails: bool = False,
    ) -> None:
        """`engine_id` is this engine's. `also_holds`: see `PrefillPeers`. With `fails`, requests whose KV
        cannot be fetched fail; else they compute it.
        """
        self.peers = PrefillPeers(peers, clock, self, also_holds=also_holds)
        self._ledger = ledger
        self._clock = clock
        self._tokens = tokens
        self._engine_id = engine_id
        self._fails = fails
        self._vocab_size = 0
        self.fetches: dict[str, Fetch] = {}
        """Fetches by request; each is in its peer's `fetches`, too."""
        self._events: dict[str, Arrived | Failed] = {}
        """The last event of each request, to be drained."""
        self._changed: set[str] = set()
        self.complaints: dict[tuple[str, str], float] = {}
        """Times of the last log of an engine and its problem, oldest first."""
        self._num_loaded = 0
        self._num_failed = 0

    # ---- requests that could use KV

    def on_queued(self, prefix: PrefixRequest, start: int) -> None:
        source = prefix.source
        if source is None or prefix.request_id in self.fetches:
            return
        if not self._tokens.has_made(source):
            problem = "no engine with the secret of this one has made it"
            self._give_up(prefix.request_id, "the kv_source of a request", problem)
            return
        if source.engine_id == self._engine_id:  # what it has is found on the device
            self.release(source)
            return
        peer = self.peers.at(source.address)
        if peer is None:
            problem = f"{MAX_PREFILL_PEERS} other engines are asked"
            self._give_up(prefix.request_id, source.address, problem)
            return
        obstacle = self._obstacle(peer, source)
        if obstacle is not None:
            self.release(source)
            self._give_up(prefix.request_id, source.address, obstacle)
            return
        fetch = self.fetches[prefix.request_id] = Fetch(
            prefix, source, peer, start, self._clock.now()
        )
        self.peers.begin(fetch)

    def _obstacle(self, peer: PrefillPeer, source: KVSource) -> str | None:
        if peer.refusal:
            return peer.refusal
        if source.transfer_id in peer.fetches:
            return "another request fetches it already"
        return peer.staleness(source)

    def release(self, source: KVSource) -> None:
        """Releases the lease of a source that no request here fetches, if there is a connection; else it
        expires."""
        peer = self.peers.by_address.get(source.address)
        if peer is None or source.transfer_id in peer.fetches:
            return
        if self._tokens.has_made(source):
            self.peers.send(peer, messages.KVRelease([source.transfer_id]))

    def lookup(self, prefix: PrefixRequest, start: int) -> int | None:
        fetch = self.fetches.get(prefix.request_id)
        if fetch is None or fetch.is_loaded:
            return 0
        if start >= len(prefix.keys):  # all that is missing is the token
            return 0 if fetch.has_token else None
        if fetch.num_blocks is None or (fetch.num_blocks > start and not fetch.is_open):
            return None
        return max(0, fetch.num_blocks - start)

    def prefetch(self, prefix: PrefixRequest, start: int) -> None:
        """Fetched blocks go to the device alone."""

    def on_dequeued(self, request_id: str) -> None:
        self._events.pop(request_id, None)
        fetch = self.fetches.get(request_id)
        if fetch is not None:
            self._close(fetch, "nobody waits for it any more")

    # ---- loads

    def load(
        self, prefix: PrefixRequest, start: int, blocks: Sequence[Block], after_step: int
    ) -> int:
        fetch = self.fetches[prefix.request_id]
        held_id = self._ledger.hold(blocks)
        fetch.load = Load(held_id, start, blocks, after_step)
        fetch.moved_at = self._clock.now()
        self._pull(fetch, fetch.load)
        return held_id

    def _pull(self, fetch: Fetch, load: Load) -> None:
        """Begins to read blocks that are computed."""
        first, end = load.next, min(len(fetch.block_ids), load.end)
        if end <= first or fetch.peer_id is None:
            return
        block_ids = fetch.block_ids[first:end]
        if max(block_ids) >= fetch.peer.num_blocks() or min(block_ids) < 0:
            self.fail(fetch, "it named blocks that it does not have")
            return
        piece = fetch.peer.piece()
        for start in range(first, end, piece):
            load.next = min(start + piece, end)
            blocks = load.blocks[start - load.start : load.next - load.start]
            self._ledger.open(
                partial(self._read_ended, fetch, load),
                RemoteBlocks(fetch.peer_id, fetch.block_ids[start : load.next]),
                DeviceBlocks([block.block_id for block in blocks]),
                blocks,
                after_step=load.after_step,
            )
            load.num_open += 1

    def _read_ended(self, fetch: Fetch, load: Load, end: TransferEnd | None) -> None:
        if end is None or fetch.load is not load:
            return  # nobody waits for it any more
        if end.failed:
            self.fail(fetch, f"it could not be read ({end.error})")
            return
        load.num_open -= 1
        fetch.moved_at = self._clock.now()
        if load.next == load.end and load.num_open == 0:
            load.is_checking = True
            self.peers.send(fetch.peer, messages.KVCheck(fetch.source.transfer_id))

    def save(self, offers: Sequence[CachedBlock]) -> int:
        return len(offers)

    def fail(self, fetch: Fetch, reason: str) -> None:
        """Ends a fetch; blocks that have come do not count. `reason` is a clause."""
        request_id, load = fetch.prefix.request_id, fetch.load
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

    def _close(self, fetch: Fetch, reason: str) -> None:
        """Ends the fetch and its lease; a load ends with all blocks failed."""
        request_id = fetch.prefix.request_id
        load, fetch.load = fetch.load, None
        if load is not None:
            self._ledger.settle(load.held_id, list(range(len(load.blocks))), reason)
        del self.fetches[request_id]
        self.peers.end(fetch)
        self._changed.add(request_id)

    def _give_up(self, request_id: str, whom: str, reason: str) -> None:
        self._complain(whom, reason)
        if self._fails:
            self._events[request_id] = Failed(request_id, reason)

    def _complain(self, whom: str, reason: str) -> None:
        """Logs a problem once a minute: it may concern thousands of requests."""
        now = self._clock.now()
        while self.complaints:
            oldest = next(iter(self.complaints))
            if now - self.complaints[oldest] < _COMPLAINT_S:
                break
            del self.complaints[oldest]
        if (whom, reason) not in self.complaints:
            self.complaints[whom, reason] = now
            _log.warning("KV cannot be fetched from %s: %s", whom, reason)

    # ---- what others say

    def step(self) -> None:
        """Applies messages that have come, and repeats questions that were not answered."""
        self.peers.step()

    def drain_events(self) -> list[Arrived | Failed]:
        """First tokens and failures since the last call, one for each request."""
        events, self._events = self._events, {}
        return list(events.values())

    def apply(self, fetch: Fetch, message: messages.FetchMessage) -> None:
        """Applies what the peer says of a fetch."""
        was_open, num_blocks = fetch.is_open, fetch.num_blocks
        match message:
            case messages.KVBlocks():
                self._apply_blocks(fetch, message)
            case messages.KVPrefilled():
                self._apply_token(fetch, message)
            case messages.KVCheckResult():
                self._apply_check_result(fetch, is_valid=message.is_valid)
            case messages.KVDropped():
                self.fail(fetch, message.reason)
        is_open = fetch.source.transfer_id in fetch.peer.fetches and fetch.is_open
        if is_open > was_open or fetch.num_blocks != num_blocks:
            self.on_change(fetch)

    def on_change(self, fetch: Fetch) -> None:
        """The lookup of the request may have another answer now."""
        self._changed.add(fetch.prefix.request_id)

    def _apply_blocks(self, fetch: Fetch, message: messages.KVBlocks) -> None:
        keys, num_known = fetch.prefix.keys, len(fetch.block_ids)
        end = message.first + len(message.block_ids)
        if not 0 <= message.first <= num_known < end <= len(keys):
            return  # known already, or there is a gap: it is asked for again
        if message.key != keys[end - 1]:
            self.fail(fetch, "it is of other tokens than the request's")
            return
        if fetch.peer_id not in (None, message.peer_id):
            self.fail(fetch, "its workers were replaced")
            return
        if not fetch.peer.has(message.peer_id):
            self.peers.greet(fetch.peer)
        fetch.peer_id = message.peer_id
        fetch.block_ids += message.block_ids[num_known - message.first :]
        self._expect(fetch, message.num_blocks)
        if fetch.load is not None:
            self._pull(fetch, fetch.load)

    def _expect(self, fetch: Fetch, num_blocks: int) -> None:
        fetch.moved_at = self._clock.now()
        if fetch.num_blocks is None:
            fetch.num_blocks = min(max(num_blocks, len(fetch.block_ids)), len(fetch.prefix.keys))

    def _apply_token(self, fetch: Fetch, message: messages.KVPrefilled) -> None:
        if fetch.has_token:
            return
        fetch.has_token = True
        self._expect(fetch, message.num_blocks)
        self.on_change(fetch)
        if message.token_id < self._vocab_size:
            request_id = fetch.prefix.request_id
            self._events[request_id] = Arrived(request_id, message)
        if fetch.is_loaded or fetch.is_token_alone:
            self._close(fetch, "all has come")

    def _apply_check_result(self, fetch: Fetch, *, is_valid: bool) -> None:
        load = fetch.load
        if load is None or not load.is_checking:
            return
        if not is_valid:
            self.fail(fetch, "it was not held all the time while it was read")
            return
        self._num_loaded += len(load.blocks)
        self._ledger.settle(load.held_id, [])
        fetch.load = None
        fetch.is_loaded = True
        if fetch.has_token:
            self._close(fetch, "all has come")

    def next_event_at(self) -> float | None:
        return self.peers.next_event_at()

    # ---- the workers, and the engine's loop

    def workers_ready(self, ready: WorkerReady) -> None:
        self._vocab_size = ready.vocab_size
        self.peers.workers_ready(messages.digest_of(ready))

    def workers_lost(self) -> None:
        """The ledger has dropped all loads."""
        self.peers.workers_lost()
        for fetch in list(self.fetches.values()):
            if fetch.load is not None:
                fetch.load = None
                self._close(fetch, "the workers were lost")

    def poll(self) -> Collection[str]:
        changed, self._changed = self._changed, set()
        return changed

    def pollables(self) -> list[object]:
        return self.peers.pollables()

    def load_report(self) -> TierLoad:
        return TierLoad(
            name=self.tier,
            num_blocks=0,
            num_total_blocks=0,
            num_loaded=self._num_loaded,
            num_failed=self._num_failed,
        )

    def close(self) -> None:
        for fetch in list(self.fetches.values()):
            self._close(fetch, "the engine ends")
