# SPDX-License-Identifier: Apache-2.0
"""Structured output: the state of a request in its grammar, which the engine advances token by token.

llguidance says which tokens may come next (https://github.com/guidance-ai/llguidance). A place follows from the
output tokens alone, so it is found again by consuming them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

from pagoda.engine.structured_output.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_FORCED_TOKENS = 256
"""Forced tokens that are appended at once; the rest of a longer text follows in the next turns of the loop."""
TOKEN_LIMIT_S = 0.01
"""Processor time on the engine's loop that one token of an answer may take."""
MAX_REPLAYED_TOKENS = 8192
"""Tokens of an answer that are followed again on the engine's loop, at some microseconds each."""
MAX_DRAFT_TOKENS = 8
"""Tokens of a draft that are followed through a grammar."""
_SUSPECT_S = TOKEN_LIMIT_S / 20
"""Seconds of a token from which on a grammar is watched: the clock of processor time is a system call, which takes
longer than most tokens."""
_COST_DECAY = 0.9
_OUTSIDE = "doesn't satisfy the grammar"
_OUT_OF_STATES = "too many states"

T = TypeVar("T")


class TokenClock:
    """Measures the work that a grammar takes on the engine's loop for each token.

    A token that took long by `elapsed_time` is followed by tokens measured by `processor_time`, which counts the
    seconds that this thread has worked: a machine with other work to do must not make a grammar look slow.
    """

    def __init__(
        self,
        processor_time: Callable[[], float] = time.thread_time,
        elapsed_time: Callable[[], float] = time.perf_counter,
        cost_s: float = 0.0,
    ) -> None:
        self.cost_s = cost_s
        """Processor time of a token, in seconds: the most of late, which fades from token to token. Zero as long
        as no token took long."""
        self._processor_time = processor_time
        self._elapsed_time = elapsed_time
        self.spent_s = 0.0
        """Seconds of work for the token to come, by the clock in use."""
        self._watch(cost_s > _SUSPECT_S)

    def copy(self, *, is_watched: bool = False) -> TokenClock:
        """Returns a clock in front of a token. `is_watched` counts processor time from this token on."""
        clock = TokenClock(self._processor_time, self._elapsed_time, self.cost_s)
        if is_watched:
            clock._watch(True)
        return clock

    @property
    def is_over_limit(self) -> bool:
        """True if the token to come has taken more processor time than `TOKEN_LIMIT_S`."""
        return self._is_watched and self.spent_s > TOKEN_LIMIT_S

    def timed(self, work: Callable[[], T]) -> T:
        """Returns the result of work for the token to come."""
        began = self._time()
        result = work()
        self.spent_s += self._time() - began
        return result

    def end_token(self) -> None:
        self.cost_s = max(self.spent_s if self._is_watched else 0.0, self.cost_s * _COST_DECAY)
        self._watch(max(self.spent_s, self.cost_s) > _SUSPECT_S)
        self.spent_s = 0.0

    def _watch(self, is_watched: bool) -> None:
        self._is_watched = is_watched
        self._time = self._processor_time if is_watched else self._elapsed_time


class CompiledGrammar:
    """A grammar in front of the first token of its answers, which share a table of lexer states.

    The table fills up as answers pass through long texts, and a full one fails every answer. The grammar is
    compiled again then, which gives a new table.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        vocabulary: Vocabulary,
        *,
        compile_again: Callable[[], LLMatcher] | None = None,
        clock: TokenClock | None = None,
    ) -> None:
        """`compile_again` returns the grammar with an empty table; None if that takes too long for the loop."""
        self.vocabulary = vocabulary
        self._matcher = matcher
        self._compile_again = compile_again
        self._clock = clock or TokenClock()
        self._num_full = 0
        """Tables before the one in use."""

    def begin(self) -> Constraint:
        """Returns the place in front of the first token."""
        return Constraint(self, self._clock.copy())

    def copy_matcher(self) -> tuple[LLMatcher, int]:
        """Returns a matcher in front of the first token, and the number of tables before its own."""
        number = self._num_full  # first: it grows behind the matcher
        return self._matcher.deep_copy(), number

    def copy_matcher_after(self, number: int) -> tuple[LLMatcher, int] | None:
        """Returns a matcher with a later table than this one, which is full; None if there will be no other."""
        if self._compile_again is None:
            return None
        if self._num_full == number:
            self._matcher = self._compile_again()
            self._num_full += 1
        return self.copy_matcher()

    def try_out(self) -> bool:
        """Measures what every answer begins with. False if that is too much work for the engine's loop."""
        clock = self._clock.copy(is_watched=True)
        beginning = Constraint(self, self._clock.copy(is_watched=True))
        if Constraint(self, clock).mask() is None:
            return False
        self._clock.cost_s = clock.spent_s
        while forced := beginning.forced_tokens():
            for token_id in forced:
                if token_id in beginning.eos_token_ids or not beginning.consume(token_id):
                    return not beginning.is_exhausted
        return True


