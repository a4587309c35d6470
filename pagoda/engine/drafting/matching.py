# SPDX-License-Identifier: Apache-2.0
"""Drafters without weights: what followed the last time that the text read like this.

`ngram` looks into prompt and answer (prompt lookup decoding, https://github.com/apoorvumang/prompt-lookup-decoding,
with vLLM's bounds). `suffix` looks into recent answers of the same tenant too, takes as many tokens as the match
is long times a factor, and goes the way that most matches go (SuffixDecoding, arXiv 2411.04975).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from pagoda.engine.drafting.drafter import NOTHING, Proposal
from pagoda.engine.drafting.token_index import Match, TokenIndex
from pagoda.engine.request import Request

STEP_TOKENS = 512
"""Tokens that are indexed in a step, of all requests together: 0.1 ms. The rest of a long prompt follows in the
next steps, while it is computed."""
STEP_INDEXES = 2
"""Indexes that are begun in a step; the tables of a long context are 256 KiB."""
STEP_LOOKS = 256
"""Places that are looked at in a step, of all requests together."""
MAX_LOOKS = 12
"""Places that are looked at for one request."""
POOL_TOKENS = 65_536
"""Tokens of recent answers that are kept for one tenant and salt."""
MAX_POOLS = 32
_END = -1
"""Stands between answers in a pool; it is no token."""

INDEX_BYTES = 12
"""Bytes of an index for each token; a pool has a list of tokens too."""
_POOL_BYTES = POOL_TOKENS * (INDEX_BYTES + 8)
MOST_POOL_BYTES = MAX_POOLS * _POOL_BYTES


@dataclass(frozen=True)
class MatchRules:
    """Rules of what counts as a match, and how far it is followed."""

    least: int
    """Tokens of a match at least."""
    longest: int
    """Tokens of a match that are compared."""
    factor: float
    """Drafts for each token of a match; infinity for no such bound."""
    least_share: float
    """Share of the matches that must go on alike, all drafts before included."""
    num_pooled: int
    """Recent answers of a tenant that are kept; 0 for none."""


class _Pool:
    """Recent answers of one tenant and salt, in two halves; the older one is dropped when both are full."""

    def __init__(self, num_answers: int) -> None:
        self._half = max(1, num_answers // 2)
        self._order = 2
        self.young = self._empty()
        self.old = self._empty()
        self._num_young = 0

    def add(self, answer: list[int]) -> None:
        if self._num_young >= self._half or len(self.young.tokens) >= POOL_TOKENS // 2:
            self.old, self.young, self._num_young = self.young, self._empty(), 0
        room = POOL_TOKENS // 2 - len(self.young.tokens) - 1
        self.young.tokens += [*answer[:room], _END]
        self._num_young += 1

    def _empty(self) -> TokenIndex:
        return TokenIndex([], self._order, POOL_TOKENS // 2)


class MatchingDrafter:
    """Finds what followed the last tokens of a request when they came before."""

    prior: Sequence[float] = (0.2, 0.35, 0.5, 0.65, 0.75, 0.85, 0.9)
    num_asked = 0

    def __init__(self, rules: MatchRules) -> None:
        self._rules = rules
        self._order = min(2, rules.least)
        self._own: dict[Request, TokenIndex] = {}
        self._pools: OrderedDict[tuple[str, str | None, str], _Pool] = OrderedDict()
        self._num_looks = 0

    @property
    def num_bytes(self) -> int:
        own = sum(len(index.tokens) for index in self._own.values())
        return INDEX_BYTES * own + _POOL_BYTES * len(self._pools)

    def take(self, request: Request, token_ids: list[int]) -> None:
        """Nobody has asked the worker."""

    def begin_step(self, requests: Sequence[Request]) -> None:
        self._num_looks = min(MAX_LOOKS, max(1, STEP_LOOKS // max(1, len(requests))))
        num_left, num_new = STEP_TOKENS, 0
        for request in requests:
            own = self._own.get(request)
            if own is None:
                if num_new == STEP_INDEXES:
                    continue
                num_new += 1
                num_expected = min(request.max_total_tokens, request.num_tokens + 1024)
                own = TokenIndex(request.token_ids, self._order, num_expected)
                self._own[request] = own
            if num_left and own.num_indexed < len(own.tokens):
                num_left -= own.catch_up(num_left)
        for request in requests:
            pool = self._pools.get(_key(request)) if num_left and self._pools else None
            for index in () if pool is None else (pool.young, pool.old):
                if index.num_indexed < len(index.tokens):
                    num_left -= index.catch_up(num_left)

    def propose(self, request: Request, most: int) -> Proposal:
        rules, text = self._rules, request.token_ids
        own = self._own.get(request)
        if own is None:
            return NOTHING
        found = own.longest_match(text, self._num_looks, rules.longest)
        if rules.num_pooled and found.length < rules.longest:
            found = self._longest_pooled(request, found)
        if found.length < rules.least:
            return NOTHING
        most = int(min(most, rules.factor * found.length))
        return _followed(found, most, rules.least_share)

    def _longest_pooled(self, request: Request, found: Match) -> Match:
        pool = self._pools.get(_key(request))
        if pool is None:
            return found
        for index in (pool.young, pool.old):
            other = index.longest_match(request.token_ids, self._num_looks, self._rules.longest)
            if other.length > found.length:
                found = other
        return found

    def finished(self, request: Request) -> None:
        self._own.pop(request, None)
        if not self._rules.num_pooled or request.num_output_tokens < 2:
            return
        key = _key(request)
        pool = self._pools.get(key)
        if pool is None:
            pool = self._pools[key] = _Pool(self._rules.num_pooled)
            if len(self._pools) > MAX_POOLS:
                self._pools.popitem(last=False)
        self._pools.move_to_end(key)
        pool.add(request.token_ids[request.num_prompt_tokens :])


def _key(request: Request) -> tuple[str, str | None, str]:
    """Name of a pool: recent answers stay with those who may share the prefix cache."""
    return request.tenant, request.message.salt, request.work.adapter


def _followed(found: Match, most: int, least_share: float) -> Proposal:
    """Proposal of what most of the matches go on with, as long as enough do."""
    tokens, places, shares, token_ids = found.tokens, found.places, list[float](), list[int]()
    if len(places) == 1:
        (place,) = places
        token_ids = tokens[place : place + most]
        if _END in token_ids:
            del token_ids[token_ids.index(_END) :]
        return Proposal(token_ids, found.length, [1.0] * len(token_ids))
    num_all, end = len(places), len(tokens)
    while len(token_ids) < most:
        nexts = Counter(tokens[place] for place in places if place < end)
        if not nexts:
            break
        token_id, count = nexts.most_common(1)[0]
        if token_id == _END or count < least_share * num_all:
            break
        token_ids.append(token_id)
        shares.append(count / len(places))
        places = [place + 1 for place in places if place < end and tokens[place] == token_id]
    return Proposal(token_ids, found.length, shares)
