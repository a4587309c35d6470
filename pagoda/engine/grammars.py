"""Grammars of answers: compiled beside the engine's loop, kept for requests to come, and followed token by token.

llguidance compiles a grammar and says which tokens may come next (https://github.com/guidance-ai/llguidance).
A request's place in its grammar follows from its output tokens alone, so it is found again by consuming them.
"""

from __future__ import annotations

import logging
import os
import queue
import re
import subprocess
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from pagoda.errors import PagodaError
from pagoda.messages.frontend import GenerateRequest, Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_CACHED_GRAMMARS = 64
MAX_CACHED_BYTES = 4 << 20
"""Bytes of the texts of all grammars that are kept. What is made of a text takes some hundred times as much."""
_MAX_INLINE_TOKENS = 64
"""Output tokens that are consumed on the engine's loop, some microseconds each; more are in the thread."""
_STACK_BYTES = 256 << 20
"""Address space of the compiling thread's stack: a chain of rules is followed by recursion."""
_MAX_ERROR_CHARS = 300
_PLACE = re.compile(r"^(?:at )?(?P<line>\d+)\((?P<column>\d+)\): ")
_UNKNOWN_KEYWORDS = re.compile(r"Unimplemented keys: \[(?P<names>.*)\]")
_OUTSIDE = "doesn't satisfy the grammar"
_TOO_LARGE = re.compile(r"too big|too large|too many items|too complex", re.IGNORECASE)


