# SPDX-License-Identifier: Apache-2.0
"""Hooks of the scheduler and the engine's loop for KV that comes from elsewhere, or is held for others."""

# ruff: noqa: ARG002 - hooks that do nothing use no argument

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum, auto
from typing import Any

from pagoda.engine.request import Request
from pagoda.kv.block_pool import BlockPool
from pagoda.kv.block_table import PrefixHit
from pagoda.messages.frontend import GenerateRequest, KVSource, TokenChunk, TokenLogprobs
from pagoda.messages.transfers import TierWord, TransferEnd, Transfers
from pagoda.messages.worker import WorkerReady


class LoadStart(Enum):
    """Outcomes for a request in line for which there is room."""

    LEFT_LINE = auto()
    """Transfers have begun, or a place for KV has yet to answer."""
    BLOCKED = auto()
    """The request stays in line: so many await an answer that it must not ask yet."""
    READY = auto()
    """There is nothing to load."""


class KVHooks:
    """The hooks of an engine without tiers and handoff: nothing is loaded, held or sent.

    `KVTransferHooks` does all of it.
    """

    near_pools: Sequence[BlockPool] = ()
    """Pools besides the device's from which a block is loaded at next to no cost."""

    # ---- what becomes of requests

    def refusal(self, message: GenerateRequest) -> str | None:
        if message.holds_kv:
            return (
                "This engine holds no KV for others; it was started without --role prefill or both."
            )
        return None

    def on_added(self, message: GenerateRequest, request: Request) -> list[TokenChunk]:
        """The request is queued. Returns the chunk that says where its KV will be, if it is to be held."""
        return []

    def on_refused(self, message: GenerateRequest) -> None:
        """The request was turned away, or ended at once."""

    def leaves_line(self, request: Request) -> bool:
        """Lets a new request, or one that awaits KV, load if there is room besides those in line before it.

        False if the request is to stand in line.
        """
        return False

    def start(self, request: Request, hit: PrefixHit) -> LoadStart:
        """Begins to load or to await KV for a request in line, for which there is room besides `hit`."""
        return LoadStart.READY

    def num_near(self, request: Request, hit: PrefixHit) -> int:
        """Leading blocks behind `hit` that can be loaded at next to no cost on the rank of the request's table."""
        return 0

    def first_ready(self, in_line: Iterable[Request]) -> Request | None:
        """The first request that may go on, if there is room for it."""
        return next(iter(in_line), None)

    def on_admitted(self, request: Request) -> None: ...

    def on_published(self, request: Request) -> None:
        """Further blocks of the request are published: tiers may save them, other engines fetch them."""

    def on_prefilled(
        self, request: Request, token_id: int, logprobs: TokenLogprobs | None
    ) -> KVSource | None:
        """The request ends with this token, and its KV stays; returns where it is."""

    def on_preempted(self, request: Request) -> None:
        """The request is about to lose its blocks."""

    def on_finished(self, request: Request) -> None: ...

    def make_room(self) -> bool:
        """Frees blocks that no other engine has asked for; False if there are none."""
        return False

    # ---- the workers, and the engine's loop

    def workers_ready(self, worker: WorkerReady) -> None: ...

    def workers_lost(self) -> list[Request]:
        """All KV on its way is lost; returns the requests that awaited it, which hold no blocks any more."""
        return []

    def transfer_ended(self, end: TransferEnd) -> None: ...

    def take_word(self, word: TierWord) -> None:
        """A worker's half of a tier tells this."""

    def step(self) -> list[TokenChunk]:
        """Applies what has happened to KV since the last call."""
        return []

    def drain_transfers(self) -> Transfers | None:
        """Transfers to begin now; None if there are none."""

    def load_figures(self) -> dict[str, Any]:
        """Fields of `LoadReport`."""
        return {}

    def next_event_at(self) -> float | None:
        """The instant in seconds on the engine's clock at which to call `step`; None for never."""

    def pollables(self) -> list[object]:
        """File descriptors and sockets that become readable with news for `step`."""
        return []

    def close(self) -> None: ...
