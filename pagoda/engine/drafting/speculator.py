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
from pagoda.engine.drafting.planner import StepSize
from pagoda.engine.drafting.step_costs import StepCosts
from pagoda.engine.grammar_turns import SLOW_MASK_S
from pagoda.engine.plans import InFlightStep, Scheduled
from pagoda.engine.request import Request
from pagoda.messages.worker import StepResult

MAX_ASKED = 24
"""Requests for which drafts are sought in one step; with more, they take turns."""
PROBE_STEPS = 64
"""Steps of a request after which its worker is asked again whether its drafts have become better."""
_PROBE = 4
"""Drafts that are asked for then."""
_LEAST_CHANCE = 0.05
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
    num_unasked: int = 0
    """Steps since the worker was asked to propose."""


class Speculator:
    """Sets `Request.drafts` before plans are made, and learns from what became of them."""

    def __init__(self, drafter: Drafter, most: int, costs: StepCosts) -> None:
        """`most` drafts of a request in a step."""
        self.costs = costs
        self.size = StepSize(1, 1)
        """The step that is planned next, without drafts."""
        self._drafter = drafter
        self._most = most
        self._rates = MatchRates(drafter.prior)
        self._courses: dict[Request, _Course] = {}
        self._drafted: list[Request] = []
        """Requests that were given drafts for the last plan, some of which may have them still."""
        self._turn = 0
        self._awaits = False
        """True while a step is under way whose proposals are awaited."""

    @property
    def num_bytes(self) -> int:
        """Memory in which drafts are looked up, at most."""
        return self._drafter.num_bytes

    def holds_back(self, running: Sequence[Request], room: int) -> bool:
        """True if the next step is better planned with some of `room` drafts, once that under way has ended."""
        chances = (self._chances(request, num_unknown=1) for request in self._asked(running, room))
        gains = sorted((it for gains in chances for it in gains), reverse=True)[: max(0, room)]
        return self._awaits or self.costs.most_worthwhile(*self.size, gains) > 0

    def draft(self, running: Sequence[Request], room: int) -> None:
        """Gives requests drafts for the plan that is made next, all together at most `room`."""
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
        count = self.costs.most_worthwhile(*self.size, [gain for gain, _ in gains])
        for _, request in gains[:count]:
            course = self._courses[request]
            begin = request.num_tokens - course.begin
            if not request.drafts:
                self._drafted.append(request)
            request.drafts.append(course.proposal.token_ids[begin + len(request.drafts)])

    def ask(self, scheduled: Sequence[Scheduled]) -> dict[int, int]:
        """Numbers of tokens that the worker is to propose behind what a step samples, by slot."""
        if not self._drafter.num_asked:
            return {}
        asked: dict[int, int] = {}
        self._awaits = False
        for part in scheduled:
            request = part.request
            if part.samples and request.generates and request.message.speculates:
                course = self._course(request)
                course.num_unasked += 1
                count = self._num_paying(course)
                self._awaits |= count > 0
                if count or course.num_unasked >= PROBE_STEPS:
                    course.num_unasked = 0
                    asked[part.slot] = count or self.num_ahead
        return asked

    @property
    def num_ahead(self) -> int:
        """Tokens behind those of a step for which the worker wants blocks, so that it can propose."""
        return min(_PROBE, self._most, self._drafter.num_asked)

    def _num_paying(self, course: _Course) -> int:
        """Number of drafts of the worker that are worth their time, as far as is known before there are any."""
        chance, gains = 1.0, list[float]()
        for place in range(min(self._most, self._drafter.num_asked)):
            chance *= course.own.chance(self._rates.rate(1 + place))
            gains.append(chance)
        return self.costs.most_worth_asking(*self.size, gains)

    def observe(self, step: InFlightStep, result: StepResult) -> None:
        """Learns what a step took, whose result has been applied, and what it proposes."""
        num_tokens = sum(part.num_tokens for part in step.scheduled)
        num_tokens += sum(map(len, step.drafts.values()))
        self.costs.observe(num_tokens, result.step_time_s)
        if step.drafts:
            self.costs.observe_gap(result.idle_time_s)
        if step.proposals:
            self.costs.observe_proposals(max(step.proposals.values()), result.propose_time_s)
            self._awaits = False
            for part in step.scheduled:
                proposed = result.proposals.get(part.slot)
                if proposed and part.request in self._courses:
                    self._drafter.take(part.request, proposed)

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

    def _course(self, request: Request) -> _Course:
        course = self._courses.get(request)
        if course is None:
            course = self._courses[request] = _Course()
        return course

    def _chances(self, request: Request, num_unknown: int) -> list[float]:
        """Probabilities of drafts behind `num_unknown` tokens that the step under way gives: that each is right,
        with all before it."""
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
    """False of requests whose prompt is not computed, and of slow grammars."""
    if not request.is_decoding:
        return False
    return request.constraint is None or request.constraint.cost_s <= SLOW_MASK_S
