# SPDX-License-Identifier: Apache-2.0
"""Structured output: a thread compiles the grammars of answers, and the engine keeps them for later requests."""

from __future__ import annotations

import contextlib
import enum
import hashlib
import logging
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from pagoda.engine.structured_output.constraint import CompiledGrammar, Constraint
from pagoda.engine.structured_output.grammar_compiler import NAMES, compile_grammar
from pagoda.engine.structured_output.grammar_threads import GrammarThreads
from pagoda.engine.structured_output.vocabulary import TokenTexts, Vocabulary
from pagoda.errors import PagodaError
from pagoda.ipc.clock import Clock, MonotonicClock
from pagoda.messages.frontend import GenerateRequest, Grammar
from pagoda.telemetry.logging import withheld

GrammarCompiler = Callable[[Grammar, Vocabulary], CompiledGrammar | str]

MAX_CACHED_GRAMMARS = 64
MAX_CACHED_BYTES = 4 << 20
"""Bytes of the texts of all grammars that are kept. What is made of a text takes some hundred times as much."""
COMPILE_LIMIT_S = 1.0
"""Seconds that others wait for one grammar."""
RETURN_LIMIT_S = 10.0
"""Seconds that others wait for the grammar of an answer that has begun, before an engine died."""
LATE_FOR_S = 60.0
"""Seconds for which a grammar that took too long is refused at once."""
_MAX_LATE_DIGESTS = 256
_log = logging.getLogger(__name__)


class Busy(enum.Enum):
    """Too many other grammars of the tenant are still being compiled: the request may come again."""

    BUSY = enum.auto()


BUSY = Busy.BUSY
GrammarOutcome = Constraint | str | Busy
"""A request's place in its grammar, what is wrong with the grammar in one sentence, or `BUSY`."""


@dataclass
class _KeptGrammar:
    """A grammar that is compiled, cannot be, or is on its way."""

    size: int
    compiled: CompiledGrammar | None = None
    error: str = ""

    @property
    def is_done(self) -> bool:
        return self.compiled is not None or bool(self.error)

    def place(self, request: GenerateRequest) -> Constraint | str:
        """The place behind the output tokens of a request, or what is wrong."""
        if self.compiled is None:
            return self.error
        place = self.compiled.begin()
        for token_id in request.output_token_ids:
            if token_id in place.eos_token_ids:
                break  # the answer is complete
            if not place.consume(token_id):
                if place.is_exhausted:
                    return "the answer so far takes too much work to follow in its grammar."
                return "the answer so far is not in the language of its grammar."
        return place


class _Job(NamedTuple):
    """The place of a request to be found in its grammar, which is compiled first."""

    grammar: Grammar
    entry: _KeptGrammar
    request: GenerateRequest


