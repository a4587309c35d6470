"""The prefill engine's half of a handoff: it holds KV under leases, and answers who asks for it.

It knows nothing of connections: who asks says all that is needed, as often as he likes, and gets the same answer.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

from pagoda.kv.block_pool import Block
from pagoda.messages.frontend import KVSource, TokenLogprobs
from pagoda.messages.transfers import KVPeer
from pagoda.messages.worker import WorkerReady
from pagoda.pd.leases import LeaseBook
from pagoda.pd.listener import Listener
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


class _Held:
    """One request whose KV is held."""

    def __init__(self, request_id: str, num_blocks: int) -> None:
        self.request_id = request_id
        self.num_blocks = num_blocks
        """That its prompt fills."""
        self.keys: list[bytes] = []
        """Of the blocks that are held."""
        self.asker: bytes | None = None
        """Who is told of its blocks as they come."""
        self.end = 0
        """Up to which one."""
        self.prefilled: KVPrefilled | None = None


class FirstToken(NamedTuple):
    """What a prompt's computation ended with."""

    key: bytes
    """Of the tokens before it."""
    token_id: int
    logprobs: TokenLogprobs | None
    num_cached_tokens: int
    """Of the prompt, that were not computed for it."""


class Unwanted(NamedTuple):
    """A request whose prompt nobody needs any more, though it is not computed yet."""

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
        self._engine_id = engine_id
        self._lease_s = lease_s
        self._tp_size = tp_size
        self._num_starts = 0
        self._peer: KVPeer | None = None
        """This engine's workers, as others reach them; None while there are none."""
        self._digest = ""
        self._held: dict[str, _Held] = {}
        """By transfer; the same as are in `leases`."""
        self._unwanted: list[Unwanted] = []
        self._early: dict[bytes, KVHello] = {}
        """Who said hello while there were no workers, and what."""

    # ---- what the scheduler says

    def open(self, request_id: str, num_blocks: int) -> KVSource:
        """A request is queued whose prompt fills so many blocks."""
        transfer_id = self._tokens.new_id(self._listener.address, self._engine_id)
        self.leases.open(transfer_id)
        self._held[transfer_id] = _Held(request_id, num_blocks)
        return self._source(transfer_id)

    def num_held(self, transfer_id: str) -> int:
        """Leading blocks of its prompt."""
        return len(self.leases.blocks(transfer_id))

    def hold(self, transfer_id: str, blocks: Sequence[Block], keys: Sequence[bytes]) -> None:
        """Further blocks of the prompt are computed."""
        held = self._held.get(transfer_id)
        if held is None:
            return
        first = self.num_held(transfer_id)
        self.leases.hold(transfer_id, blocks)
        held.keys += keys
        if held.asker is not None:
            self._send_blocks(held.asker, transfer_id, held, first)

    def finish(self, transfer_id: str, token: FirstToken) -> KVSource | None:
        """The prompt is computed, and the request ends. Where its KV is; None if it is not held any more."""
        held = self._held.get(transfer_id)
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
        if held.asker is not None:
            self._listener.send(held.asker, held.prefilled)
        return self._source(transfer_id, self.leases.blocks(transfer_id))

    def drop(self, transfer_id: str, reason: str) -> None:
        """There will be no more of it, and what there is means nothing to anybody; a clause says why."""
        held = self._held.pop(transfer_id, None)
        self.leases.end(transfer_id)
        if held is not None and held.asker is not None:
            self._listener.send(held.asker, KVDropped(transfer_id, reason))

    @property
    def num_wanted(self) -> int:
        """Transfers that somebody has asked for."""
        return sum(held.asker is not None for held in self._held.values())

    def is_asked_for(self, transfer_id: str) -> bool:
        held = self._held.get(transfer_id)
        return held is not None and held.asker is not None

    def drain_unwanted(self) -> list[Unwanted]:
        """Requests that need not be computed on, since the last call."""
        unwanted, self._unwanted = self._unwanted, []
        return unwanted

    def make_room(self) -> bool:
        """Lets go of the oldest prompt that is computed and that nobody has asked for; False if there is none."""
        for transfer_id, held in self._held.items():
            if held.asker is None and held.prefilled is not None:
                _log.info("KV of transfer %s gives its room to others", transfer_id)
                self.leases.num_expired += 1
                self.drop(transfer_id, "there was no room for it any more")
                return True
        return False

    def _source(self, transfer_id: str, blocks: Sequence[Block] = ()) -> KVSource:
        return KVSource(
            address=self._listener.address,
            engine_id=self._engine_id,
            transfer_id=transfer_id,
            block_ids=tuple(block.block_id for block in blocks),
            tp_size=self._tp_size,
        )

    # ---- the workers, and the engine's loop

    def workers_ready(self, ready: WorkerReady) -> None:
        self._num_starts += 1
        self._digest = digest_of(ready)
        self._peer = KVPeer(
            peer_id=f"{self._engine_id}-{self._num_starts}", ranks=tuple(ready.kv_ranks)
        )
        early, self._early = self._early, {}
        for asker, hello in early.items():
            self._greet(asker, hello)

    def workers_lost(self) -> None:
        """All KV is lost with them."""
        self._peer = None
        for transfer_id in list(self._held):
            self.drop(transfer_id, "the workers that held it were lost")

    def step(self) -> None:
        """Answers what has come, and lets go of what nobody wanted for too long."""
        for asker, message in self._listener.receive():
            self._answer(asker, message)
        for transfer_id in self.leases.expire():
            _log.info("nobody fetched KV of transfer %s; it is not held any more", transfer_id)
            self.drop(transfer_id, "its lease has run out")

    def next_event_at(self) -> float | None:
        """When the next lease runs out."""
        return self.leases.next_end

    def pollables(self) -> list[object]:
        return self._listener.pollables()

    def close(self) -> None:
        for transfer_id in list(self._held):
            self.drop(transfer_id, "the engine that held it has ended")

    # ---- what others ask

    def _answer(self, asker: bytes, message: DecodeMessage) -> None:
        match message:
            case KVHello():
                self._greet(asker, message)
            case KVSubscribe():
                self._tell(asker, message)
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
                    self._finish_with(transfer_id)

    def _finish_with(self, transfer_id: str) -> None:
        held = self._held.pop(transfer_id, None)
        self.leases.end(transfer_id)
        if held is not None and held.prefilled is None:
            self._unwanted.append(Unwanted(held.request_id, transfer_id))

    def _greet(self, asker: bytes, hello: KVHello) -> None:
        if hello.protocol_version != PROTOCOL_VERSION:
            reason = f"it speaks protocol {PROTOCOL_VERSION}, this engine {hello.protocol_version}"
            self._listener.send(asker, KVRefused(reason))
        elif self._peer is None:
            if len(self._early) < _MAX_EARLY:  # others say it again
                self._early[asker] = hello
        elif hello.digest != self._digest:
            reason = (
                "its KV is of another model, laid out in another way, or computed in another way"
            )
            self._listener.send(asker, KVRefused(reason))
        else:
            self._listener.send(asker, self._welcome(self._peer))

    def _welcome(self, peer: KVPeer) -> KVWelcome:
        return KVWelcome(engine_id=self._engine_id, peer=peer, lease_s=self._lease_s)

    def _tell(self, asker: bytes, want: KVSubscribe) -> None:
        transfer_id = want.transfer_id
        held = self._held.get(transfer_id)
        if held is None:
            self._listener.send(asker, _unknown(transfer_id))
            return
        self.leases.renew(transfer_id)
        held.asker, held.end = asker, want.end
        self._send_blocks(asker, transfer_id, held, max(0, want.start))
        if held.prefilled is not None:
            self._listener.send(asker, held.prefilled)

    def _send_blocks(self, asker: bytes, transfer_id: str, held: _Held, first: int) -> None:
        end = min(held.end, len(held.keys))
        if self._peer is None or end <= first:
            return
        block_ids = [block.block_id for block in self.leases.blocks(transfer_id)[first:end]]
        message = KVBlocks(
            transfer_id,
            self._peer.peer_id,
            first,
            block_ids,
            held.keys[end - 1],
            held.num_blocks,
        )
        self._listener.send(asker, message)


def _unknown(transfer_id: str) -> KVDropped:
    return KVDropped(transfer_id, "it is not held, or not any more")