class Constraint:
    """The place of one request in its grammar."""

    def __init__(self, grammar: CompiledGrammar, clock: TokenClock) -> None:
        """The place in front of the first token."""
        self._grammar = grammar
        self._vocabulary = grammar.vocabulary
        self._clock = clock
        self._matcher, self._num_full = grammar.copy_matcher()
        self._token_ids: list[int] = []
        self._forced: deque[int] | None = None
        """Tokens that are certain to come; None if that is not known."""

    @property
    def cost_s(self) -> float:
        """Processor time of a token, in seconds, as of `TokenClock`."""
        return self._clock.cost_s

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer, whatever the request says of them."""
        return self._vocabulary.eos_token_ids

    @property
    def is_exhausted(self) -> bool:
        """True if the grammar took too much work, and the place is lost."""
        return self._clock.is_over_limit or (
            self._matcher.is_error() and _OUTSIDE not in self._matcher.get_error()
        )

    def consume(self, token_id: int) -> bool:
        """Goes on behind a token that does not end the answer; False if the grammar does not allow it here, or
        took too much work."""
        if self.is_exhausted:
            return False
        self._clock.end_token()
        is_allowed = self._clock.timed(lambda: self._matcher.consume_token(token_id))
        self._token_ids.append(token_id)
        is_allowed = is_allowed or self._has_found_room() or self._has_found_room()
        forced, self._forced = self._forced, None
        if forced and forced.popleft() == token_id and forced:
            self._forced = forced
        return is_allowed and not self._clock.is_over_limit

    def forced_tokens(self) -> list[int]:
        """The tokens that must come next, as far as they are certain, and at most `MAX_FORCED_TOKENS`; a whole
        answer is followed by its end."""
        if self._forced is None:
            if self._matcher.is_stopped() and not self._matcher.is_error():
                self._forced = deque((self._vocabulary.end_token_id,))
            else:
                self._forced = deque(self._in_room(lambda: self._matcher.compute_ff_tokens()))
        return list(islice(self._forced, MAX_FORCED_TOKENS))

    def mask(self, held_back: Sequence[int] = ()) -> bytes | None:
        """Bits of the tokens that may come next, as `SamplingRules.allowed`; None if that takes too much work.

        Tokens of `held_back` are left out, unless nothing else may come.
        """
        bits = self._in_room(lambda: self._matcher.compute_bitmask())
        if self._clock.is_over_limit or self._matcher.is_error():
            return None
        return _without(self._vocabulary.fitted(bits), held_back)

    def num_allowed(self, draft: Sequence[int], *, forces: bool) -> int:
        """Number of leading tokens of a draft that the grammar allows without ending the answer; with `forces`, of
        those in front of the first behind which a token is certain, which is then appended without being sampled.

        At most `MAX_DRAFT_TOKENS` are looked at.
        """
        matcher = self._matcher.deep_copy()
        for count, token_id in enumerate(draft[:MAX_DRAFT_TOKENS]):
            if token_id in self.eos_token_ids or not matcher.consume_token(token_id):
                return count
            if forces and (matcher.is_stopped() or matcher.compute_ff_tokens()):
                return count
        return min(len(draft), MAX_DRAFT_TOKENS)

    def masks_behind(self, draft: Sequence[int], held_back: Sequence[Sequence[int]]) -> list[bytes]:
        """Masks as of `mask` behind each token of a draft that is allowed, with tokens that each leaves out; fewer
        where the grammar takes too much work."""
        matcher, masks = self._matcher.deep_copy(), list[bytes]()
        for token_id, without in zip(draft, held_back, strict=True):
            if not matcher.consume_token(token_id):
                break
            bits = matcher.compute_bitmask()
            if matcher.is_error():
                break
            masks.append(_without(self._vocabulary.fitted(bits), without))
        return masks

    def _has_found_room(self) -> bool:
        """True if the place ran out of lexer states, and is where it was with another table of them: that of later
        answers, or a new one if it has that already."""
        if not (self._matcher.is_error() and _OUT_OF_STATES in self._matcher.get_error()):
            return False
        if len(self._token_ids) > MAX_REPLAYED_TOKENS:
            return False
        found = self._grammar.copy_matcher_after(self._num_full)
        if found is None:
            return False
        self._matcher, self._num_full = found
        return self._matcher.consume_tokens(self._token_ids)

    def _in_room(self, work: Callable[[], T]) -> T:
        """The result of work. Where lexer states run out it is done again, with the table of later answers, then
        with a new one; the way there does not count as time of the token."""
        result = self._clock.timed(work)
        for _ in range(2):
            if not self._has_found_room():
                break
            result = self._clock.timed(work)
        return result


def _without(mask: bytes, held_back: Sequence[int]) -> bytes:
    """The mask less some tokens, unless nothing else may come."""
    if not held_back:
        return mask
    rest = bytearray(mask)
    for token_id in held_back:
        rest[token_id >> 3] &= 0xFF ^ (1 << (token_id & 7))
    return mask if rest.count(0) == len(rest) else bytes(rest)
