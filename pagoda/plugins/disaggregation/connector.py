# SPDX-License-Identifier: Apache-2.0
"""Disaggregation, decode side: the connector loads KV of prompts that prefill engines compute.

A queued request with a source is asked for there at once. As soon as the first blocks are computed the request may
load: blocks are allocated for all that will come, and read as they come, while the other engine goes on computing.
When everything is read, the other engine is asked whether it held the blocks all the time; only then they count.
Whatever goes wrong before, none of them counts.

Every question is repeated until it is answered, and any answer may come late, twice or never.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Collection, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from pagoda.engine.request import Request
from pagoda.engine.scheduler import Scheduler
from pagoda.ipc.clock import Clock
from pagoda.kv.block_pool import Block
from pagoda.kv.connector import CachedBlock, PrefixRequest
from pagoda.kv.layout import KVLayout
from pagoda.kv.transfers import TransferLedger
from pagoda.messages.frontend import KVSource, TokenChunk, TokenLogprobs
from pagoda.messages.load import TierLoad
from pagoda.messages.transfers import DeviceBlocks, KVPeer, RemoteBlocks, TransferEnd
from pagoda.messages.worker import WorkerReady
from pagoda.plugins.disaggregation import messages
from pagoda.plugins.disaggregation.fetches import Fetch, Load, PrefillPeer
from pagoda.plugins.disaggregation.links import PeerLost, Peers
from pagoda.plugins.disaggregation.token_conditions import conditions_of
from pagoda.plugins.disaggregation.transfer_tokens import TransferTokens

SILENCE_S = 5.0
"""Seconds of silence after which an engine that is asked counts as gone."""
STALL_S = 30.0
"""Seconds without news after which a fetch fails while its prompt is being computed. The other engine may lack
room, which it holds for requests that wait here behind this one."""
MAX_PREFILL_PEERS = 256
_COMPLAINT_S = 60.0
"""Seconds for which a problem of an engine is not logged again."""
_log = logging.getLogger(__name__)


class Arrived(NamedTuple):
    """The token behind a request's prompt has come."""

    request_id: str
    token: messages.KVPrefilled

    def apply(self, scheduler: Scheduler, request: Request) -> list[TokenChunk]:
        """Appends the token behind a request's prompt as if it had been sampled here.

        The token is ignored if the request has got further, is being computed and will sample it, asks for
        log-probabilities that the other engine did not send, or would have been sampled under other conditions.
        """
        token, kv = self.token, scheduler.kv
        if request.slot is not None or request.num_pending_samples:
            return []
        if request.transfer_id is not None:  # the engine that fetches from here wants the KV, too
            return []
        if kv.sequence_key(request.table, request.token_ids) != token.key:
            return []
        if token.conditions != conditions_of(request):
            return []
        num_top, logprobs = request.work.sampling.logprobs, token.logprobs
        if num_top is None:
            logprobs = None
        elif logprobs is None or len(logprobs.top_token_ids) < num_top:
            return []
        else:
            top_ids, top = logprobs.top_token_ids[:num_top], logprobs.top_logprobs[:num_top]
            logprobs = TokenLogprobs(logprobs.logprob, logprobs.rank, top_ids, top)
        chunk = scheduler.append(
            request, [token.token_id], None if logprobs is None else [logprobs]
        )
        num_cached_tokens = min(token.num_cached_tokens, request.num_prompt_tokens)
        return [msgspec.structs.replace(chunk, num_cached_tokens=num_cached_tokens)]


class Failed(NamedTuple):
    """A request's KV cannot be fetched; `reason` is a clause."""

    request_id: str
    reason: str

    def apply(self, scheduler: Scheduler, request: Request) -> list[TokenChunk]:
        error = f"KV of this request could not be fetched: {self.reason}."
        return [scheduler.fail(request, error)]


