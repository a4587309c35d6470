# SPDX-License-Identifier: Apache-2.0
"""Speculation in one engine: which requests are given how many drafts, in which steps.

A draft changes no token, so all that is decided here is about time. A request that drafts must know its last
token, so with one stage a step with drafts is planned when the step before it has ended; a step without drafts is
planned while the one before runs. `holds_back` weighs that too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pagoda.engine.drafting.acceptance import MatchRates, OwnRate
from pagoda.engine.drafting.drafter import NOTHING, Drafter, Proposal
from pagoda.engine.drafting.step_costs import StepCosts
from pagoda.engine.drafting.worker_drafts import MATCH, WorkerDrafts
from pagoda.engine.grammar_turns import SLOW_MASK_S
from pagoda.engine.plans import InFlightStep, Scheduled
from pagoda.engine.request import Request, RequestState
from pagoda.messages.worker import StepResult

MAX_ASKED = 64
"""Requests for which drafts are sought in one step; with more, they take turns."""
_LEAST_CHANCE = 0.02
"""Drafts behind those that are less likely are not looked at."""


@dataclass(slots=True)
class _Course:
    """The last proposal of one request, and how its proposals have fared."""

    own: OwnRate = field(default_factory=OwnRate)
    proposal: Proposal = NOTHING
    begin: int = -1
    """Tokens of the request when it was sought."""
    num_judged: int = 0
    """Leading drafts of it that are known to be right."""


class Speculator:
    """Sets `Request.drafts` before plans are made, and learns from what became of them."""

    def __init__(
        self,
        drafter: Drafter,
        most: int,
        costs: StepCosts,
        worker_drafts: WorkerDrafts | None = None,
    ) -> None:
        """`most` drafts of a request in a step. `worker_drafts` is the drafter, where it gives what the worker
        proposes."""
        self.costs = costs
        self._drafter = drafter
        self._worker_drafts = worker_drafts
        self._most = most
        self._rates = MatchRates()
        self._courses: dict[Request, _Course] = {}
        self._drafted: list[Request] = []
        """Requests that were given drafts for the last plan, some of which may have them still."""
        self._turn = 0

    def holds_back(self, running: Sequence[Request], room: int, num_tokens: int) -> bool:
        """True if the next step is better planned with drafts, once the step under way has ended.

        `room` and `num_tokens` are as for `draft`.
        """
        chances = (self._chances(request, num_unknown=1) for request in self._asked(running, room))
        gains = sorted((it for gains in chances for it in gains), reverse=True)[: max(0, room)]
        return self.costs.most_worthwhile(num_tokens, len(running), gains) > 0

    def draft(self, running: Sequence[Request], room: int, num_tokens: int) -> None:
        """Gives requests drafts for the plan that is made next, all together at most `room`.

        The step has `num_tokens` tokens besides.
        """
        for request in self._drafted:
            request.drafts = []
        self._drafted = []
        gains: list[tuple[float, Request]] = []
        for request in self._asked(running, room):
            if not request.num_pending_samples:
                gains += ((gain, request) for gain in self._chances(request, num_unknown=0))
        if not gains:
            return
        gains.sort(key=lambda it: it[0], reverse=True)
        del gains[room:]
        count = self.costs.most_worthwhile(num_tokens, len(running), [gain for gain, _ in gains])
        for _, request in gains[:count]:
            course = self._courses[request]
            begin = request.num_tokens - course.begin
            if not request.drafts:
                self._drafted.append(request)
            request.drafts.append(course.proposal.token_ids[begin + len(request.drafts)])

    def observe(self, step: InFlightStep, result: StepResult) -> None:
        """Learns what a step took."""
        num_tokens = sum(part.num_tokens for part in step.scheduled)
        num_tokens += sum(map(len, step.drafts.values()))
        self.costs.observe(num_tokens, result.step_time_s)
        if step.drafts:
            self.costs.observe_gap(result.idle_time_s)
        if step.wanted_drafts and self._worker_drafts is not None:
            self._worker_drafts.observe(max(step.wanted_drafts.values()), result.draft_time_s)

    def num_ahead(self, running: Sequence[Request], room: int, num_tokens: int) -> int:
        """How many drafts of each request the worker is to propose behind the next step; the arguments are as for
        `draft`."""
        found = self._worker_drafts
        asked = [] if found is None else [it for it in running if it.message.speculates]
        if found is None or not asked:
            return 0
        rate = self._rates.rate(MATCH)
        chances = [self._course(request).own.chance(rate) for request in asked]
        most = min(self._most, room // len(asked))
        return found.num_ahead(chances, most, max(num_tokens, len(asked)), self.costs)

    def wanted(self, scheduled: Sequence[Scheduled], ahead: int) -> dict[int, int]:
        """Drafts that the worker is to propose behind a step, by slot; `ahead` of each request at most."""
        wanted: dict[int, int] = {}
        for part in scheduled:
            request = part.request
            if part.samples and request.generates and _is_willing(request):
                # Behind the token that is sampled, and in front of the last one.
                left = request.max_total_tokens - request.num_tokens - 1
                count = min(ahead, left - request.num_pending_samples)
                if count > 0:
                    wanted[part.slot] = count
        return wanted

    def take(self, request: Request, token_ids: list[int]) -> None:
        """The worker has proposed these behind all that is known of the request."""
        if self._worker_drafts is not None and request.state is not RequestState.FINISHED:
            self._worker_drafts.take(request, token_ids)

    def finished(self, request: Request) -> None:
        self._courses.pop(request, None)
        self._drafter.finished(request)

    def _asked(self, running: Sequence[Request], room: int) -> list[Request]:
        """The requests for which drafts are sought in this step."""
        if room <= 0:
            return []
        turns = running
        if len(running) > MAX_ASKED:
            begin = self._turn = (self._turn + MAX_ASKED) % len(running)
            end = begin + MAX_ASKED
            turns = [*running[begin:end], *running[: max(0, end - len(running))]]
        turns = [request for request in turns if request.message.speculates]
        self._drafter.begin_step(turns)
        return list(filter(_may_draft, turns))

    def _chances(self, request: Request, num_unknown: int) -> list[float]:
        """For each draft behind `num_unknown` tokens that the step under way gives, the probability that it is
        right, with all before it."""
        course = self._course(request)
        self._judge(request, course)
        wanted = num_unknown + self._most
        num_left = len(course.proposal.token_ids) - course.num_judged
        if num_left < wanted and course.begin != request.num_tokens:
            proposal = self._drafter.propose(request, 2 * wanted)
            course.proposal = proposal._replace(token_ids=request.allowed(proposal.token_ids))
            course.begin, course.num_judged = request.num_tokens, 0
        chance, chances = 1.0, list[float]()
        proposal, first = course.proposal, course.num_judged
        for place in range(first, min(first + wanted, len(proposal.token_ids))):
            chance *= course.own.chance(self._expected(proposal, place))
            if chance < _LEAST_CHANCE:
                break
            chances.append(chance)
        return chances[num_unknown:]

    def _course(self, request: Request) -> _Course:
        course = self._courses.get(request)
        if course is None:
            course = self._courses[request] = _Course()
        return course

    def _expected(self, proposal: Proposal, place: int) -> float:
        """The probability that a draft of any request is right, if all before it are."""
        return proposal.shares[place] * self._rates.rate(proposal.length + place)

    def _judge(self, request: Request, course: _Course) -> None:
        """Compares a proposal with the tokens that have come since."""
        proposal, text, begin = course.proposal, request.token_ids, course.begin
        for place in range(course.num_judged, min(len(proposal.token_ids), len(text) - begin)):
            is_right = proposal.token_ids[place] == text[begin + place]
            course.own.judge(self._expected(proposal, place), is_right=is_right)
            self._rates.judge(proposal.length + place, is_right=is_right)
            if not is_right:
                course.proposal, course.num_judged = NOTHING, 0
                return
            course.num_judged = place + 1
        if course.num_judged == len(proposal.token_ids):
            course.proposal, course.num_judged = NOTHING, 0


def _may_draft(request: Request) -> bool:
    """False of requests whose next step computes more than their last token, and of slow grammars."""
    return request.num_scheduled_tokens >= request.num_tokens - 1 and _is_willing(request)


def _is_willing(request: Request) -> bool:
    """False of requests that want no drafts, and of slow grammars."""
    if not request.message.speculates:
        return False
    return request.constraint is None or request.constraint.cost_s <= SLOW_MASK_S
