# SPDX-License-Identifier: Apache-2.0
"""Disaggregation, prefill side: the exporter leases KV of computed prompts to decode engines.

There is no state for each connection: a question says everything, and may be repeated.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pagoda.engine.request import Request
from pagoda.engine.scheduler import Scheduler
from pagoda.ipc.clock import Clock
from pagoda.kv.block_pool import Block, BlockPool
from pagoda.kv.layout import KVLayout
from pagoda.messages.frontend import FinishReason, KVSource, TokenChunk, TokenLogprobs
from pagoda.messages.transfers import KVPeer
from pagoda.messages.worker import WorkerReady
from pagoda.plugins.disaggregation import messages
from pagoda.plugins.disaggregation.links import KVListener
from pagoda.plugins.disaggregation.transfer_tokens import TransferTokens

_MAX_EARLY = 4096

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Lease:
    """KV that is held for one request: one reference to each of its blocks.

    It runs out `lease_s` after the prompt was computed or it was last renewed, and never before the prompt is
    computed.
    """

    request_id: str
    num_blocks: int
    """Number of blocks of the prefix that is handed over."""
    groups: list[list[Block]]
    """Blocks that are held, by KV group; the first of each is the first that the prefix needs."""
    keys: list[bytes] = field(default_factory=list)
    """Keys of the leading blocks of the prefix, which are computed."""
    asker: bytes | None = None
    """Sender of the last subscription, which is told of further blocks."""
    end: int = 0
    """Index up to which the sender wants blocks."""
    prefilled: messages.KVPrefilled | None = None
    """None while the prompt is being computed."""

    def blocks(self) -> list[Block]:
        """All blocks that are held, group after group."""
        return [block for blocks in self.groups for block in blocks]


class Unwanted(NamedTuple):
    """A request whose prompt no engine needs any more, though it is not computed yet."""

    request_id: str

    def apply(self, scheduler: Scheduler, request: Request) -> list[TokenChunk]:
        scheduler.finish(request, FinishReason.ABORT)
        return [TokenChunk(request.request_id, [], FinishReason.ABORT)]


class KVExporter:
    """The scheduler tells it what becomes of requests with `holds_kv`; the engine's loop calls `step`."""

    def __init__(
        self,
        listener: KVListener,
        pool: BlockPool,
        layout: KVLayout,
        clock: Clock,
        tokens: TransferTokens,
        engine_id: str,
        lease_s: float,
        tp_size: int = 1,
    ) -> None:
        self._listener = listener
        self._pool = pool
        self._layout = layout
        self._clock = clock
        self._tokens = tokens
        self.engine_id = engine_id
        self._lease_s = lease_s
        self._tp_size = tp_size
        self._num_starts = 0
        self.peer: KVPeer | None = None
        """This engine's workers, as other engines reach them; None while there are none."""
        self._digest = ""
        self.leases: dict[str, Lease] = {}
        """Leases by transfer. Ended ones are not in it."""
        self._ends: dict[str, float] = {}
        """Times at which leases of computed prompts run out, earliest first: all leases have one length."""
        self.num_leased_blocks = 0
        """References of all leases; a block of two leases counts twice."""
        self.num_expired = 0
        self.num_wanted = 0
        """Leases that another engine has asked for."""
        self._reclaimable: dict[str, None] = {}
        """Computed transfers that no engine has asked for, oldest first."""
        self._unwanted: dict[str, None] = {}
        """Requests to be drained."""
        self.early: dict[bytes, messages.KVHello] = {}
        """Senders that said hello while there were no workers, and what they said."""

    # ---- what the scheduler says

    def open(self, request_id: str, num_blocks: int) -> KVSource:
        """A request is queued, of which a prefix of `num_blocks` is handed over. Returns where its KV will be."""
        transfer_id = self._tokens.new_id(self._listener.address, self.engine_id)
        self.leases[transfer_id] = Lease(request_id, num_blocks, [[] for _ in self._layout.groups])
        return self._source(transfer_id)

    def missing(self, transfer_id: str) -> range:
        """Blocks of the prefix that are not held yet; none if the lease has ended."""
        lease = self.leases.get(transfer_id)
        return range(0) if lease is None else range(len(lease.keys), lease.num_blocks)

    def hold(
        self, transfer_id: str, groups: Sequence[Sequence[Block]], keys: Sequence[bytes]
    ) -> None:
        """Further blocks of the prefix are computed: their keys, and blocks that they complete by KV group."""
        lease = self.leases.get(transfer_id)
        if lease is None:
            return
        first = len(lease.keys)
        for held, blocks in zip(lease.groups, groups, strict=True):
            self._pool.share(blocks)
            self.num_leased_blocks += len(blocks)
            held += blocks
        lease.keys += keys
        self._send_blocks(transfer_id, lease, first)

    def finish(
        self,
        transfer_id: str,
        key: bytes,
        token_id: int,
        conditions: bytes,
        logprobs: TokenLogprobs | None = None,
        num_cached_tokens: int = 0,
    ) -> KVSource | None:
        """The prompt is computed, and the request ends; the other arguments are those of `KVPrefilled`.

        Returns where its KV is; None if it is no longer held.
        """
        lease = self.leases.get(transfer_id)
        if lease is None:
            return None
        self._ends[transfer_id] = self._clock.now() + self._lease_s
        lease.prefilled = messages.KVPrefilled(
            transfer_id,
            key,
            lease.num_blocks,
            token_id,
            conditions,
            logprobs,
            num_cached_tokens,
        )
        if lease.asker is None:
            self._reclaimable[transfer_id] = None
        else:
            self._listener.send(lease.asker, lease.prefilled)
        return self._source(transfer_id, lease.blocks())

    def drop(self, transfer_id: str, reason: str, *, goes_on: bool = False) -> None:
        """Ends a lease and tells the engine that asked for it; `reason` is a clause.

        If the request `goes_on`, no engine needs it any more: the one that asked computes it, too.
        """
        lease = self._end(transfer_id)
        if lease is not None and lease.asker is not None:
            self._listener.send(lease.asker, messages.KVDropped(transfer_id, reason))
            if goes_on:
                self._note_unwanted(lease)

    def _end(self, transfer_id: str) -> Lease | None:
        """Ends a lease and releases its blocks; returns None if it had ended before."""
        lease = self.leases.pop(transfer_id, None)
        if lease is None:
            return None
        self._ends.pop(transfer_id, None)
        self._reclaimable.pop(transfer_id, None)
        blocks = lease.blocks()
        self._pool.release(blocks)
        self.num_leased_blocks -= len(blocks)
        if lease.asker is not None:
            self.num_wanted -= 1
        return lease

    def _renew(self, transfer_id: str) -> bool:
        """Returns False if the lease has ended."""
        if self._ends.pop(transfer_id, None) is not None:
            self._ends[transfer_id] = self._clock.now() + self._lease_s
        return transfer_id in self.leases

    def _note_unwanted(self, lease: Lease) -> None:
        if lease.prefilled is None:
            self._unwanted[lease.request_id] = None

    def request_ended(self, request_id: str) -> None:
        """Forgets what was to be said of it: another request may have the id next."""
        self._unwanted.pop(request_id, None)

    def drain_unwanted(self) -> list[Unwanted]:
        """Requests, since the last call, that need not be computed further."""
        unwanted, self._unwanted = self._unwanted, {}
        return [Unwanted(request_id) for request_id in unwanted]

    def make_room(self) -> bool:
        """Drops the oldest computed prompt that no engine has asked for; False if there is none."""
        transfer_id = next(iter(self._reclaimable), None)
        if transfer_id is None:
            return False
        _log.info("KV of transfer %s gives its room to others", transfer_id)
        self.num_expired += 1
        self.drop(transfer_id, "there was no room for it any more")
        return True

    def _source(self, transfer_id: str, blocks: Sequence[Block] = ()) -> KVSource:
        return KVSource(
            address=self._listener.address,
            engine_id=self.engine_id,
            transfer_id=transfer_id,
            block_ids=tuple(block.block_id for block in blocks),
            tp_size=self._tp_size,
        )

    # ---- the workers, and the engine's loop

    def workers_ready(self, ready: WorkerReady) -> None:
        self._num_starts += 1
        self._digest = messages.digest_of(ready)
        self.peer = KVPeer(
            peer_id=f"{self.engine_id}-{self._num_starts}", ranks=tuple(ready.kv_ranks)
        )
        early, self.early = self.early, {}
        for asker, hello in early.items():
            self._greet(asker, hello)

    def workers_lost(self) -> None:
        self.peer = None
        for transfer_id in list(self.leases):
            self.drop(transfer_id, "the workers that held it were lost", goes_on=True)

    def step(self) -> None:
        """Answers messages that have come, and drops KV whose lease has run out."""
        for asker, message in self._listener.receive():
            self._answer(asker, message)
        now = self._clock.now()
        while (at := self.next_event_at()) is not None and at <= now:
            transfer_id = next(iter(self._ends))
            _log.info("nobody fetched KV of transfer %s; it is not held any more", transfer_id)
            self.num_expired += 1
            self.drop(transfer_id, "its lease has run out")

    def next_event_at(self) -> float | None:
        """Time at which the next lease runs out; None if none will."""
        return next(iter(self._ends.values()), None)

    def pollables(self) -> list[object]:
        return self._listener.pollables()

    def close(self) -> None:
        for transfer_id in list(self.leases):
            self.drop(transfer_id, "the engine that held it has ended")

    # ---- what others ask

    def _answer(self, asker: bytes, message: messages.DecodeMessage) -> None:
        match message:
            case messages.KVHello():
                self._greet(asker, message)
            case messages.KVSubscribe():
                self._subscribe(asker, message)
            case messages.KVRenew():
                for transfer_id in message.transfer_ids:
                    if not self._renew(transfer_id):
                        self._listener.send(asker, _unknown(transfer_id))
                self._listener.send(asker, messages.KVRenewed())
            case messages.KVCheck():
                is_valid = self._renew(message.transfer_id)
                self._listener.send(asker, messages.KVCheckResult(message.transfer_id, is_valid))
            case messages.KVRelease():
                for transfer_id in message.transfer_ids:
                    lease = self._end(transfer_id)
                    if lease is not None:
                        self._note_unwanted(lease)

    def _greet(self, asker: bytes, hello: messages.KVHello) -> None:
        version = messages.PROTOCOL_VERSION
        if hello.protocol_version != version:
            reason = f"it speaks protocol {version}, this engine {hello.protocol_version}"
            self._listener.send(asker, messages.KVRefused(reason))
        elif self.peer is None:
            if len(self.early) < _MAX_EARLY:  # others say it again
                self.early[asker] = hello
        elif hello.digest != self._digest:
            reason = (
                "its KV is of another model, laid out in another way, or computed in another way"
            )
            self._listener.send(asker, messages.KVRefused(reason))
        else:
            welcome = messages.KVWelcome(
                engine_id=self.engine_id, peer=self.peer, lease_s=self._lease_s
            )
            self._listener.send(asker, welcome)

    def _subscribe(self, asker: bytes, message: messages.KVSubscribe) -> None:
        transfer_id = message.transfer_id
        lease = self.leases.get(transfer_id)
        if lease is None:
            self._listener.send(asker, _unknown(transfer_id))
            return
        self._renew(transfer_id)
        if lease.asker is None:
            self.num_wanted += 1
            self._reclaimable.pop(transfer_id, None)
        lease.asker, lease.end = asker, message.end
        self._send_blocks(transfer_id, lease, max(0, message.start))
        if lease.prefilled is not None:
            self._listener.send(asker, lease.prefilled)

    def _send_blocks(self, transfer_id: str, lease: Lease, first: int) -> None:
        """Tells the sender of the last subscription of the blocks that it wants, from index `first` on."""
        end = min(lease.end, len(lease.keys))
        if lease.asker is None or self.peer is None or end <= first:
            return
        block_ids = []
        for group, held in enumerate(lease.groups):
            start = self._layout.needed(group, lease.num_blocks).start
            part = self._layout.part(group, lease.num_blocks, first, end)
            blocks = held[part.start - start : part.stop - start]
            block_ids.append([block.block_id for block in blocks])
        message = messages.KVBlocks(
            transfer_id,
            self.peer.peer_id,
            first,
            end,
            block_ids,
            lease.keys[end - 1],
            lease.num_blocks,
        )
        self._listener.send(lease.asker, message)


def _unknown(transfer_id: str) -> messages.KVDropped:
    return messages.KVDropped(transfer_id, "it is not held, or not any more")