class RemoteKV:
    """A `KVConnector` over engines that export KV. The engine's loop calls `step` before the scheduler acts."""

    tier = "remote"
    has_own_timeout = True
    is_cache = False
    storey = None

    def __init__(
        self,
        links: Peers,
        ledger: TransferLedger,
        layout: KVLayout,
        clock: Clock,
        *,
        tokens: TransferTokens,
        engine_id: str,
        also_holds: bool = False,
        fails: bool = False,
    ) -> None:
        """`engine_id` is this engine's. An engine that `also_holds` KV fails fetches for which there is no room
        here for long: two such engines could wait for each other's room. With `fails`, requests whose KV cannot
        be fetched fail; else they compute it.
        """
        self._links = links
        self._ledger = ledger
        self._layout = layout
        self._clock = clock
        self._tokens = tokens
        self._engine_id = engine_id
        self._also_holds = also_holds
        self._fails = fails
        self._vocab_size = 0
        self._digest = ""
        self._has_workers = False
        self.peers: dict[str, PrefillPeer] = {}
        """Engines that are asked, by address; those without fetches are in the order in which they became so."""
        self._renewals: list[tuple[float, str]] = []
        """Heap of times and addresses; an entry counts if it is the peer's `renew_at` and the peer has fetches."""
        self._added_peers: list[KVPeer] = []
        self._removed_peers: list[str] = []
        self.fetches: dict[str, Fetch] = {}
        """Fetches by request; each is in its peer's `fetches`, too."""
        self._events: dict[str, Arrived | Failed] = {}
        """The last event of each request, to be drained."""
        self._changed: set[str] = set()
        """Requests whose lookups may have another answer now."""
        self.complaints: dict[tuple[str, str], float] = {}
        """Times of the last log of an engine and its problem, oldest first."""
        self._num_loaded = 0
        self._num_failed = 0

    # ---- requests that could use KV

    def on_queued(self, prefix: PrefixRequest, start: int) -> None:
        source, request_id = prefix.source, prefix.request_id
        if source is None or request_id in self.fetches:
            return
        if not self._tokens.has_made(source):
            problem = "no engine with the secret of this one has made it"
            self._give_up(request_id, "the kv_source of a request", problem)
            return
        if source.engine_id == self._engine_id:  # what it has is found on the device
            self.release(source)
            return
        peer = self._connect(source.address)
        if peer is None:
            problem = f"{MAX_PREFILL_PEERS} other engines are asked"
            self._give_up(request_id, source.address, problem)
            return
        obstacle = peer.obstacle(source)
        if source.transfer_id in peer.fetches:
            obstacle = "another request fetches it already"
        if obstacle is not None:
            self.release(source)
            self._give_up(request_id, source.address, obstacle)
            return
        now = self._clock.now()
        is_token_alone = start >= self._layout.usable(len(prefix.keys))
        fetch = Fetch(prefix, source, peer, is_token_alone, now)
        if not peer.fetches:
            peer.heard_at = now
            self._schedule_renewal(peer)
        self.fetches[request_id] = peer.fetches[source.transfer_id] = fetch
        self._ask(fetch)

    def _connect(self, address: str) -> PrefillPeer | None:
        """Returns the peer at an address, newly connected if need be; None if there are too many busy ones."""
        peer = self.peers.get(address)
        if peer is None:
            if len(self.peers) >= MAX_PREFILL_PEERS:
                idle = next((it for it in self.peers.values() if not it.fetches), None)
                if idle is None:
                    return None
                self._lose(idle, "others are asked")
            peer = self.peers[address] = PrefillPeer(address, self._clock.now())
            self._greet(peer)
        return peer

    def release(self, source: KVSource) -> None:
        """Releases the lease of a source that no request here fetches, if there is a connection; else it
        expires."""
        peer = self.peers.get(source.address)
        if peer is None or source.transfer_id in peer.fetches:
            return
        if self._tokens.has_made(source):
            self._send(peer, messages.KVRelease([source.transfer_id]))

    def lookup(self, prefix: PrefixRequest, start: int) -> int | None:
        fetch = self.fetches.get(prefix.request_id)
        if fetch is None or fetch.is_loaded:
            return 0
        if start >= len(prefix.keys):  # all that is missing is the token
            return 0 if fetch.has_token else None
        if fetch.num_blocks is None:
            return None
        needed = self._layout.needed(prefix.group, fetch.num_blocks)
        end = min(needed.stop, len(prefix.keys))
        if not needed.start <= start < end:
            return 0
        return end - start if fetch.is_open else None

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
        held_id = self._ledger.hold(blocks)
        fetch = self.fetches.get(prefix.request_id)
        if fetch is None:  # blocks of another group, right before these, have failed
            self._num_failed += len(blocks)
            self._ledger.settle(held_id, list(range(len(blocks))), "others of it have failed")
            return held_id
        load = Load(held_id, prefix.group, start, blocks, after_step)
        fetch.loads.append(load)
        fetch.moved_at = self._clock.now()
        self._pull(fetch, load)
        return held_id

    def _pull(self, fetch: Fetch, load: Load) -> None:
        """Begins to read blocks that are computed."""
        num_known = fetch.end // self._layout.ratios[load.group]
        first = load.start + load.num_begun
        end = min(num_known, load.start + len(load.blocks))
        if end <= first or fetch.peer_id is None or fetch.num_blocks is None:
            return
        if load not in fetch.loads:  # one of another group has just failed
            return
        start = self._layout.needed(load.group, fetch.num_blocks).start
        block_ids = fetch.block_ids[load.group][first - start : end - start]
        if max(block_ids) >= fetch.peer.num_blocks() or min(block_ids) < 0:
            self._fail(fetch, "it named blocks that it does not have")
            return
        for sources in fetch.peer.pieces(load.group, block_ids):
            blocks = load.blocks[load.num_begun : load.num_begun + len(sources)]
            self._ledger.open(
                partial(self._read_ended, fetch, load),
                RemoteBlocks(fetch.peer_id, list(sources), load.group),
                DeviceBlocks([block.block_id for block in blocks]),
                blocks,
                after_step=load.after_step,
            )
            load.num_begun += len(sources)
            load.num_open += 1

    def _read_ended(self, fetch: Fetch, load: Load, end: TransferEnd | None) -> None:
        if end is None or load not in fetch.loads:
            return  # nobody waits for it any more
        if end.failed:
            self._fail(fetch, f"it could not be read ({end.error})")
            return
        load.num_open -= 1
        fetch.moved_at = self._clock.now()
        if fetch.is_read:
            self._ask(fetch)

    def save(self, offers: Sequence[CachedBlock]) -> int:
        return len(offers)

    def _fail(self, fetch: Fetch, reason: str) -> None:
        """Ends a fetch; blocks that have come do not count. `reason` is a clause."""
        num_failed, address = sum(len(load.blocks) for load in fetch.loads), fetch.source.address
        self._close(fetch, reason)
        if num_failed:
            self._num_failed += num_failed
            self._complain(address, reason)
        elif not fetch.is_loaded:
            self._give_up(fetch.prefix.request_id, address, reason)

    def _close(self, fetch: Fetch, reason: str) -> None:
        """Ends the fetch, and its lease if there is still a connection; a load ends with all blocks failed."""
        request_id, peer = fetch.prefix.request_id, fetch.peer
        loads, fetch.loads = fetch.loads, []
        for load in loads:
            self._ledger.settle(load.held_id, list(range(len(load.blocks))), reason)
        del self.fetches[request_id]
        self._changed.add(request_id)
        if self.peers.get(peer.address) is peer:
            del peer.fetches[fetch.source.transfer_id]
            if not peer.fetches:
                self.peers[peer.address] = self.peers.pop(peer.address)
            self._send(peer, messages.KVRelease([fetch.source.transfer_id]))

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
        for address, message in self._links.receive():
            peer = self.peers.get(address)
            if peer is not None:
                self._apply(peer, message)
        now = self._clock.now()
        while (at := self.next_event_at()) is not None and at <= now:
            _, address = heapq.heappop(self._renewals)
            self._renew(self.peers[address], now)

    def _apply(self, peer: PrefillPeer, message: messages.PrefillMessage | PeerLost) -> None:
        peer.heard_at = self._clock.now()
        match message:
            case PeerLost():  # there may be another connection by now
                self._lose(peer, message.reason)
            case messages.KVWelcome():
                self._apply_welcome(peer, message)
            case messages.KVRefused():
                peer.refusal = message.reason
                for fetch in list(peer.fetches.values()):
                    self._fail(fetch, message.reason)
            case messages.KVRenewed():
                pass
            case _:
                wanted = peer.fetches.get(message.transfer_id)
                if wanted is not None:
                    self._apply_news(wanted, message)

    def _apply_welcome(self, peer: PrefillPeer, welcome: messages.KVWelcome) -> None:
        if peer.has(welcome.peer.peer_id):
            return
        self._remove_workers(peer)
        peer.welcome = welcome
        if self._has_workers:
            self._added_peers.append(welcome.peer)
        for fetch in list(peer.fetches.values()):
            self._changed.add(fetch.prefix.request_id)
            obstacle = peer.obstacle(fetch.source)
            if obstacle is not None:
                self._fail(fetch, obstacle)
            elif fetch.loads and not fetch.is_open:
                self._fail(fetch, "its workers were replaced")

    def _remove_workers(self, peer: PrefillPeer) -> None:
        if peer.welcome is not None and self._has_workers:
            self._removed_peers.append(peer.welcome.peer.peer_id)
        peer.welcome = None

    def _apply_news(self, fetch: Fetch, message: messages.FetchMessage) -> None:
        was_open, num_blocks = fetch.is_open, fetch.num_blocks
        match message:
            case messages.KVBlocks():
                self._apply_blocks(fetch, message)
            case messages.KVPrefilled():
                self._apply_token(fetch, message)
            case messages.KVCheckResult():
                self._apply_check_result(fetch, is_valid=message.is_valid)
            case messages.KVDropped():
                self._fail(fetch, message.reason)
        if fetch.is_open > was_open or fetch.num_blocks != num_blocks:
            self._changed.add(fetch.prefix.request_id)

    def _apply_blocks(self, fetch: Fetch, message: messages.KVBlocks) -> None:
        keys, num_known, end = fetch.prefix.keys, fetch.end, message.end
        if not 0 <= message.first <= num_known < end <= len(keys):
            return  # known already, or there is a gap: it is asked for again
        if message.key != keys[end - 1]:
            self._fail(fetch, "it is of other tokens than the request's")
            return
        if fetch.peer_id not in (None, message.peer_id):
            self._fail(fetch, "its workers were replaced")
            return
        if not fetch.peer.has(message.peer_id):
            self._greet(fetch.peer)
        if not self._learn_blocks(fetch, message):
            self._fail(fetch, "it named other blocks than the prompt has")
            return
        fetch.peer_id = message.peer_id
        self._expect(fetch, message.num_blocks)
        for load in fetch.loads:
            self._pull(fetch, load)

    def _learn_blocks(self, fetch: Fetch, message: messages.KVBlocks) -> bool:
        """Adds what is new in `message`; returns False if it does not go with what the prompt needs."""
        layout, prefix = self._layout, message.num_blocks
        if not layout.keeps_all and (
            message.end > prefix or fetch.num_blocks not in (None, 0, prefix)
        ):
            return False
        prefix = max(prefix, message.end)
        groups = range(len(layout.groups))
        known = fetch.block_ids or [[] for _ in groups]
        parts = [layout.part(group, prefix, message.first, message.end) for group in groups]
        if list(map(len, message.block_ids)) != list(map(len, parts)):
            return False
        for group, (part, block_ids) in enumerate(zip(parts, message.block_ids, strict=True)):
            new = layout.part(group, prefix, fetch.end, message.end)
            known[group] += block_ids[len(part) - len(new) :]
        fetch.block_ids, fetch.end = known, message.end
        return True

    def _expect(self, fetch: Fetch, num_blocks: int) -> None:
        fetch.moved_at = self._clock.now()
        if fetch.num_blocks is not None:
            return
        num_blocks, num_keys = max(num_blocks, fetch.end), len(fetch.prefix.keys)
        if num_blocks > num_keys:  # windows behind what is wanted here are not held there
            num_blocks = num_keys if self._layout.keeps_all else 0
        fetch.num_blocks = num_blocks

    def _apply_token(self, fetch: Fetch, message: messages.KVPrefilled) -> None:
        if fetch.has_token:
            return
        size, logprobs = self._vocab_size, message.logprobs
        if message.token_id >= size or not (logprobs is None or logprobs.fits(size, size)):
            self._fail(fetch, "it named a token that the model does not have")
            return
        fetch.has_token = True
        self._expect(fetch, message.num_blocks)
        request_id = fetch.prefix.request_id
        self._changed.add(request_id)
        self._events[request_id] = Arrived(request_id, message)
        if fetch.is_loaded or fetch.is_token_alone:
            self._close(fetch, "all has come")

    def _apply_check_result(self, fetch: Fetch, *, is_valid: bool) -> None:
        if not fetch.is_read:
            return
        if not is_valid:
            self._fail(fetch, "it was not held all the time while it was read")
            return
        for load in fetch.loads:
            self._num_loaded += len(load.blocks)
            self._ledger.settle(load.held_id, [])
        fetch.loads = []
        fetch.is_loaded = True
        if fetch.has_token:
            self._close(fetch, "all has come")

    def drain_events(self) -> list[Arrived | Failed]:
        """First tokens and failures since the last call, one for each request."""
        events, self._events = self._events, {}
        return list(events.values())

    # ---- questions and time-outs

    def _send(self, peer: PrefillPeer, message: messages.DecodeMessage) -> None:
        self._links.send(peer.address, message)

    def _greet(self, peer: PrefillPeer) -> None:
        self._send(peer, messages.KVHello(digest=self._digest))

    def _ask(self, fetch: Fetch) -> None:
        question = fetch.question()
        if question is not None:
            self._send(fetch.peer, question)

    def _schedule_renewal(self, peer: PrefillPeer) -> None:
        peer.renew_at = self._clock.now() + peer.renewal_s
        heapq.heappush(self._renewals, (peer.renew_at, peer.address))

    def _renew(self, peer: PrefillPeer, now: float) -> None:
        if now - peer.heard_at > SILENCE_S:
            for fetch in list(peer.fetches.values()):
                self._fail(fetch, "it does not answer")
            self._lose(peer, "it does not answer")
            return
        self._schedule_renewal(peer)
        self._send(peer, messages.KVRenew(list(peer.fetches)))
        named = {fetch.peer_id for fetch in peer.fetches.values()} - {None}
        if peer.welcome is None or not all(map(peer.has, named)):
            self._greet(peer)
        for fetch in list(peer.fetches.values()):
            is_old = now - fetch.moved_at > STALL_S
            if is_old and fetch.is_owed:
                self._fail(fetch, f"nothing more of it came for {STALL_S:g} s")
            elif is_old and self._also_holds and not fetch.loads:
                self._fail(fetch, f"there was no room for it for {STALL_S:g} s")
            elif fetch.moved_at < now - peer.renewal_s:
                self._ask(fetch)  # the question or its answer may be lost

    def _lose(self, peer: PrefillPeer, reason: str) -> None:
        """Ends the connection to a peer; what is fetched there fails."""
        self._links.hang_up(peer.address)
        self._remove_workers(peer)
        del self.peers[peer.address]
        for fetch in list(peer.fetches.values()):
            self._fail(fetch, reason)

    def next_event_at(self) -> float | None:
        while self._renewals:
            at, address = self._renewals[0]
            peer = self.peers.get(address)
            if peer is not None and peer.fetches and peer.renew_at == at:
                return at
            heapq.heappop(self._renewals)
        return None

    # ---- the workers, and the engine's loop

    def workers_ready(self, ready: WorkerReady) -> None:
        self._vocab_size = ready.vocab_size
        self._digest = messages.digest_of(ready)
        self._has_workers = True
        welcomes = (peer.welcome for peer in self.peers.values())
        self._added_peers += [welcome.peer for welcome in welcomes if welcome is not None]

    def workers_lost(self) -> None:
        """The ledger has dropped all loads."""
        self._has_workers = False
        self._added_peers.clear()
        self._removed_peers.clear()
        for fetch in list(self.fetches.values()):
            if fetch.loads:
                fetch.loads = []
                self._close(fetch, "the workers were lost")

    def drain_peer_changes(self) -> tuple[list[KVPeer], list[str]]:
        """Peers to announce to the workers, and ids of peers to withdraw, since the last call."""
        added, self._added_peers = self._added_peers, []
        removed, self._removed_peers = self._removed_peers, []
        return added, removed

    def poll(self) -> Collection[str]:
        changed, self._changed = self._changed, set()
        return changed

    def pollables(self) -> list[object]:
        return self._links.pollables()

    def load_report(self) -> TierLoad:
        return TierLoad(name=self.tier, num_loaded=self._num_loaded, num_failed=self._num_failed)

    def close(self) -> None:
        for fetch in list(self.fetches.values()):
            self._close(fetch, "the engine ends")