_NAMES = {
    "json_schema": "the JSON schema",
    "regex": "the regular expression",
    "lark": "the grammar",
}
_log = logging.getLogger(__name__)


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

    def __init__(self, matcher: LLMatcher, vocabulary: _Vocabulary) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary

    def copy(self) -> Constraint:
        return Constraint(self._matcher.deep_copy(), self._vocabulary)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer, whatever the request says of them."""
        return self._vocabulary.eos_token_ids

    @property
    def is_exhausted(self) -> bool:
        """True if the grammar took too much work, and the place is lost."""
        return self._matcher.is_error() and _OUTSIDE not in self._matcher.get_error()

    def consume(self, token_id: int) -> bool:
        """Goes on behind a token that does not end the answer; False if the grammar does not allow it here."""
        return self._matcher.consume_token(token_id)

    def forced_tokens(self) -> list[int]:
        """The tokens that must come next, as far as they are certain; a whole answer is followed by its end."""
        if self._matcher.is_stopped() and not self._matcher.is_error():
            return [self._vocabulary.end_token_id]
        return self._matcher.compute_ff_tokens()

    def mask(self, held_back: Sequence[int] = ()) -> bytes | None:
        """Bits of the tokens that may come next, as `SamplingRules.allowed`; None if that takes too much work.

        Tokens of `held_back` are left out, unless nothing else may come.
        """
        bits = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            return None
        mask = self._vocabulary.fitted(bits)
        if not held_back:
            return mask
        rest = bytearray(mask)
        for token_id in held_back:
            rest[token_id >> 3] &= 0xFF ^ (1 << (token_id & 7))
        return mask if rest.count(0) == len(rest) else bytes(rest)


class _Vocabulary:
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


class Grammars:
    """Compiles the grammars of requests; belongs to the engine's loop."""

    def __init__(
        self,
        load_texts: Callable[[], TokenTexts],
        vocab_size: int,
        run: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        """`load_texts` is called for the first grammar. `run` runs work beside the loop: by default in one thread,
        which is started for the first grammar."""
        self._load_texts = load_texts
        self._vocab_size = vocab_size
        self._vocabulary: _Vocabulary | None = None
        self._thread: _Thread | None = None
        self._run = run or self._run_in_thread
        self._entries: OrderedDict[Grammar, _Entry] = OrderedDict()
        """The least recently used one first."""
        self._done: deque[tuple[GenerateRequest, Constraint | str]] = deque()
        """Requests whose grammars are compiled, with their places or what is wrong; filled by the thread."""
        self._held: dict[str, GenerateRequest] = {}
        self._readable: int | None = None

    @property
    def num_held(self) -> int:
        """Requests that wait for their grammars."""
        return len(self._held)

    def take(self, request: GenerateRequest, grammar: Grammar) -> Constraint | str | None:
        """The request's place in its grammar, or what is wrong with the grammar, in one sentence.
        None if that takes longer: `drain` tells later."""
        entry = self._entries.get(grammar)
        if entry is None:
            entry = self._entries[grammar] = _Entry(len(grammar.text))
            self._evict()
        self._entries.move_to_end(grammar)
        if entry.is_done and len(request.output_token_ids) <= _MAX_INLINE_TOKENS:
            return entry.place(request)
        self._held[request.request_id] = request
        self._run(lambda: self._find_place(grammar, entry, request))
        return None

    def drain(self) -> list[tuple[GenerateRequest, Constraint | str]]:
        """Requests whose grammars are compiled, or wrong; those that were dropped are left out."""
        if self._readable is not None:
            try:
                os.eventfd_read(self._readable)
            except BlockingIOError:
                return []
        done = []
        while self._done:
            request, outcome = self._done.popleft()
            if self._held.get(request.request_id) is request:
                del self._held[request.request_id]
                done.append((request, outcome))
        return done

    def drop(self, request_id: str) -> bool:
        """Forgets a request that waits; False if it does not."""
        return self._held.pop(request_id, None) is not None

    def pollables(self) -> list[object]:
        return [] if self._readable is None else [self._readable]

    def close(self) -> None:
        if self._thread is not None:
            self._thread.close()
        if self._readable is not None:
            os.close(self._readable)
            self._readable = None

    def _evict(self) -> None:
        size = sum(entry.size for entry in self._entries.values())
        while len(self._entries) > MAX_CACHED_GRAMMARS or (
            size > MAX_CACHED_BYTES and len(self._entries) > 1
        ):
            _, entry = self._entries.popitem(last=False)
            size -= entry.size

    # ---- in the thread

    def _run_in_thread(self, work: Callable[[], None]) -> None:
        if self._thread is None:
            self._readable = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._thread = _Thread(self._readable)
        self._thread.put(work)

    def _find_place(self, grammar: Grammar, entry: _Entry, request: GenerateRequest) -> None:
        if not entry.is_done:
            outcome = self._compiled(grammar)
            if isinstance(outcome, str):
                entry.error = outcome
            else:
                entry.compiled = outcome
        self._done.append((request, entry.place(request)))

    def _compiled(self, grammar: Grammar) -> Constraint | str:
        """The place in front of the first token, or what is wrong with the grammar."""
        try:
            if self._vocabulary is None:
                self._vocabulary = _Vocabulary(self._load_texts(), self._vocab_size)
        except (PagodaError, ValueError) as error:
            reason = str(error).removesuffix(".")
            return f"answers of this model cannot be constrained: {reason}."
        try:
            return _compile(grammar, self._vocabulary)
        except (
            BaseException
        ):  # a panic of the library, which is no Exception, must not end the thread
            _log.exception("a grammar cannot be compiled")
            return f"{_NAMES[grammar.kind]} cannot be compiled; the server's log says why."


def _compile(grammar: Grammar, vocabulary: _Vocabulary) -> Constraint | str:
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
    # Some ten milliseconds to begin, and less for each token.
    limits = LLParserLimits(
        initial_lexer_fuel=400_000,
        step_lexer_fuel=100_000,
        step_max_items=20_000,
        max_lexer_states=10_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )
    matcher = LLMatcher(vocabulary.tokenizer, source, log_level=0, limits=limits)
    place = Constraint(matcher, vocabulary)
    if matcher.is_error() or place.mask() is None:
        return _sentence(grammar, matcher.get_error())
    beginning = (
        place.copy()
    )  # what every answer begins with must not be too much for the engine's loop
    for token_id in beginning.forced_tokens():
        if token_id in place.eos_token_ids or not beginning.consume(token_id):
            break
    if beginning.is_exhausted:
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


class _Thread:
    """Runs work in order; rings a bell after each piece."""

    def __init__(self, bell: int) -> None:
        self._bell = bell
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        before = threading.stack_size(_STACK_BYTES)
        try:
            self._thread = threading.Thread(target=self._serve, name="grammars", daemon=True)
            self._thread.start()
        finally:
            threading.stack_size(before)

    def put(self, work: Callable[[], None]) -> None:
        self._work.put(work)

    def close(self) -> None:
        """Waits for the piece that is under way."""
        self._work.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            os.eventfd_write(self._bell, 1)
