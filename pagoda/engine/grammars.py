"""Grammars of answers: compiled beside the engine's loop, kept for requests to come, and followed token by token.

llguidance compiles a grammar and says which tokens may come next (https://github.com/guidance-ai/llguidance).
A request's place in its grammar follows from its output tokens alone, so it is found again by consuming them.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
import subprocess
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec

from pagoda.engine.grammar_threads import GrammarThreads
from pagoda.errors import PagodaError
from pagoda.ipc.clock import Clock, MonotonicClock
from pagoda.messages.frontend import GenerateRequest, Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_CACHED_GRAMMARS = 64
MAX_CACHED_BYTES = 4 << 20
"""Bytes of the texts of all grammars that are kept. What is made of a text takes some hundred times as much."""
MAX_FORCED_TOKENS = 256
"""Forced tokens that are appended at once; the rest of a longer text follows in the next turns of the loop."""
TOKEN_LIMIT_S = 0.01
"""Processor time on the engine's loop that one token of an answer may take."""
_SUSPECT_S = TOKEN_LIMIT_S / 20
"""Seconds of a token from which on a grammar is watched: the clock of processor time is a system call, which takes
longer than most tokens."""
MAX_LEXER_STATES = 50_000
"""States of the lexer of one grammar, which all of its answers share; up to a kilobyte each."""
RENEWAL_LIMIT_S = 0.01
"""Processor time of compiling up to which a grammar is compiled again on the engine's loop."""
MAX_REPLAYED_TOKENS = 8192
"""Tokens of an answer that are followed again on the engine's loop, at some microseconds each."""
_COST_DECAY = 0.9
_MAX_ERROR_CHARS = 300
_MAX_LATE_DIGESTS = 256
COMPILE_LIMIT_S = 1.0
"""Seconds that others wait for one grammar."""
RETURN_LIMIT_S = 10.0
"""Seconds that others wait for the grammar of an answer that has begun, before an engine died."""
LATE_FOR_S = 60.0
"""Seconds for which a grammar that took too long is refused at once."""
BUSY = ""
"""The problem of no grammar: too many others are still being compiled, so the request may come again."""
_PLACE = re.compile(r"^(?:at )?(?P<line>\d+)\((?P<column>\d+)\): ")
_UNKNOWN_KEYWORDS = re.compile(r"Unimplemented keys: \[(?P<names>.*)\]")
_OUTSIDE = "doesn't satisfy the grammar"
_OUT_OF_STATES = "too many states"
_TOO_LARGE = re.compile(r"too big|too large|too many items|too complex", re.IGNORECASE)


_NAMES = {
    "json_schema": "the JSON schema",
    "regex": "the regular expression",
    "lark": "the grammar",
}
_log = logging.getLogger(__name__)


T = TypeVar("T")


class TokenTexts(msgspec.Struct, frozen=True):
    """Texts of a model's tokens."""

    tokenizer: str
    """Contents of a tokenizer.json."""
    eos_token_ids: tuple[int, ...]


class TokenTextsOrder(msgspec.Struct, frozen=True):
    """The model whose `TokenTexts` are wanted, named as in `WorkerConfig`."""

    model: str
    load_format: str
    simulated: bool


def load_token_texts(order: TokenTextsOrder) -> TokenTexts:
    """Reads a model's tokenizer in a process of its own: engines handle no text, and stay small.
    Raises PagodaError: there is no tokenizer that can be read."""
    command = [sys.executable, "-m", "pagoda.frontend.token_texts"]
    encoded = msgspec.msgpack.encode(order)
    done = subprocess.run(command, input=encoded, capture_output=True, check=False)
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise PagodaError((lines or ["the process that reads it ended without a word."])[-1])
    return msgspec.msgpack.decode(done.stdout, type=TokenTexts)


