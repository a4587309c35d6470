# SPDX-License-Identifier: Apache-2.0
"""Counts what each turn of an event loop does: operations of Python, and characters that C functions are given."""

from __future__ import annotations

import selectors
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import pytest

from pagoda.api.bodies import body as body_module
from pagoda.api.http import request_body
from pagoda.text.tokenizers.tokenizer import Tokenizer

SHORT = 256
NOT_SERVED = ("/tests/", "/plugins/sim/")
"""Files that stand for an engine."""


@dataclass
class LoopWork:
    """The work of one thread, which an event loop runs in."""

    thread: int = field(default_factory=threading.get_ident)
    longest: int = 0
    """Operations of the turn with the most: lines of Python, calls, and calls of C functions. All callbacks that
    are ready run in one turn, and the sockets are looked at behind it."""
    longest_in: list[tuple[str, int]] = field(default_factory=list)
    """The functions with the most operations of that turn."""
    num_chars: Counter[str] = field(default_factory=Counter)
    """Characters, bytes or tokens by the function that got them in this thread; short work is not counted."""
    places: Counter[str] = field(default_factory=Counter)

    def end_turn(self) -> None:
        places, self.places = self.places, Counter()  # this function counts itself, too
        count = places.total()
        if count > self.longest:
            self.longest = count
            self.longest_in = places.most_common(3)


@contextmanager
def watched_loop(patch: pytest.MonkeyPatch) -> Iterator[LoopWork]:
    """Counts what callbacks of the running loop do until the context ends. Other threads are not counted."""
    work = LoopWork()
    select = selectors.DefaultSelector.select

    def ending_turn(selector: selectors.DefaultSelector, timeout: float | None = None) -> Any:
        work.end_turn()
        return select(selector, timeout)

    def trace(frame: FrameType, event: str, _argument: Any) -> Any:
        if event == "call" and any(name in frame.f_code.co_filename for name in NOT_SERVED):
            return None
        if event in ("call", "line"):
            work.places[frame.f_code.co_qualname] += 1
        return trace

    def profile(frame: FrameType, event: str, _argument: Any) -> None:
        if event == "c_call":
            work.places[frame.f_code.co_qualname] += 1

    patch.setattr(selectors.DefaultSelector, "select", ending_turn)
    for owner, name in (
        (Tokenizer, "encode"),
        (Tokenizer, "encode_pair"),
        (Tokenizer, "decode"),
        (body_module, "parse_body"),
        (request_body.Inflater, "feed"),
    ):
        patch.setattr(owner, name, _measured(getattr(owner, name), name, work))
    before_trace, before_profile = sys.gettrace(), sys.getprofile()
    sys.setprofile(profile)
    sys.settrace(trace)
    try:
        yield work
    finally:
        sys.settrace(before_trace)
        sys.setprofile(before_profile)


def _measured(function: Callable[..., Any], name: str, work: LoopWork) -> Callable[..., Any]:
    def measured(*args: Any, **options: Any) -> Any:
        if threading.get_ident() == work.thread:
            size = sum(len(arg) for arg in args if isinstance(arg, str | bytes | list))
            if size > SHORT:
                work.num_chars[name] += size
        return function(*args, **options)

    return measured
