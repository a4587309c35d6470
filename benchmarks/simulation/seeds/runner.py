# SPDX-License-Identifier: Apache-2.0
"""Lives of many seeds, in as many processes as there are cores."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from benchmarks.simulation.seeds.draw import draw
from benchmarks.simulation.seeds.life import Verdict, live

_PIECE = 100
"""Seeds that a process lives before it tells of them."""
_NICENESS = 10


@dataclass
class Summary:
    """The outcome of many lives."""

    num_lives: int = 0
    met: Counter[str] = field(default_factory=Counter)
    broken: list[Verdict] = field(default_factory=list)
    elapsed_s: float = 0.0

    def add(self, verdict: Verdict) -> None:
        self.num_lives += 1
        self.met += verdict.met
        if verdict.problem:
            self.broken.append(verdict)


def live_all(
    first: int,
    count: int,
    num_processes: int = 1,
    on_broken: Callable[[Verdict], None] = lambda _: None,
) -> Summary:
    """Lives `count` seeds from `first` on; `on_broken` hears of each that broke something, as soon as that is
    known."""
    began, summary = time.monotonic(), Summary()
    pieces = [
        (start, min(_PIECE, first + count - start)) for start in range(first, first + count, _PIECE)
    ]
    if num_processes == 1:
        lots = map(_live_piece, pieces)
        _collect(lots, summary, on_broken)
    else:
        # A process that is forked here would have this one's threads' locks, and no threads.
        context = multiprocessing.get_context("spawn")
        with context.Pool(num_processes, initializer=_be_nice) as pool:
            _collect(pool.imap(_live_piece, pieces), summary, on_broken)
    summary.elapsed_s = time.monotonic() - began
    return summary


def _collect(
    lots: Iterable[list[Verdict]], summary: Summary, on_broken: Callable[[Verdict], None]
) -> None:
    for verdicts in lots:
        for verdict in verdicts:
            summary.add(verdict)
            if verdict.problem:
                on_broken(verdict)


def _be_nice() -> None:
    os.nice(_NICENESS)


def _live_piece(piece: tuple[int, int]) -> list[Verdict]:
    first, count = piece
    return [live(draw(seed)) for seed in range(first, first + count)]