class Constraint:
    """Place of one request in its grammar."""

    def __init__(
        self,
        matcher: LLMatcher,
        vocabulary: Vocabulary,
        *,
        cost_s: float = 0.0,
        processor_time: Callable[[], float] = time.thread_time,
        elapsed_time: Callable[[], float] = time.perf_counter,
        renew: Callable[[], LLMatcher] | None = None,
    ) -> None:
        """`renew` compiles the grammar again: places share a table of lexer states, which fills up as answers
        pass through long texts, and would then fail every answer.

        `processor_time` counts the seconds that this thread has worked: a machine with other work to do must not
        make a grammar look dear. It is asked behind a token that took long by `elapsed_time`."""
        self.cost_s = cost_s
        """Processor time of a token, in seconds: the most of late, which fades from token to token. Zero as long
        as no token took long."""
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._processor_time = processor_time
        self._elapsed_time = elapsed_time
        self._renew = renew
        self._origin = self
        """The place in front of the first token, whose table of lexer states this place shares."""
        self._age = 0
        """Number of tables that were full before the one of this place."""
        self._token_ids: list[int] = []
        self._watch(cost_s > _SUSPECT_S)
        self._spent_s = 0.0
        """Time since the last token was consumed, by the clock in use."""
        self._forced: deque[int] | None = None
        """Tokens that are certain to come; None if that is not known."""

    def copy(self) -> Constraint:
        age = self._age  # first: the origin's grows behind its matcher
        place = Constraint(
            self._matcher.deep_copy(),
            self._vocabulary,
            cost_s=self.cost_s,
            processor_time=self._processor_time,
            elapsed_time=self._elapsed_time,
        )
        place._origin, place._age = self._origin, age
        place._token_ids = list(self._token_ids)
        return place

    def _has_found_room(self) -> bool:
        """True if the place ran out of lexer states, and is where it was with another table of them: that of later
        answers, or a new one if it has that already."""
        if not (self._matcher.is_error() and _OUT_OF_STATES in self._matcher.get_error()):
            return False
        origin = self._origin
        if origin._renew is None or len(self._token_ids) > MAX_REPLAYED_TOKENS:
            return False
        if origin._age == self._age:
            origin._matcher = origin._renew()
            origin._age += 1
        self._matcher, self._age = origin._matcher.deep_copy(), origin._age
        return self._matcher.consume_tokens(self._token_ids)

    def _timed(self, work: Callable[[], T]) -> T:
        """The result of work for the token to come, which counts as its time."""
        began = self._time()
        result = work()
        self._spent_s += self._time() - began
        return result

    def _in_room(self, work: Callable[[], T]) -> T:
        """The result of work. Where lexer states run out it is done again, with the table of later answers, then
        with a new one; the way there does not count as time of the token."""
        result = self._timed(work)
        for _ in range(2):
            if not self._has_found_room():
                break
            result = self._timed(work)
        return result

    def try_out(self) -> bool:
        """Measures what every answer begins with. False if that is too much work for the engine's loop."""
        first, beginning = self.copy(), self.copy()
        first._watch(True)
        beginning._watch(True)
        if first.mask() is None:
            return False
        self.cost_s = first._spent_s
        while forced := beginning.forced_tokens():
            for token_id in forced:
                if token_id in self.eos_token_ids or not beginning.consume(token_id):
                    return not beginning.is_exhausted
        return True

    def _watch(self, is_watched: bool) -> None:
        self._is_watched = is_watched
        self._time = self._processor_time if is_watched else self._elapsed_time

    @property
    def _is_over_limit(self) -> bool:
        return self._is_watched and self._spent_s > TOKEN_LIMIT_S

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer, whatever the request says of them."""
        return self._vocabulary.eos_token_ids

    @property
    def is_exhausted(self) -> bool:
        """True if the grammar took too much work, and the place is lost."""
        return self._is_over_limit or (
            self._matcher.is_error() and _OUTSIDE not in self._matcher.get_error()
        )

    def consume(self, token_id: int) -> bool:
        """Goes on behind a token that does not end the answer; False if the grammar does not allow it here, or
        took too much work."""
        if self.is_exhausted:
            return False
        self.cost_s = max(self._spent_s if self._is_watched else 0.0, self.cost_s * _COST_DECAY)
        self._watch(max(self._spent_s, self.cost_s) > _SUSPECT_S)
        self._spent_s = 0.0
        is_allowed = self._timed(lambda: self._matcher.consume_token(token_id))
        self._token_ids.append(token_id)
        is_allowed = is_allowed or self._has_found_room() or self._has_found_room()
        forced, self._forced = self._forced, None
        if forced and forced.popleft() == token_id and forced:
            self._forced = forced
        return is_allowed and not self._is_over_limit

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
        if self._is_over_limit or self._matcher.is_error():
            return None
        mask = self._vocabulary.fitted(bits)
        if not held_back:
            return mask
        rest = bytearray(mask)
        for token_id in held_back:
            rest[token_id >> 3] &= 0xFF ^ (1 << (token_id & 7))
        return mask if rest.count(0) == len(rest) else bytes(rest)


class Vocabulary:
    """The model's tokens, as grammars see them."""

    def __init__(self, texts: TokenTexts, vocab_size: int) -> None:
        """Raises PagodaError: the model has no end-of-sequence token; ValueError: its tokenizer is not one that
        grammars work with."""
        from llguidance import LLTokenizer

        ends = tuple(i for i in texts.eos_token_ids if i < vocab_size)
        if not ends:
            raise PagodaError("the model has no end-of-sequence token, which must follow an answer")
        self.tokenizer: LLTokenizer = LLTokenizer(texts.tokenizer, eos_token=list(ends))
        self.eos_token_ids = frozenset(ends)
        self.end_token_id = ends[0]
        self._num_bytes = -(-vocab_size // 32) * 4
        self._is_cut = self.tokenizer.vocab_size > vocab_size
        self._kept = (1 << vocab_size) - 1

    def fitted(self, bits: bytes) -> bytes:
        """The mask for the model's vocabulary, which may be larger or smaller than the tokenizer's."""
        if self._is_cut:
            bits = (int.from_bytes(bits, "little") & self._kept).to_bytes(len(bits), "little")
        return bits[: self._num_bytes].ljust(self._num_bytes, b"\0")


@dataclass
class _Entry:
    """A grammar that is compiled, cannot be, or is on its way."""

    size: int
    compiled: Constraint | None = None
    """The place in front of the first token."""
    error: str = ""

    @property
    def is_done(self) -> bool:
        return self.compiled is not None or bool(self.error)

    def place(self, request: GenerateRequest) -> Constraint | str:
        """The place behind the output tokens of a request, or what is wrong."""
        if self.compiled is None:
            return self.error
        place = self.compiled.copy()
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
    entry: _Entry
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
        compile_grammar: GrammarCompiler | None = None,
    ) -> None:
        """`load_texts` is called for the first grammar. `run` runs work beside the loop: by default in a thread,
        which is started for the first grammar, and replaced if a grammar takes too long. `compile_grammar` gives
        the place in front of the first token, or what is wrong; by default llguidance does."""
        self._load_texts = load_texts
        self._vocab_size = vocab_size
        self._vocabulary: Vocabulary | None = None
        self._clock = clock or MonotonicClock()
        self._compile = compile_grammar or _compile
        self._threads: GrammarThreads[_Job] | None = None
        self._run = run or self._run_in_thread
        self._entries: OrderedDict[Grammar, _Entry] = OrderedDict()
        """The least recently used one first."""
        self._late: OrderedDict[bytes, float] = OrderedDict()
        """Digests of grammars that took too long, and the time until which they are refused."""
        self._done: deque[tuple[GenerateRequest, Constraint | str]] = deque()
        """Requests whose grammars are compiled, with their places or what is wrong; filled by the thread."""
        self._held: dict[str, GenerateRequest] = {}

    @property
    def num_held(self) -> int:
        """Requests that wait for their grammars."""
        return len(self._held)

    def take(self, request: GenerateRequest, grammar: Grammar) -> Constraint | str | None:
        """The request's place in its grammar, or what is wrong with the grammar, in one sentence, or `BUSY`.
        None if that takes longer: `drain` tells later. No answer that has begun is refused for want of room."""
        entry = self._entries.get(grammar)
        if not request.output_token_ids:
            if entry is None and self._is_late(grammar):
                return _took_too_long(grammar)
            if (entry is None or not entry.is_done) and self._is_busy():
                return BUSY
        if entry is None:
            entry = self._entries[grammar] = _Entry(len(grammar.text))
            self._evict()
        self._entries.move_to_end(grammar)
        if entry.is_done and not request.output_token_ids:
            return entry.place(request)
        self._held[request.request_id] = request
        job = _Job(grammar, entry, request)
        self._run(lambda: self._find_place(job))
        return None

    def drain(self) -> list[tuple[GenerateRequest, Constraint | str]]:
        """Requests whose grammars are compiled, are wrong or take too long, but for those that were dropped."""
        if self._threads is not None:
            gave_up = self._threads.give_up(self._refuse_late)
            if not self._threads.heard() and not gave_up:
                return []
        done = []
        while self._done:
            request, outcome = self._done.popleft()
            if self._held.get(request.request_id) is request:
                del self._held[request.request_id]
                done.append((request, outcome))
        return done

    def next_event_at(self) -> float | None:
        """Time by which `drain` must be called; None if nothing is being compiled."""
        return None if self._threads is None else self._threads.deadline

    def drop(self, request_id: str) -> bool:
        """Forgets a request that waits; False if it does not."""
        return self._held.pop(request_id, None) is not None

    def pollables(self) -> list[object]:
        return [] if self._threads is None else [self._threads.readable]

    def close(self) -> None:
        if self._threads is not None:
            self._threads.close()
            self._threads = None

    def _is_busy(self) -> bool:
        return self._threads is not None and self._threads.is_full

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

    def _run_in_thread(self, work: Callable[[], None]) -> None:
        if self._threads is None:
            self._threads = GrammarThreads(self._clock)
        self._threads.put(work)

    def _find_place(self, job: _Job) -> None:
        entry = job.entry
        if not entry.is_done:
            if not job.request.output_token_ids and self._is_busy():
                self._done.append((job.request, BUSY))
                return
            outcome = self._compiled(job)
            if isinstance(outcome, str):
                entry.error = entry.error or outcome
            else:
                entry.compiled = outcome
        self._done.append((job.request, entry.place(job.request)))

    def _compiled(self, job: _Job) -> Constraint | str:
        """The place in front of the first token, or what is wrong with the grammar."""
        try:
            if self._vocabulary is None:
                self._vocabulary = Vocabulary(self._load_texts(), self._vocab_size)
        except (PagodaError, ValueError) as error:
            reason = str(error).removesuffix(".")
            return f"answers of this model cannot be constrained: {reason}."
        threads = self._threads
        # The grammar of an answer that has begun was compiled in time, where it began.
        limit_s = RETURN_LIMIT_S if job.request.output_token_ids else COMPILE_LIMIT_S
        with contextlib.nullcontext() if threads is None else threads.timed(job, limit_s):
            try:
                return self._compile(job.grammar, self._vocabulary)
            except (
                BaseException
            ):  # a panic of the library, which is no Exception, must not end the thread
                _log.exception("a grammar cannot be compiled")
                return f"{_NAMES[job.grammar.kind]} cannot be compiled; the server's log says why."


