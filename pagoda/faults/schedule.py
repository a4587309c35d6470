# SPDX-License-Identifier: Apache-2.0
"""Schedules of faults: one line says which faults come when.

    seed=7 worker.step:kill@5,12 disk.write:enospc%0.1 engine.result:double@*3 worker[1].load:hang

An entry is `POINT:ACTION`, `POINT[INSTANCE]` with the number of a process counted by its parent, `ACTION=VALUE`;
behind that `~TEXT` for passes that concern a request whose id contains TEXT, and when: `@5,12` at these
passes, `@5+` from the fifth on, `@*3` at every third, `%0.1` at each with that probability, else at each.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count

from pagoda.errors import ConfigError

FAULTS_ENV = "PAGODA_FAULTS"
TESTING_ENV = "PAGODA_TESTING"

_CODE = frozenset({"kill", "crash", "stop", "slow", "hang", "raise", "oom"})
"""Actions at a place in code."""
_MESSAGE = _CODE | {"drop", "double", "reorder", "corrupt"}
_DISK = _CODE | {"enospc", "eio", "erofs", "corrupt"}
POINTS: Mapping[str, frozenset[str]] = {
    "frontend.send": _MESSAGE,
    "frontend.receive": _MESSAGE,
    "frontend.tokenize": _CODE,
    "router.send": _MESSAGE,
    "router.receive": _MESSAGE,
    "host.send": _MESSAGE,
    "host.receive": _MESSAGE,
    "engine.turn": _CODE,
    "engine.clock": frozenset({"jump"}),
    "engine.plan": _MESSAGE,
    "engine.transfers": _MESSAGE,
    "engine.result": _MESSAGE,
    "engine.grammar": _CODE,
    "handoff.send": _MESSAGE - {"corrupt"},
    "worker.load": _CODE,
    "worker.step": _CODE,
    "worker.stepped": _CODE,
    "worker.result": _MESSAGE,
    "worker.logits": _CODE | {"nan", "inf"},
    "worker.copy": _CODE,
    "disk.read": _DISK,
    "disk.write": _DISK,
    "transfer.read": _CODE,
}
"""Points and the actions that each can take."""
_POINTS_OF_REQUESTS = ("worker.step", "worker.logits")
"""Points whose passes concern requests."""
_DEFAULT_VALUES = {"slow": 1.0, "jump": 3600.0}
"""Seconds, where an entry says none."""
_ENTRY = re.compile(
    r"(?P<process>[a-z]+)(\[(?P<instance>[0-9]+)\])?\.(?P<place>[a-z]+)"
    r":(?P<action>[a-z]+)(=(?P<value>[0-9.]+))?(~(?P<text>[^@%\s]+))?"
    r"(@(?P<passes>[0-9]+(,[0-9]+)*)|@(?P<since>[0-9]+)\+|@\*(?P<every>[0-9]+)|%(?P<rate>[0-9.]+))?"
)


@dataclass(frozen=True)
class FaultEntry:
    """One kind of fault at one point."""

    source: str
    point: str
    action: str
    value: float
    instance: int | None = None
    """The process that it comes to, counted from 1 by its parent; None for each."""
    text: str = ""
    passes: frozenset[int] = frozenset()
    since: int = 0
    every: int = 0
    rate: float | None = None

    def times(self, seed: str) -> Iterator[bool]:
        """True for each pass at which the fault comes, in turn; `seed` decides where there is a rate."""
        draws = random.Random(f"{seed} {self.source}")
        for number in count(1):
            if self.rate is not None:
                yield draws.random() < self.rate
            elif self.passes:
                yield number in self.passes
            elif self.since:
                yield number >= self.since
            else:
                yield not self.every or number % self.every == 0

    def concerns(self, subjects: Iterable[str]) -> bool:
        return not self.text or any(self.text in subject for subject in subjects)


@dataclass(frozen=True)
class FaultSchedule:
    seed: int
    entries: tuple[FaultEntry, ...]


def parse_schedule(line: str) -> FaultSchedule:
    """Raises ConfigError: an entry cannot be read, or names a point or an action that does not exist."""
    seed, entries = 0, []
    for word in line.split():
        name, _, value = word.partition("=")
        if name == "seed":
            if not value.isdecimal() or not value.isascii():
                raise ConfigError(f"{FAULTS_ENV}: seed must be a whole number, got {value!r}.")
            seed = int(value)
        else:
            entries.append(_parse_entry(word))
    if not entries:
        raise ConfigError(f"{FAULTS_ENV} must name a fault, such as worker.step:kill@5.")
    return FaultSchedule(seed, tuple(entries))


def _parse_entry(word: str) -> FaultEntry:
    found = _ENTRY.fullmatch(word)
    if found is None:
        raise ConfigError(
            f"{FAULTS_ENV}: {word!r} must be POINT:ACTION with @PASSES or %RATE, such as worker.step:kill@5,12."
        )
    point, action = f"{found['process']}.{found['place']}", found["action"]
    if point not in POINTS:
        raise ConfigError(f"{FAULTS_ENV}: {point!r} must be one of {', '.join(POINTS)}.")
    if action not in POINTS[point]:
        raise ConfigError(
            f"{FAULTS_ENV}: the action at {point} must be one of {', '.join(sorted(POINTS[point]))}, "
            f"got {action!r}."
        )
    if found["text"] and point not in _POINTS_OF_REQUESTS:
        raise ConfigError(
            f"{FAULTS_ENV}: ~{found['text']} must be at {' or '.join(_POINTS_OF_REQUESTS)}, where passes concern "
            f"requests, not at {point}."
        )
    try:
        value = float(found["value"] or _DEFAULT_VALUES.get(action, 0.0))
        rate = None if found["rate"] is None else float(found["rate"])
    except ValueError:
        raise ConfigError(f"{FAULTS_ENV}: {word!r} has a number that cannot be read.") from None
    if rate is not None and not 0 <= rate <= 1:
        raise ConfigError(f"{FAULTS_ENV}: the rate of {word!r} must be from 0 to 1.")
    numbers = [int(number) for number in (found["passes"] or "").split(",") if number]
    counts = [
        *numbers,
        *(int(found[name]) for name in ("instance", "since", "every") if found[name]),
    ]
    if 0 in counts:
        raise ConfigError(f"{FAULTS_ENV}: {word!r} must count from 1.")
    return FaultEntry(
        word,
        point,
        action,
        value,
        None if found["instance"] is None else int(found["instance"]),
        found["text"] or "",
        frozenset(numbers),
        int(found["since"] or 0),
        int(found["every"] or 0),
        rate,
    )


def schedule_of(environ: Mapping[str, str]) -> str:
    """The schedule that the environment asks for; empty without one.

    Raises ConfigError: testing is not enabled, or the schedule is wrong.
    """
    line = environ.get(FAULTS_ENV, "")
    if line:
        if environ.get(TESTING_ENV) != "1":
            raise ConfigError(
                f"{FAULTS_ENV} breaks a server on purpose and is for tests only; set {TESTING_ENV}=1 to allow it."
            )
        parse_schedule(line)
    return line
