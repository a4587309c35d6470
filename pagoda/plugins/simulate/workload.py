# SPDX-License-Identifier: Apache-2.0
"""Requests of a simulation: traces, which servers recorded, or drawn sessions. Texts are made up.

A trace has a line of JSON for each request (`TracedRequest`) in the format published with Mooncake (Qin et al.,
FAST 2025), as `pagoda route --record` writes it too.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from pagoda.cli.yaml_file import YamlFile
from pagoda.errors import ConfigError
from pagoda.files import read_file
from pagoda.plugins.router.recording import TracedRequest
from pagoda.plugins.simulate.step_times import NotNegative, Positive, Whole

FLAG = "--workload"
MAX_SESSIONS = 10_000_000
COMMON_SHARE = 0.01
"""A text that this share of a trace's requests has is one that further users have, too, when it is scaled."""
_DIGITS = 8
_BASE = 199
"""Pieces of text begin with their ids in this base; small integers are the same objects everywhere."""


class Piece(NamedTuple):
    """A text that nobody else has, unless it has the same id."""

    content: int
    num_tokens: int


class Turn(NamedTuple):
    """A request, and what comes before it in its session."""

    name: str
    pause_s: float
    """Seconds since the answer before, or since the begin of the session."""
    pieces: tuple[Piece, ...]
    """Text behind all turns before, or the whole prompt if the turn is `fresh`."""
    output_tokens: int
    fresh: bool = True
    priority: int = 0


class Session(NamedTuple):
    """Requests of one client, one after the other."""

    name: str
    at: float
    """Seconds from the begin of the simulation."""
    turns: Iterator[Turn]


@dataclass(frozen=True)
class Workload:
    """Sessions in order of their begins."""

    name: str
    sessions: list[Session]
    num_requests: int
    """Number of requests, or about so many."""
    duration_s: float
    """Seconds in which sessions begin; turns of users end then."""


