# SPDX-License-Identifier: Apache-2.0
"""The scheduler's request: its tokens, the number of computed tokens, its block table and its state."""

from __future__ import annotations

import enum
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field

from pagoda.engine.fair_shares import Charge
from pagoda.engine.structured_output.constraint import Constraint
from pagoda.kv.block_table import BlockTable
from pagoda.kv.connector import PrefixRequest
from pagoda.messages.frontend import (
    FinishReason,
    GenerateRequest,
    KVSource,
    Pooling,
    PromptLogprobs,
    Work,
)
from pagoda.messages.worker import SlotStart

_OF_ONE_TOKEN = (None, Pooling.LAST, Pooling.FIRST, Pooling.SCORE)
"""Poolings that need no hidden states of other tokens, whose blocks may be found in a cache."""
OrderKey = tuple[int, float, int]
"""(priority, start tag, arrival). Requests are served in this order; keys are unique."""


def order_key(message: GenerateRequest, start: float, arrival: int) -> OrderKey:
    """The scheduling policy: lower priorities first, then lower start tags (`FairShares`), then first come, first
    served.

    Only a lower first element makes running requests give way; `arrival` counts requests from 0.
    """
    return message.priority, start, arrival


class RequestState(enum.Enum):
    """Stages of a request's life in the scheduler."""

    NEW = enum.auto()
    """The request has no place yet."""
    WAITING = enum.auto()
    """The request is in line for a slot. A preempted request waits again, with its tokens."""
    AWAITING_KV = enum.auto()
    """Another place for KV has not answered yet whether it has some; the request holds no blocks."""
    LOADING = enum.auto()
    """Transfers fill blocks of the request."""
    RUNNING = enum.auto()
    """The request has a slot in the worker."""
    FINISHED = enum.auto()


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """One `GenerateRequest` and what the scheduler knows of it."""

    message: GenerateRequest
    max_model_len: InitVar[int]
    order_key: OrderKey
    charge: Charge
    """The tenant of the request, and its service so far as it is foreseen."""
    table: BlockTable
    runs_ahead: bool = True
    """True if a token may be computed before the engine knows the token in front of it."""
    constraint: Constraint | None = None
    """Place in the request's grammar, behind all of its tokens; None without one."""
    added_at: float = 0.0
    """Arrival, in seconds on the engine's clock."""

    end_token_ids: frozenset[int] = field(init=False)
    """End-of-sequence tokens of the model, and the stop tokens that the client named."""
    token_ids: list[int] = field(init=False)
    """Prompt, then output so far."""
    num_prompt_tokens: int = field(init=False)
    max_total_tokens: int = field(init=False)
    num_scored_tokens: int = field(init=False)
    """Leading prompt tokens whose log-probabilities are known, or not wanted."""
    state: RequestState = RequestState.NEW
    queue_time_s: float | None = None
    """Seconds until the first admission; None before it, and once it was sent to the frontend."""
    provider: Request | None = None
    """Running request whose blocks this one waits for in line; see `InFlightPrefixes`."""
    num_provided_blocks: int = 0
    """Blocks that the provider had published when this request was told to wait."""
    reserved_blocks: int = 0
    """Blocks that known tokens still need, and one more of each group."""
    reserved_on: Sequence[tuple[int, int]] = ()
    """Ranks, and how many of these blocks each is to have; while the request runs or loads."""
    slot: int | None = None
    """Index of the request in the worker while it runs."""
    admission: int = 0
    """Counts admissions: a step result counts for the admission that it was scheduled in."""
    num_scheduled_tokens: int = 0
    """Leading tokens that are computed once all steps in flight are."""
    num_computed_tokens: int = 0
    num_preempted_tokens: int = 0
    """Leading tokens that had been computed when the request was last preempted."""
    num_repeated_tokens: int = 0
    """Tokens of these that the present admission computes again."""
    num_pending_samples: int = 0
    """Steps in flight that will sample a token of the request which is not known yet."""
    num_overtaken: int = 0
    """Oldest steps in flight that were to sample and will not: a step before them has given several tokens, which
    they compute."""
    num_known_samples: int = 0
    """Steps in flight, older than those, whose samples are known: a grammar forces them."""
    known_tokens: deque[int] = field(default_factory=deque)
    """Known samples that the worker has not been told."""
    mask_turn: int = 0
    """Step before which a request with a slow grammar gives way to others."""
    drafts: list[int] = field(default_factory=list)
    """Tokens that may follow all known ones, of a request without a pending sample: as far as there is room, the
    next step computes them too, and samples behind each (speculative decoding). They change no token."""
    is_drafted: bool = False
    """True while a step with drafts of the request is in flight: nobody knows where it goes on."""
    num_lost: int = 0
    """Losses of segments that lay below the device, without progress in between."""
    last_lost: int = -1
    """The last of the segments that were lost first each time."""
    num_masked: int = 0
    """Pending samples for which the worker has been told what it may sample: 0 or 1."""
    num_worker_tokens: int = 0
    """Tokens that the slot will have, without any that a grammar appends, once all steps in flight are done."""
    num_sent_tokens: int = 0
    """Tokens that all stages of the worker know, or will from plans that are made."""
    num_cached_tokens: int | None = None
    """Prompt tokens found in the cache at the first admission; None before it."""
    crash_count: int = 0
    """Crashes of the worker during steps of the request, since it last got past `crash_point`."""
    crash_point: int = 0
    """Tokens that were scheduled at the latest crash."""

    # KV from and for other places
    prefix: PrefixRequest | None = None
    """Prefix that connectors know, from when the request is queued until it is admitted."""
    kv_source: KVSource | None = field(init=False)
    """The engine to fetch KV from; None once that was tried, or there is no need."""
    load_tried: bool = False
    """True once KV was loaded, as often as it may be, or awaited in vain, since the request was queued."""
    num_loads: int = 0
    """Loads since then."""
    fetched: range = range(0)
    """Indices of blocks that another engine computed for this request, and that were loaded."""
    loaded: Sequence[tuple[int, int]] = ()
    """Groups and indices of the blocks that transfers fill."""
    num_saved: int = 0
    """Leading blocks that connectors were offered to save, of groups that keep all."""
    num_saved_tail: int = 0
    """Leading blocks behind which connectors were last offered to save what other groups keep."""
    transfer_id: str | None = None
    """The transfer under which KV is held for another engine."""

    def __post_init__(self, max_model_len: int) -> None:
        message, sampling = self.message, self.message.work.sampling
        self.kv_source = message.kv_source
        self.end_token_ids = frozenset((*message.work.eos_token_ids, *sampling.stop_token_ids))
        self.token_ids = [*message.prompt_token_ids, *message.output_token_ids]
        self.num_prompt_tokens = len(message.prompt_token_ids)
        self.max_total_tokens = max_model_len
        if sampling.max_tokens is not None:
            self.max_total_tokens = min(max_model_len, self.num_prompt_tokens + sampling.max_tokens)
        self.num_scored_tokens = self.num_prompt_tokens
        if sampling.prompt_logprobs is not None:
            self.num_scored_tokens = max(1, message.num_scored_tokens)
            self.kv_source = None  # the prompt is computed here
        self._limit_reuse()
        if message.holds_kv:
            self.max_total_tokens = min(self.max_total_tokens, self.num_tokens + 1)

    @property
    def request_id(self) -> str:
        return self.message.request_id

    @property
    def work(self) -> Work:
        """The part of the message that workers read."""
        return self.message.work

    def add_scores(self, scores: PromptLogprobs) -> PromptLogprobs | None:
        """Counts log-probabilities; returns those that are new. A preempted request computes some again.
        Raises RuntimeError: they leave some out; the worker cannot be trusted any more."""
        known = self.num_scored_tokens
        if scores.first > known:
            raise RuntimeError(
                f"Request {self.request_id} lacks log-probabilities from {known} on."
            )
        if scores.end <= known:
            return None
        self.num_scored_tokens = scores.end
        self._limit_reuse()
        return scores.since(known)

    def _limit_reuse(self) -> None:
        """The hidden state of a token scores the next one."""
        if self.work.pooling not in _OF_ONE_TOKEN:
            self.table.num_reusable_tokens = 0
        elif self.num_scored_tokens < self.num_prompt_tokens:
            self.table.num_reusable_tokens = self.num_scored_tokens - 1
        else:
            self.table.num_reusable_tokens = sys.maxsize

    @property
    def generates(self) -> bool:
        """False if the request ends when its prompt is computed."""
        return self.work.sampling.max_tokens != 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_schedulable_tokens(self) -> int:
        """Tokens that the next step may compute; 0 when the last sample that counts is pending."""
        expected = len(self.token_ids) + self.num_pending_samples
        if self.num_pending_samples and (
            self.is_drafted or not self.runs_ahead or expected >= self.max_total_tokens
        ):
            return 0
        return expected - self.num_scheduled_tokens

    @property
    def is_decoding(self) -> bool:
        """True if what is left to compute are tokens of the answer, or the last one of the prompt."""
        return self.num_scheduled_tokens >= self.num_prompt_tokens - 1

    @property
    def has_made_up(self) -> bool:
        """True if the present admission has computed as many new tokens as it had to compute again."""
        num_new = self.num_computed_tokens - self.num_preempted_tokens
        return num_new >= self.num_repeated_tokens

    def got_on(self, num_cold: int) -> None:
        """A step with so many cold segments has been computed: losses are over if it read what was lost, and no
        step had come as far."""
        if num_cold > self.last_lost and self.num_computed_tokens > self.num_preempted_tokens:
            self.num_lost, self.last_lost = 0, -1

    @property
    def tenant(self) -> str:
        return self.charge.tenant

    @property
    def is_awaiting_kv(self) -> bool:
        return self.state in (RequestState.AWAITING_KV, RequestState.LOADING)

    def finish_reason(self) -> tuple[FinishReason | None, int | None]:
        """Reason why the last output token ends the answer, if it does, and the stop token named by the client."""
        token_id, is_full = self.token_ids[-1], len(self.token_ids) >= self.max_total_tokens
        if self.constraint is not None and token_id in self.constraint.eos_token_ids:
            return FinishReason.STOP, None
        if not is_full and token_id not in self.end_token_ids:
            return None, None
        if self.num_output_tokens >= self.work.sampling.min_tokens:
            if token_id in self.work.eos_token_ids:
                return FinishReason.STOP, None
            if token_id in self.work.sampling.stop_token_ids:
                return FinishReason.STOP, token_id
        return (FinishReason.LENGTH, None) if is_full else (None, None)

    @property
    def may_force_tokens(self) -> bool:
        """True if tokens that a grammar forces are not sampled: nobody wants to know how likely they were."""
        return self.constraint is not None and self.work.sampling.logprobs is None

    def take_drafts(self, most: int) -> list[int]:
        """The first drafts, `most` at most, if they may be sampled behind; there are none from now on."""
        drafts, self.drafts = self.drafts, []
        if self.num_pending_samples:
            return []
        return self.allowed(
            drafts[: max(0, min(most, self.max_total_tokens - self.num_tokens - 1))]
        )

    def allowed(self, drafts: list[int]) -> list[int]:
        """The drafts to where they end the answer, or leave its grammar."""
        if not self.end_token_ids.isdisjoint(drafts):
            ends = (place for place, it in enumerate(drafts) if it in self.end_token_ids)
            drafts = drafts[: next(ends)]
        if self.constraint is None or not drafts:
            return drafts
        return drafts[: self.constraint.num_allowed(drafts, forces=self.may_force_tokens)]

    def expect(self, token_id: int) -> None:
        """The last token was forced: the next sample that is pending will be this token."""
        if self.num_pending_samples:
            self.num_pending_samples -= 1
            self.num_known_samples += 1
            self.known_tokens.append(token_id)

    def overtake(self, num_more: int) -> None:
        """A step has given `num_more` tokens besides the one that was expected of it, which lie where steps in
        flight were to sample: these compute tokens that are known now, and only those behind them sample."""
        num_overtaken = min(num_more, self.num_pending_samples)
        self.num_pending_samples -= num_overtaken
        self.num_overtaken += num_overtaken
        self.num_worker_tokens += num_more - num_overtaken

    def held_back_tokens(self, num_drafts: int = 0) -> list[int]:
        """Tokens that the next sample, or that behind so many drafts, avoids where the grammar has a choice: those
        that would end the answer."""
        if self.constraint is None:
            return []
        if self.num_output_tokens + num_drafts < self.work.sampling.min_tokens:
            return sorted(self.end_token_ids | self.constraint.eos_token_ids)
        return sorted(self.constraint.eos_token_ids) if self.work.sampling.ignore_eos else []

    def forget_steps(self) -> None:
        """The steps in flight are lost."""
        self.num_pending_samples = self.num_known_samples = self.num_masked = 0
        self.num_overtaken = 0
        self.is_drafted = False
        self.known_tokens.clear()

    def slot_start(self, slot: int) -> SlotStart:
        """The request in full, for a worker that does not know it."""
        return SlotStart(
            slot=slot,
            token_ids=list(self.token_ids),
            num_prompt_tokens=self.num_prompt_tokens,
            num_computed_tokens=self.num_computed_tokens,
            block_ids=self.table.block_ids(),
            work=self.work,
            request_id=self.request_id,
            num_scored_tokens=self.num_scored_tokens,
            rank=self.table.rank,
        )