GrammarCompiler = Callable[[Grammar, Vocabulary], Constraint | str]


def _digest(grammar: Grammar) -> bytes:
    return hashlib.sha256(f"{grammar.kind}:{grammar.text}".encode()).digest()


def _took_too_long(grammar: Grammar) -> str:
    return f"{_NAMES[grammar.kind]} takes too long to compile: more than {COMPILE_LIMIT_S:g} s."


def _compile(grammar: Grammar, vocabulary: Vocabulary) -> Constraint | str:
    """The place in front of the first token, or what is wrong with the grammar."""
    from llguidance import LLMatcher, LLParserLimits

    try:
        match grammar.kind:
            case "json_schema":
                source = LLMatcher.grammar_from_json_schema(grammar.text)
            case "regex":
                source = LLMatcher.grammar_from_regex(grammar.text)
            case "lark":
                source = LLMatcher.grammar_from_lark(grammar.text)
    except ValueError as error:
        return _sentence(grammar, str(error))
    # Some ten milliseconds to begin, and a few at most for each token. Where all letters of Unicode are tokens,
    # `\w` alone takes most of a token's fuel.
    limits = LLParserLimits(
        initial_lexer_fuel=400_000,
        step_lexer_fuel=60_000,
        step_max_items=20_000,
        max_lexer_states=MAX_LEXER_STATES,
        max_grammar_size=200_000,
        verbose_errors=False,
    )

    def renew() -> LLMatcher:
        return LLMatcher(vocabulary.tokenizer, source, log_level=0, limits=limits)

    began = time.thread_time()
    matcher = renew()
    is_quick = time.thread_time() - began <= RENEWAL_LIMIT_S
    if matcher.is_error() or not matcher.compute_bitmask() or matcher.is_error():
        return _sentence(grammar, matcher.get_error())
    place = Constraint(matcher, vocabulary, renew=renew if is_quick else None)
    if not place.try_out():
        return (
            f"{_NAMES[grammar.kind]} is too large or too complex to be followed within the limits."
        )
    return place


def _sentence(grammar: Grammar, error: str) -> str:
    """The error of llguidance as one sentence, with line and column of a grammar in Lark's syntax."""
    name = _NAMES[grammar.kind]
    unknown = _UNKNOWN_KEYWORDS.search(error)
    if unknown is not None:
        names = unknown["names"].replace('"', "")
        return f"the JSON schema has keywords that are not supported: {names}."
    if _TOO_LARGE.search(error):
        return f"{name} is too large or too complex to be compiled within the limits."
    if "NoExtension" in error:
        return f"{name} allows no answer."
    place = _PLACE.match(error)
    if place is not None:
        error = error[place.end() :]
        if grammar.kind == "lark":
            name = f"{name} is wrong at line {place['line']}, column {place['column']}"
    lines = error.replace("<non-verbose/>", "").strip().splitlines()
    reason = lines[0].strip() if lines else "it cannot be compiled"
    for line in lines[1:]:  # the parser of regular expressions draws a picture first
        if line.startswith("error: "):
            reason = line.removeprefix("error: ")
    if len(reason) > _MAX_ERROR_CHARS:
        reason = f"{reason[:_MAX_ERROR_CHARS]}…"
    return f"{name}: {reason.removesuffix('.')}."