class Grammars:
    """Compiles the grammars of requests; belongs to the engine's loop."""

    def __init__(
        self,
        load_texts: Callable[[], TokenTexts],
        vocab_size: int,
        run: Callable[[Callable[[], None]], None] | None = None,
        *,
        clock: Clock | None = None,
        compile_with: GrammarCompiler | None = None,
    ) -> None:
        """`load_texts` is called for the first grammar. `run` runs work beside the loop: by default in a thread,
        which takes the work of tenants in turn, is started for the first grammar, and replaced if one takes too
        long. `compile_with` returns what is wrong where a grammar cannot be compiled; by default llguidance
        compiles."""
        self._load_texts = load_texts
        self._vocab_size = vocab_size
        self._vocabulary: Vocabulary | None = None
        self._clock = clock or MonotonicClock()
        self._compile = compile_with or compile_grammar
        self._threads: GrammarThreads[_Job] | None = None
        self._run = run
        self._entries: OrderedDict[Grammar, _KeptGrammar] = OrderedDict()
        """The least recently used one first."""
        self._late: OrderedDict[bytes, float] = OrderedDict()
        """Digests of grammars that took too long, and the time until which they are refused."""
        self._done: deque[tuple[GenerateRequest, GrammarOutcome]] = deque()
        """Requests whose grammars are compiled, with their places or what is wrong; filled by the thread."""
        self._compiling: dict[str, GenerateRequest] = {}

    @property
    def num_compiling(self) -> int:
        """Requests that wait for their grammars."""
        return len(self._compiling)

    def take(self, request: GenerateRequest, grammar: Grammar) -> GrammarOutcome | None:
        """The outcome; None if that takes longer: `drain` tells later. No answer that has begun is refused for
        want of room."""
        entry = self._entries.get(grammar)
        if not request.output_token_ids:
            if entry is None and self._is_late(grammar):
                return _took_too_long(grammar)
            if (entry is None or not entry.is_done) and self._is_busy(request.tenant):
                return BUSY
        if entry is None:
            entry = self._entries[grammar] = _KeptGrammar(len(grammar.text))
            self._evict()
        self._entries.move_to_end(grammar)
        if entry.is_done and not request.output_token_ids:
            return entry.place(request)
        self._compiling[request.request_id] = request
        job = _Job(grammar, entry, request)
        work = partial(self._find_place, job)
        if self._run is not None:
            self._run(work)
        else:
            self._run_in_thread(request.tenant, work)
        return None

    def drain(self) -> list[tuple[GenerateRequest, GrammarOutcome]]:
        """Requests whose grammars are compiled, are wrong or take too long, but for those that were dropped."""
        if self._threads is not None:
            gave_up = self._threads.give_up(self._refuse_late)
            if not self._threads.heard() and not gave_up:
                return []
        done = []
        while self._done:
            request, outcome = self._done.popleft()
            if self._compiling.get(request.request_id) is request:
                del self._compiling[request.request_id]
                done.append((request, outcome))
        return done

    def next_event_at(self) -> float | None:
        """Time by which `drain` must be called; None if nothing is being compiled."""
        return None if self._threads is None else self._threads.deadline

    def drop(self, request_id: str) -> bool:
        """Forgets a request that waits; False if it does not."""
        return self._compiling.pop(request_id, None) is not None

    def pollables(self) -> list[object]:
        return [] if self._threads is None else [self._threads.readable]

    def close(self) -> None:
        if self._threads is not None:
            self._threads.close()
            self._threads = None

    def _is_busy(self, tenant: str) -> bool:
        return self._threads is not None and self._threads.is_full(tenant)

    def _is_late(self, grammar: Grammar) -> bool:
        return bool(self._late) and self._late.get(_digest(grammar), 0.0) > self._clock.now()

    def _refuse_late(self, job: _Job) -> None:
        """Refuses a grammar that takes too long, for this request and those to come."""
        job.entry.error = _took_too_long(job.grammar)
        if self._entries.get(job.grammar) is job.entry:
            del self._entries[job.grammar]
        self._late[_digest(job.grammar)] = self._clock.now() + LATE_FOR_S
        if len(self._late) > _MAX_LATE_DIGESTS:
            self._late.popitem(last=False)
        self._done.append((job.request, job.entry.error))

    def _evict(self) -> None:
        size = sum(entry.size for entry in self._entries.values())
        while len(self._entries) > MAX_CACHED_GRAMMARS or (
            size > MAX_CACHED_BYTES and len(self._entries) > 1
        ):
            _, entry = self._entries.popitem(last=False)
            size -= entry.size

    # ---- in the thread

    def _run_in_thread(self, tenant: str, work: Callable[[], None]) -> None:
        if self._threads is None:
            self._threads = GrammarThreads(self._clock)
        self._threads.put(tenant, work)

    def _find_place(self, job: _Job) -> None:
        entry = job.entry
        if not entry.is_done:
            if not job.request.output_token_ids and self._is_busy(job.request.tenant):
                self._done.append((job.request, BUSY))
                return
            outcome = self._compiled(job)
            if isinstance(outcome, str):
                entry.error = entry.error or outcome
            else:
                entry.compiled = outcome
        try:
            place = entry.place(job.request)
        except BaseException as error:  # see `_compiled`
            _log.error("an answer cannot be followed in its grammar", exc_info=withheld(error))
            place = f"{NAMES[job.grammar.kind]} cannot be followed; the server's log says why."
        self._done.append((job.request, place))

    def _compiled(self, job: _Job) -> CompiledGrammar | str:
        """The grammar, or what is wrong with it."""
        try:
            if self._vocabulary is None:
                self._vocabulary = Vocabulary(self._load_texts(), self._vocab_size)
        except (PagodaError, ValueError) as error:
            reason = str(error).removesuffix(".")
            return f"answers of this model cannot be constrained: {reason}."
        threads = self._threads
        # The grammar of an answer that has begun was compiled in time, where it began.
        limit_s = RETURN_LIMIT_S if job.request.output_token_ids else COMPILE_LIMIT_S
        with (
            contextlib.nullcontext()
            if threads is None
            else threads.timed(job, job.request.tenant, limit_s)
        ):
            try:
                return self._compile(job.grammar, self._vocabulary)
            except BaseException as error:  # also a panic of the library, which is no Exception
                _log.error("a grammar cannot be compiled", exc_info=withheld(error))
                return f"{NAMES[job.grammar.kind]} cannot be compiled; the server's log says why."


def _digest(grammar: Grammar) -> bytes:
    return hashlib.sha256(f"{grammar.kind}:{grammar.text}".encode()).digest()


def _took_too_long(grammar: Grammar) -> str:
    return f"{NAMES[grammar.kind]} takes too long to compile: more than {COMPILE_LIMIT_S:g} s."
