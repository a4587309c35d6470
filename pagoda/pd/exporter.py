"""The prefill engine's half of a handoff: KV that is held under leases, and answers to engines that ask for it.

There is no state for each connection: a question says everything, and may be repeated.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pagoda.kv.block_pool import Block
from pagoda.messages.frontend import KVSource, TokenLogprobs
from pagoda.messages.transfers import KVPeer
from pagoda.messages.worker import WorkerReady
from pagoda.pd.leases import LeaseBook
from pagoda.pd.links import Listener
from pagoda.pd.messages import (
    PROTOCOL_VERSION,
    DecodeMessage,
    KVBlocks,
    KVCheck,
    KVCheckResult,
    KVDropped,
    KVHello,
    KVPrefilled,
    KVRefused,
    KVRelease,
    KVRenew,
    KVRenewed,
    KVSubscribe,
    KVWelcome,
    digest_of,
)
from pagoda.pd.transfer_tokens import TransferTokens

_MAX_EARLY = 4096

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Held:
    """KV that is held for one request."""

    request_id: str
    num_blocks: int
    keys: list[bytes] = field(default_factory=list)
    asker: bytes | None = None
    """Sender of the last subscription, which is told of further blocks."""
    end: int = 0
    """Index up to which the sender wants blocks."""
    prefilled: KVPrefilled | None = None


class FirstToken(NamedTuple):
    key: bytes
    token_id: int
    logprobs: TokenLogprobs | None
    num_cached_tokens: int


class Unwanted(NamedTuple):
    """A request whose prompt no engine needs any more, though it is not computed yet."""

    request_id: str
    transfer_id: str


class KVExporter:
    """The scheduler tells it what becomes of requests with `holds_kv`; the engine's loop calls `step`."""

    def __init__(
        self,
        listener: Listener,
        leases: LeaseBook,
        tokens: TransferTokens,
        engine_id: str,
        lease_s: float,
        tp_size: int = 1,
    ) -> None:
        self.leases = leases
        self._tokens = tokens
        self._listener = listener
        self.engine_id = engine_id
        self._lease_s = lease_s
        self._tp_size = tp_size
        self._num_starts = 0
        self.peer: KVPeer | None = None
        """This engine's workers, as other engines reach them; None while there are none."""
        self._digest = ""
        self.held: dict[str, _Held] = {}
        """Held KV by transfer; the same transfers as in `leases`."""
        self._unwanted: list[Unwanted] = []
        self.num_wanted = 0
        """Transfers that another engine has asked for."""
        self._reclaimable: dict[str, None] = {}
        """Computed transfers that no engine has asked for, oldest first."""
        self.early: dict[bytes, KVHello] = {}
        """Senders that said hello while there were no workers, and what they said."""

    # ---- what the scheduler says

    def open(self, request_id: str, num_blocks: int) -> KVSource:
        """A request is queued whose prompt fills `num_blocks`. Returns where its KV will be."""
        transfer_id = self._tokens.new_id(self._listener.address, self.engine_id)
        self.leases.open(transfer_id)
        self.held[transfer_id] = _Held(request_id, num_blocks)
        return self._source(transfer_id)

    def num_held(self, transfer_id: str) -> int:
        """Number of leading blocks of its prompt that are held."""
        return len(self.leases.blocks(transfer_id))

    def hold(self, transfer_id: str, blocks: Sequence[Block], keys: Sequence[bytes]) -> None:
        """Further blocks of the prompt are computed."""
        held = self.held.get(transfer_id)
        if held is None:
            return
        first = self.num_held(transfer_id)
        self.leases.hold(transfer_id, blocks)
        held.keys += keys
        if held.asker is not None:
            self._send_blocks(held.asker, transfer_id, held, first)

    def finish(self, transfer_id: str, token: FirstToken) -> KVSource | None:
        """The prompt is computed, and the request ends. Returns where its KV is; None if it is no longer held."""
        held = self.held.get(transfer_id)
        if held is None:
            return None
        self.leases.finish(transfer_id)
        held.prefilled = KVPrefilled(
            transfer_id,
            token.key,
            held.num_blocks,
            token.token_id,
            token.logprobs,
            token.num_cached_tokens,
        )
        if held.asker is None:
            self._reclaimable[transfer_id] = None
        else:
            self._listener.send(held.asker, held.prefilled)
        return self._source(transfer_id, self.leases.blocks(transfer_id))

    def drop(self, transfer_id: str, reason: str) -> None:
        """Ends a transfer and tells the engine that asked for it; `reason` is a clause."""
        held = self._end(transfer_id)
        if held is not None and held.asker is not None:
            self._listener.send(held.asker, KVDropped(transfer_id, reason))

    def _end(self, transfer_id: str) -> _Held | None:
        """Ends the lease; returns what was held, None if it had ended before."""
        held = self.held.pop(transfer_id, None)
        self.leases.end(transfer_id)
        self._reclaimable.pop(transfer_id, None)
        if held is not None and held.asker is not None:
            self.num_wanted -= 1
        return held

    def is_asked_for(self, transfer_id: str) -> bool:
        held = self.held.get(transfer_id)
        return held is not None and held.asker is not None

    def drain_unwanted(self) -> list[Unwanted]:
        """Requests, since the last call, that need not be computed further."""
        unwanted, self._unwanted = self._unwanted, []
        return unwanted

    def make_room(self) -> bool:
        """Drops the oldest computed prompt that no engine has asked for; False if there is none."""
        transfer_id = next(iter(self._reclaimable), None)
        if transfer_id is None:
            return False
        _log.info("KV of transfer %s gives its room to others", transfer_id)
        self.leases.num_expired += 1
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
        self._digest = digest_of(ready)
        self.peer = KVPeer(
            peer_id=f"{self.engine_id}-{self._num_starts}", ranks=tuple(ready.kv_ranks)
        )
        early, self.early = self.early, {}
        for asker, hello in early.items():
            self._greet(asker, hello)

    def workers_lost(self) -> None:
        self.peer = None
        for transfer_id in list(self.held):
            self.drop(transfer_id, "the workers that held it were lost")

    def step(self) -> None:
        """Answers messages that have come, and drops KV whose lease has run out."""
        for asker, message in self._listener.receive():
            self._answer(asker, message)
        for transfer_id in self.leases.expire():
            _log.info("nobody fetched KV of transfer %s; it is not held any more", transfer_id)
            self.drop(transfer_id, "its lease has run out")

    def next_event_at(self) -> float | None:
        return self.leases.next_end

    def pollables(self) -> list[object]:
        return self._listener.pollables()

    def close(self) -> None:
        for transfer_id in list(self.held):
            self.drop(transfer_id, "the engine that held it has ended")

    # ---- what others ask

    def _answer(self, asker: bytes, message: DecodeMessage) -> None:
        match message:
            case KVHello():
                self._greet(asker, message)
            case KVSubscribe():
                self._subscribe(asker, message)
            case KVRenew():
                for transfer_id in message.transfer_ids:
                    if not self.leases.renew(transfer_id):
                        self._listener.send(asker, _unknown(transfer_id))
                self._listener.send(asker, KVRenewed())
            case KVCheck():
                is_valid = self.leases.renew(message.transfer_id)
                self._listener.send(asker, KVCheckResult(message.transfer_id, is_valid))
            case KVRelease():
                for transfer_id in message.transfer_ids:
                    self._release(transfer_id)

    def _release(self, transfer_id: str) -> None:
        held = self._end(transfer_id)
        if held is not None and held.prefilled is None:
            self._unwanted.append(Unwanted(held.request_id, transfer_id))

    def _greet(self, asker: bytes, hello: KVHello) -> None:
        if hello.protocol_version != PROTOCOL_VERSION:
            reason = f"it speaks protocol {PROTOCOL_VERSION}, this engine {hello.protocol_version}"
            self._listener.send(asker, KVRefused(reason))
        elif self.peer is None:
            if len(self.early) < _MAX_EARLY:  # others say it again
                self.early[asker] = hello
        elif hello.digest != self._digest:
            reason = (
                "its KV is of another model, laid out in another way, or computed in another way"
            )
            self._listener.send(asker, KVRefused(reason))
        else:
            welcome = KVWelcome(engine_id=self.engine_id, peer=self.peer, lease_s=self._lease_s)
            self._listener.send(asker, welcome)

    def _subscribe(self, asker: bytes, message: KVSubscribe) -> None:
        transfer_id = message.transfer_id
        held = self.held.get(transfer_id)
        if held is None:
            self._listener.send(asker, _unknown(transfer_id))
            return
        self.leases.renew(transfer_id)
        if held.asker is None:
            self.num_wanted += 1
            self._reclaimable.pop(transfer_id, None)
        held.asker, held.end = asker, message.end
        self._send_blocks(asker, transfer_id, held, max(0, message.start))
        if held.prefilled is not None:
            self._listener.send(asker, held.prefilled)

    def _send_blocks(self, asker: bytes, transfer_id: str, held: _Held, first: int) -> None:
        end = min(held.end, len(held.keys))
        if self.peer is None or end <= first:
            return
        block_ids = [block.block_id for block in self.leases.blocks(transfer_id)[first:end]]
        message = KVBlocks(
            transfer_id, self.peer.peer_id, first, block_ids, held.keys[end - 1], held.num_blocks
        )
        self._listener.send(asker, message)


def _unknown(transfer_id: str) -> KVDropped:
    return KVDropped(transfer_id, "it is not held, or not any more")
