"""A request as a dispatcher tracks it, from its acceptance to its last chunk."""

from __future__ import annotations

import asyncio
import enum
from typing import TYPE_CHECKING

import msgspec

from pagoda.frontend.load_tracker import RequestWork
from pagoda.frontend.outliers import REMOTE_KV_S, TIER_KV_S, Waiting
from pagoda.ipc.clock import Clock
from pagoda.messages.frontend import FinishReason, GenerateRequest, TokenChunk

if TYPE_CHECKING:
    from pagoda.frontend.replica_slot import ReplicaSlot

QUARANTINE_CRASHES = 2
"""A request with this crash count is tried while no other such request is, so that a request that kills
engines is told from requests that were only near it."""
MAX_CRASHES = 3
"""A request with this crash count is not tried again."""


class RequestState(enum.Enum):
    WAITING = enum.auto()
    """No replica has the request."""
    QUEUED = enum.auto()
    """A replica was chosen; as far as is known it has computed nothing of the request."""
    COMPUTING = enum.auto()
    """The replica has told that it computes the request."""
    MOVING = enum.auto()
    """The replica was told to end the request, so that another one takes it."""
    ABORTED = enum.auto()
    """The request was ended by its client or an operator."""


class QueueTime:
    """The time that a request has waited for its first step, at replicas and between them."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since = clock.now()
        """Instant at which the request was accepted, or last came to a replica or left one."""
        self._before_s = 0.0
        self._here_s: float | None = None
        """Waiting time at its replica; None until the replica tells."""

    def enter(self) -> None:
        now = self._clock.now()
        self._before_s += now - self._since
        self._since, self._here_s = now, None

    def leave(self) -> None:
        now = self._clock.now()
        # Where no first step was seen, all of the time was waiting.
        self._before_s += now - self._since if self._here_s is None else self._here_s
        self._since = now

    def added_to(self, chunk: TokenChunk) -> TokenChunk:
        """`chunk` with the whole waiting time, if it tells of that at the replica."""
        if chunk.queue_time_s is None:
            return chunk
        self._here_s = chunk.queue_time_s
        return msgspec.structs.replace(chunk, queue_time_s=self._before_s + self._here_s)


class TrackedRequest:
    """A request, the tokens so far, and the replica that has it."""

    def __init__(self, request: GenerateRequest, clock: Clock) -> None:
        self.request = request
        self.request_id = request.request_id
        self.state = RequestState.WAITING
        self.token_ids = list(request.output_token_ids)
        self.queue = QueueTime(clock)
        self.returns = request.returns
        """An engine took the request before, so none refuses it for want of room any more."""
        self.has_waited = False
        """The request was accepted while no engine ran: it is not refused for want of room either, but waits."""
        self.keys: list[int] | None = None
        """Short keys of the blocks of the prompt; None until they are needed."""
        self.num_cached_tokens: int | None = None
        """Cached tokens that the first engine found; those of later ones say nothing about the client's prompt."""
        self.refusals: dict[int, int] = {}
        """Numbers of replicas that were full, and after how many seconds to try them again."""
        self.crash_count = 0
        """Engines that died while they may have computed the request, since its last token."""
        self.problem = ""
        """The reason that the request is given up, as a sentence."""
        self._waiter: asyncio.Future[None] | None = None

        # At its replica:
        self.slot: ReplicaSlot | None = None
        """The replica that has the request; None while it waits for one."""
        self.work: RequestWork | None = None
        self.num_cached_tokens_here = 0
        """Prompt tokens that the replica tells it has in its cache."""
        self.num_tokens_here = 0
        """Tokens of the answer that came from the replica."""
        self.fetches_kv = False
        """The replica was told that another engine has the KV of the prompt."""
        self.waits_since: float | None = None
        """Instant at which the replica was last asked for more; None while the client does not ask."""
        self.sent_keys: list[int] = []
        """Keys that the replica's `PrefixIndex` counts for the request, under `sent_number`."""
        self.sent_number = 0
        self.sent_after_ns = 0
        """`ReplicaSlot.latest_ns` when the request was sent."""

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_token_ids) + len(self.token_ids)

    @property
    def is_suspect(self) -> bool:
        return self.crash_count >= QUARANTINE_CRASHES

    @property
    def is_over(self) -> bool:
        """True if the request is not tried again."""
        return (
            self.state is RequestState.ABORTED
            or self.crash_count >= MAX_CRASHES
            or bool(self.problem)
        )

    @property
    def moves_if_aborted(self) -> bool:
        """True if the request goes on elsewhere when its replica ends it. A prompt that is computed for another
        engine ends when that does not want it any more."""
        if self.state is RequestState.ABORTED:
            return False
        return self.state is RequestState.MOVING or not self.request.holds_kv

    def value(self) -> GenerateRequest:
        """The request as a replica is given it: with the tokens so far."""
        request = self.request
        if not self.returns:
            return request
        has_moved_on = len(self.token_ids) > len(request.output_token_ids)
        return msgspec.structs.replace(
            request,
            output_token_ids=list(self.token_ids),
            returns=True,
            # The KV held there ends with a token that has come already.
            kv_source=None if has_moved_on else request.kv_source,
        )

    def waiting(self, block_size: int) -> Waiting | None:
        """The wait of the client; None if it does not wait."""
        if self.waits_since is None or self.work is None:
            return None
        # The first token may be that of the engine which computed the prompt.
        if self.num_tokens_here > 1:
            return Waiting(self.waits_since)
        num_tokens = self.work.num_tokens
        kv_s = REMOTE_KV_S if self.fetches_kv else TIER_KV_S
        return Waiting(self.waits_since, num_tokens, kv_s if num_tokens > block_size else 0.0)

    def final_chunk(self) -> TokenChunk:
        """The last chunk of a request that is not tried again."""
        if self.state is RequestState.ABORTED:
            return TokenChunk(self.request_id, [], FinishReason.ABORT)
        deaths = f"{self.crash_count} engines in a row died while this request was running."
        return TokenChunk(self.request_id, [], FinishReason.ERROR, error=self.problem or deaths)

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Returns when `wake` is called or the time is over; False for the latter."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            done, _ = await asyncio.wait([self._waiter], timeout=timeout_s)
            return bool(done)
        finally:
            self._waiter = None

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