class LogNormal(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A quantity with a long tail; `sigma` is that of its logarithm."""

    mean: Annotated[float, msgspec.Meta(ge=1e-6, le=1e8)]
    sigma: Annotated[float, msgspec.Meta(ge=0, le=5)] = 0.0
    most: Positive = 1e8

    def draw(self, rng: random.Random) -> float:
        drawn = self.mean * math.exp(rng.gauss(0, self.sigma) - self.sigma**2 / 2)
        return min(self.most, drawn if self.sigma else self.mean)

    def draw_whole(self, rng: random.Random) -> int:
        return max(1, round(self.draw(rng)))


class PrefixLevel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A level of a tree of texts with which prompts begin: each text above it goes on in `count` ways."""

    count: Annotated[int, msgspec.Meta(ge=1, le=10**6)]
    tokens: Whole
    skew: Annotated[float, msgspec.Meta(ge=0, le=10)] = 0.6
    """Text number n is n^-skew as popular as the first (Zipf)."""


class Burst(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    at_s: NotNegative
    for_s: Positive
    factor: NotNegative


class Synthetic(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sessions that are drawn. Agents are sessions of many turns with short pauses, in which tools work."""

    duration_s: Positive
    rate: Positive | None = None
    """Sessions that begin in a second (open loop)."""
    users: Whole | None = None
    """Instead: users who begin the next session when the one before has ended (closed loop)."""
    prefixes: tuple[PrefixLevel, ...] = ()
    turns: LogNormal = LogNormal(mean=1)
    prompt_tokens: LogNormal = LogNormal(mean=300, sigma=1)
    """Tokens of each turn."""
    output_tokens: LogNormal = LogNormal(mean=200, sigma=0.8)
    pause_s: LogNormal = LogNormal(mean=20, sigma=0.8)
    """Seconds between an answer and the next turn."""
    daily_swing: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    """The rate goes up and down by this share in `day_s`, from its mean."""
    day_s: Positive = 86400.0
    bursts: tuple[Burst, ...] = ()

    def factor(self, at: float) -> float:
        """The rate at a time, of its mean."""
        return self._burst(at) * (1 + self.daily_swing * math.sin(2 * math.pi * at / self.day_s))

    def most(self) -> float:
        """The highest `factor`, or a little more."""
        edges = (at for it in self.bursts for at in (it.at_s, it.at_s + it.for_s))
        return (1 + self.daily_swing) * max([1.0, *map(self._burst, edges)])

    def _burst(self, at: float) -> float:
        """The product of the bursts at a time."""
        during = (it.factor for it in self.bursts if it.at_s <= at < it.at_s + it.for_s)
        return math.prod(during)


def read_workload(
    path: Path, seed: int, *, scale: float, num_requests: int | None, model: str = ""
) -> Workload:
    """The workload in a YAML file (`Synthetic`) or a trace; `scale` times as many users come. Of a trace only
    lines that name `model` count, if one is given, and of these the first `num_requests`.

    Raises ConfigError, which names the file and the line: there is none.
    """
    if path.suffix in (".yaml", ".yml"):
        if num_requests is not None:
            raise ConfigError(f"--requests is for traces, and {path} has drawn sessions.")
        if model:
            raise ConfigError(f"--model is for traces, and {path} has drawn sessions.")
        return _synthetic(path, seed, scale)
    trace = [it for it in read_trace(path) if not model or it.model == model][:num_requests]
    if not trace:
        raise ConfigError(f"--model: {path} has no request of {model!r}.")
    if len(trace) * scale > MAX_SESSIONS:
        raise ConfigError(f"--scale: there would be more than {MAX_SESSIONS:,} requests.")
    return Workload(
        path.stem,
        list(_traced_sessions(trace, random.Random(seed), scale)),
        round(len(trace) * scale),
        _span_s(trace),
    )


# ---- traces


def read_trace(path: Path) -> list[TracedRequest]:
    """Raises ConfigError, which names the line: the file cannot be read, or a line is no such request."""
    decode = msgspec.json.Decoder(TracedRequest).decode
    trace: list[TracedRequest] = []
    for number, line in enumerate(read_file(path, FLAG).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            traced = decode(line)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path} line {number}: {error}.") from None
        if traced.block_size * len(traced.hash_ids) < traced.input_length:
            raise ConfigError(
                f"{path} line {number}: {len(traced.hash_ids)} hash_ids of {traced.block_size} tokens are too few "
                f"for input_length {traced.input_length}."
            )
        trace.append(traced)
    if not trace:
        raise ConfigError(f"{path} line 1: no request is there.")
    return trace


def _traced_sessions(
    trace: Sequence[TracedRequest], rng: random.Random, scale: float
) -> list[Session]:
    """`scale` users for each of the trace: whoever is added has texts of its own, but for those that many have."""
    uses = Counter(key for traced in trace for key in traced.hash_ids)
    common = {key for key, count in uses.items() if count >= COMMON_SHARE * len(trace)}
    stride = 1 + max(uses, default=0)
    duration_s = _span_s(trace)
    first = min(it.timestamp for it in trace) / 1000
    sessions = []
    for index, traced in enumerate(trace):
        copies = int(scale) + (rng.random() < scale % 1)
        for copy in range(copies):
            at = traced.timestamp / 1000 - first
            if copy and duration_s:
                # Copies of one user stay together: what follows shortly on something still does.
                at = (at + copy * 0.6180339887498949 % 1 * duration_s) % duration_s
            pieces = _pieces(traced, copy * stride, common)
            name = f"r{index}" if copy == 0 else f"r{index}.{copy}"
            turn = Turn(name, 0.0, pieces, max(1, traced.output_length), priority=traced.priority)
            session = "" if traced.session is None else f"{traced.session}.{copy}"
            sessions.append(Session(session, at, iter((turn,))))
    sessions.sort(key=lambda session: session.at)
    return sessions


def _pieces(traced: TracedRequest, offset: int, common: set[int]) -> tuple[Piece, ...]:
    left, pieces = traced.input_length, []
    for key in traced.hash_ids:
        if left <= 0:
            break
        content = key if key in common else key + offset
        pieces.append(Piece(content, min(traced.block_size, left)))
        left -= traced.block_size
    return tuple(pieces)


def _span_s(trace: Sequence[TracedRequest]) -> float:
    times = [it.timestamp for it in trace]
    return (max(times) - min(times)) / 1000


# ---- drawn sessions


def _synthetic(path: Path, seed: int, scale: float) -> Workload:
    file = YamlFile(path, FLAG)
    plan = file.convert(file.value, Synthetic)
    if (plan.rate is None) == (plan.users is None):
        raise file.error((), "a workload has either a rate or users")
    if plan.users is not None and (plan.bursts or plan.daily_swing):
        raise file.error(("users",), "bursts and daily_swing are of a rate, and there are users")
    most = plan.users or (plan.rate or 0.0) * plan.most() * plan.duration_s
    if most * scale > MAX_SESSIONS:
        place = ("users",) if plan.users else ("rate",)
        raise file.error(place, f"there would be more than {MAX_SESSIONS:,} sessions")
    rng = random.Random(seed)
    if plan.users is not None:
        num_users = max(1, round(plan.users * scale))
        within_s = min(plan.pause_s.mean, plan.duration_s)
        begins = sorted(rng.uniform(0, within_s) for _ in range(num_users))
        expected = num_users * plan.duration_s / max(1.0, plan.pause_s.mean)
    else:
        begins = list(_arrivals(plan, rng, (plan.rate or 0.0) * scale))
        # The first that `_turns` draws.
        seeds = (seed * 1_000_003 + number for number in range(len(begins)))
        expected = sum(plan.turns.draw_whole(random.Random(one)) for one in seeds)
    sessions = [
        Session(f"s{number}", at, _turns(plan, f"s{number}", seed * 1_000_003 + number))
        for number, at in enumerate(begins)
    ]
    return Workload(path.stem, sessions, max(1, round(expected)), plan.duration_s)


def _arrivals(plan: Synthetic, rng: random.Random, rate: float) -> Iterator[float]:
    """A Poisson process whose rate changes, by thinning (Lewis and Shedler 1979)."""
    most = plan.most()
    at = rng.expovariate(rate * most)
    while at < plan.duration_s:
        if rng.random() * most < plan.factor(at):
            yield at
        at += rng.expovariate(rate * most)


def _turns(plan: Synthetic, name: str, seed: int) -> Iterator[Turn]:
    """The turns of a session, or of a user, who begins another one without end."""
    rng = random.Random(seed)
    number = 0
    while True:
        for index in range(plan.turns.draw_whole(rng)):
            own = Piece((seed << 20) + number + 2**40, plan.prompt_tokens.draw_whole(rng))
            pieces = (*(_prefix(plan, rng) if index == 0 else ()), own)
            pause_s = plan.pause_s.draw(rng) if number else 0.0
            output_tokens = plan.output_tokens.draw_whole(rng)
            yield Turn(f"{name}.t{number}", pause_s, pieces, output_tokens, fresh=index == 0)
            number += 1
        if plan.users is None:
            return


@cache
def _popularity(level: PrefixLevel) -> list[float]:
    """Cumulative weights of the texts of a level."""
    return list(accumulate(1 / (rank + 1) ** level.skew for rank in range(level.count)))


def _prefix(plan: Synthetic, rng: random.Random) -> Iterator[Piece]:
    content = 0
    for level in plan.prefixes:
        [choice] = rng.choices(range(level.count), cum_weights=_popularity(level))
        content = content * (level.count + 1) + 1 + choice
        yield Piece(content, level.tokens)


# ---- tokens


@lru_cache(maxsize=4096)
def _begin(content: int) -> tuple[int, ...]:
    digits = []
    for _ in range(_DIGITS):
        content, digit = divmod(content, _BASE)
        digits.append(1 + digit)
    return tuple(digits)


def token_ids(piece: Piece) -> list[int]:
    """The tokens of a piece: its id, then filling."""
    begin = _begin(piece.content)
    left = piece.num_tokens - len(begin)
    return [*begin, *[begin[0]] * left] if left >= 0 else list(begin[: piece.num_tokens])
