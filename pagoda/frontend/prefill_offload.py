"""Sends long prompts to prefill hosts, between the choice of a replica for a request and its going
there."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, cast

import msgspec

from pagoda.errors import EngineDeadError, InvalidRequestError, OverloadedError
from pagoda.frontend.async_utils import cancel_all
from pagoda.messages.frontend import GenerateRequest, KVSource, TokenChunk

if TYPE_CHECKING:
    from pagoda.frontend.dispatcher import Dispatcher
    from pagoda.frontend.replica_slot import ReplicaSlot
    from pagoda.frontend.tracked_request import TrackedRequest

DEFAULT_MIN_TOKENS = 128
"""Tokens from which on a prompt is computed elsewhere; `benchmarks.handoff threshold` measures what is best."""
PATIENCE_S = 1.0
"""Seconds that a request waits to hear where its KV will be: a prefill host says so at once."""

_log = logging.getLogger(__name__)


def is_better_here(
    num_tokens: int, *, pending_here: int, num_streams: int, pending_there: int
) -> bool:
    """True if a prompt with `num_tokens` to compute is better computed at the replica that answers it, behind
    `pending_here` tokens of others and beside `num_streams` answers, than behind `pending_there` at the prefill
    host that has the fewest. Both are taken to be as fast.

    Here the prompt waits for the replica's work, and every stream that runs here waits for the prompt. What its
    own computing takes is the same at both, and counted only here: a prompt goes elsewhere unless that is clearly
    worse.
    """
    return pending_there > pending_here + (1 + num_streams) * num_tokens


class PrefillOffload:
    """Makes requests ready for the replicas that a `Dispatcher` chose."""

    def __init__(
        self, prefill: Dispatcher, min_tokens: int, *, patience_s: float = PATIENCE_S
    ) -> None:
        self._prefill = prefill
        self._min_tokens = min_tokens
        self._patience_s = patience_s
        self._numbers = itertools.count()

    @property
    def needs_prefixes(self) -> bool:
        """True if it matters what replicas have cached, which costs a digest over each prompt."""
        return len(self._prefill.slots) > 0

    @asynccontextmanager
    async def prepare(
        self, tracked: TrackedRequest, slot: ReplicaSlot
    ) -> AsyncIterator[GenerateRequest]:
        """The request as its replica is to be given it; what was done for it lasts until the context ends.

        Never raises because something failed: then the request is as it was. Does not wait for long.
        """
        request = tracked.value()
        if not self._is_worth_it(request, tracked, slot):
            yield request
            return
        source: asyncio.Future[KVSource] = asyncio.get_running_loop().create_future()
        copy = msgspec.structs.replace(
            request, request_id=f"{request.request_id}/prefill{next(self._numbers)}", holds_kv=True
        )
        computing = asyncio.create_task(self._compute(copy, source))
        try:
            await asyncio.wait(
                (source, computing),
                timeout=self._patience_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if source.done():
                yield msgspec.structs.replace(request, kv_source=source.result())
            else:
                self._prefill.complain(copy.request_id)
                await cancel_all([computing])
                yield request
        finally:
            await cancel_all([computing])

    def _is_worth_it(
        self, request: GenerateRequest, tracked: TrackedRequest, slot: ReplicaSlot
    ) -> bool:
        if request.holds_kv or request.kv_source is not None:
            return False  # somebody else has arranged it
        num_left = tracked.num_tokens - tracked.num_cached_tokens_here
        if num_left < self._min_tokens or not slot.role.fetches_kv:
            return False
        own_tokens = 0 if tracked.work is None else tracked.work.pending_tokens
        pending_there = self._prefill.slots.least_pending_tokens()
        return pending_there is not None and not is_better_here(
            num_left,
            pending_here=slot.work.pending_tokens - own_tokens,
            num_streams=slot.num_streams,
            pending_there=pending_there,
        )

    async def _compute(self, copy: GenerateRequest, source: asyncio.Future[KVSource]) -> None:
        """Sends `copy` to a prefill host, and sets `source` as soon as that is known."""
        chunks = cast(AsyncGenerator[TokenChunk, None], self._prefill.generate(copy))
        try:
            async with aclosing(chunks):
                async for chunk in chunks:
                    if chunk.kv_source is None:
                        continue
                    if not source.done():
                        source.set_result(chunk.kv_source)
                    elif chunk.kv_source.transfer_id != source.result().transfer_id:
                        return  # the host was lost, and at the next one nobody will ask
        except (OverloadedError, InvalidRequestError, EngineDeadError) as error:
            _log.info(
                "the prompt is not computed by a prefill host: %s",
                error,
                extra={"request_id": copy.request_id},
            )
