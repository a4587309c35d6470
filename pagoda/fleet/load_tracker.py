# SPDX-License-Identifier: Apache-2.0
"""The work of each replica: every request counts at one replica, from its placement until it leaves there.

Work is counted in tokens: those of the prompt that are not computed yet, as far as the engine says, and those of
the answer that are still to come, as far as its length is known or can be expected (`AnswerLeft`).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Container
from itertools import count

from pagoda.fleet.answer_lengths import AnswerLeft

_STALE_TOKENS = 32
_STALE_SHIFT = 3
"""A replica moves up in `LeastLoaded` when its work has shrunk by 32 tokens and by 1 / 2**3."""


class ReplicaWork:
    """The summed work of the requests at one replica."""

    __slots__ = (
        "floor",
        "handicap",
        "number",
        "on_floor",
        "others",
        "pending_tokens",
        "prompt_tokens",
        "ticket",
    )

    def __init__(self, number: int) -> None:
        self.number = number
        self.pending_tokens = 0
        """Work of all requests at the replica, those of others included; zero exactly when it has none."""
        self.prompt_tokens = 0
        """The part of it that prompts of this dispatcher's requests are; a further prompt waits for these."""
        self.handicap = 0
        """`Replica.handicap`; changes only while the replica is in no `LeastLoaded`."""
        self.others = 0
        """Pending tokens of requests that others have sent there, as far as it has told."""
        self.floor = -1
        """Pending tokens below which `on_floor` is called."""
        self.on_floor: Callable[[ReplicaWork], None] = lambda _: None
        self.ticket = -1
        """Number of the valid entry in a `LeastLoaded`; -1 without one."""

    @property
    def cost(self) -> int:
        """Pending tokens as policies weigh them: with what the replica's place is worth."""
        return self.pending_tokens + self.handicap

    def set_others(self, pending_tokens: int) -> None:
        """Takes note of the work that the replica has from others."""
        self.shrink(self.others - pending_tokens)
        self.others = pending_tokens

    def shrink(self, num_tokens: int) -> None:
        """Takes so many tokens off the work; a negative number adds some."""
        self.pending_tokens -= num_tokens
        if self.pending_tokens < self.floor:
            self.on_floor(self)


class SenderWork:
    """The work of the requests that one sender has given to any replicas."""

    __slots__ = ("num_requests", "pending_tokens")

    def __init__(self) -> None:
        self.num_requests = 0
        self.pending_tokens = 0


class RequestWork:
    """The work of one request at one replica."""

    __slots__ = ("answer", "num_tokens", "output_tokens", "prompt_tokens", "replica", "sender")

    def __init__(
        self,
        replica: ReplicaWork,
        num_tokens: int,
        *,
        num_cached_tokens: int,
        answer: AnswerLeft | None = None,
        sender: SenderWork | None = None,
    ) -> None:
        """The first tokens of the request are believed to be cached; without `answer`, one token comes. The work
        counts for `sender`, too."""
        self.replica = replica
        self.sender = sender or SenderWork()
        self.answer = answer
        self.num_tokens = num_tokens
        """Tokens that the replica was given, cached or not."""
        self.prompt_tokens = max(0, num_tokens - num_cached_tokens)
        self.output_tokens = 1 if answer is None else answer.look()
        replica.prompt_tokens += self.prompt_tokens
        self._shrink(-self.pending_tokens)

    @property
    def pending_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens

    def output_progress(self, num_tokens: int) -> int:
        """Counts `num_tokens` of the answer; with the first token the whole prompt is computed.

        Returns the number of tokens that have been computed for them.
        """
        num_prompt_tokens, before = self.prompt_tokens, self.output_tokens
        if self.answer is not None:
            self.output_tokens = self.answer.after(num_tokens, before)
        self.prompt_tokens = 0
        self.replica.prompt_tokens -= num_prompt_tokens
        self._shrink(before - self.output_tokens + num_prompt_tokens)
        return num_tokens + num_prompt_tokens

    def prompt_progress(self, num_computed_tokens: int) -> int:
        """Counts the prompt up to `num_computed_tokens`; returns how many of them are news."""
        left = max(0, self.num_tokens - num_computed_tokens)
        done = max(0, self.prompt_tokens - left)
        self.prompt_tokens -= done
        self.replica.prompt_tokens -= done
        self._shrink(done)
        return done

    def close(self) -> None:
        self.replica.prompt_tokens -= self.prompt_tokens
        self._shrink(self.pending_tokens)

    def _shrink(self, num_tokens: int) -> None:
        self.sender.pending_tokens -= num_tokens
        self.replica.shrink(num_tokens)


class LeastLoaded:
    """Finds the replicas with the least work among those added, in O(log n).

    A binary heap with lazy entries: an entry is too low after work was added, which is put right when it comes to
    the top, and at most 1/8 (and 32 tokens) too high after work was done. Replicas with equally high entries take
    turns.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, ReplicaWork]] = []
        """(cost, ticket, replica); valid where the ticket is the replica's."""
        self._tickets = count()
        self._size = 0

    def add(self, work: ReplicaWork) -> None:
        self._size += 1
        work.on_floor = self._push
        self._push(work)

    def discard(self, work: ReplicaWork) -> None:
        self._size -= 1
        work.floor = work.ticket = -1

    def first(self, num_replicas: int, excluded: Container[int]) -> list[ReplicaWork]:
        """The `num_replicas` with the least work whose numbers are not in `excluded`; fewer if there are fewer."""
        heap = self._heap
        found: list[ReplicaWork] = []
        aside = []
        while heap and len(found) < num_replicas:
            cost, ticket, work = heap[0]
            if ticket != work.ticket:
                heapq.heappop(heap)
            elif work.cost > cost:
                heapq.heapreplace(heap, self._entry(work))
            else:
                aside.append(heapq.heappop(heap))
                if work.number not in excluded:
                    found.append(work)
        for entry in aside:
            heapq.heappush(heap, entry)
        return found

    def _push(self, work: ReplicaWork) -> None:
        if len(self._heap) > 2 * self._size + 64:
            self._heap = [entry for entry in self._heap if entry[1] == entry[2].ticket]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, self._entry(work))

    def _entry(self, work: ReplicaWork) -> tuple[int, int, ReplicaWork]:
        work.ticket = next(self._tickets)
        pending_tokens = work.pending_tokens
        stale_tokens = max(_STALE_TOKENS, pending_tokens >> _STALE_SHIFT)
        work.floor = max(1, pending_tokens - stale_tokens) if pending_tokens else 0
        return work.cost, work.ticket, work
