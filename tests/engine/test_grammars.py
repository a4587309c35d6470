# SPDX-License-Identifier: Apache-2.0
"""Answers that are held to grammars: compiling, refusing, replaying, and forced tokens in a whole engine."""

from __future__ import annotations

import re
import select
import threading
from functools import partial
from itertools import count, product
from typing import NoReturn, cast

import msgspec
import pytest
from harness import VOCAB_SIZE, Harness, assert_complete, make_request, reworked
from llguidance import LLMatcher
from mortal_executor import speaking
from small_grammars import EOS, GRAMMARS, constraint_of, open_grammars, text_of, token_texts
from tokenizers import AddedToken, Tokenizer

from pagoda.engine.structured_output.constraint import (
    MAX_FORCED_TOKENS,
    TOKEN_LIMIT_S,
    CompiledGrammar,
    Constraint,
    TokenClock,
)
from pagoda.engine.structured_output.grammar_compiler import compile_grammar
from pagoda.engine.structured_output.grammar_threads import HUNG_S, MAX_LATE_THREADS
from pagoda.engine.structured_output.grammars import (
    BUSY,
    COMPILE_LIMIT_S,
    LATE_FOR_S,
    MAX_CACHED_GRAMMARS,
    RETURN_LIMIT_S,
    Grammars,
)
from pagoda.engine.structured_output.vocabulary import (
    TokenTexts,
    Vocabulary,
)
from pagoda.executor.base import WorkerLost
from pagoda.ipc.clock import VirtualClock
from pagoda.messages.frontend import FinishReason, GenerateRequest, Grammar, RequestRefused

A, COLON = 0, 29
"""Ids of the tokens "a" and ":"."""
LONG = Grammar("regex", "abcdabcdx(true|xyxyxy){1,2}z")


def constrained(request_id: str, grammar: Grammar, **fields: object) -> GenerateRequest:
    return make_request(request_id, [1, 2, 3], grammar=grammar, eos_token_ids=(EOS,), **fields)


def drained(grammars: Grammars, number: int = 1) -> list[tuple[GenerateRequest, object]]:
    """The next outcomes, at least some number of them."""
    found = grammars.drain()
    while len(found) < number:
        select.select(grammars.pollables(), [], [])
        found += grammars.drain()
    return found


def sampled(request: GenerateRequest, **changes: object) -> GenerateRequest:
    return reworked(request, sampling=msgspec.structs.replace(request.work.sampling, **changes))


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_answers_are_in_the_language_and_end_with_it(num_stages: int) -> None:
    harness = Harness(num_stages=num_stages)
    requests = [constrained(f"r{i}", g, max_tokens=40) for i, g in enumerate(GRAMMARS * 3)]
    harness.serve(*requests)
    for request in requests:
        assert harness.finished[request.request_id].finish_reason is FinishReason.STOP
        *answer, end = harness.tokens[request.request_id]
        assert end == EOS
        if request.grammar and request.grammar.kind == "regex":
            assert re.fullmatch(request.grammar.text, text_of(answer))


def test_forced_tokens_take_no_steps_of_their_own() -> None:
    harness = Harness()
    harness.serve(constrained("forced", LONG, max_tokens=40))
    with_forced = harness.core.load().num_steps
    harness = Harness()
    harness.serve(sampled(constrained("each", LONG, max_tokens=40), logprobs=0))
    assert harness.core.load().num_steps >= with_forced + 3
    assert harness.core.load().num_generated_tokens == len(harness.tokens["each"])


def test_min_tokens_gives_way_to_a_finished_grammar() -> None:
    request = constrained("r", Grammar("regex", "ab|cd"), max_tokens=30)
    for logprobs in (None, 0):
        harness = Harness()
        harness.serve(sampled(request, min_tokens=20, logprobs=logprobs))
        assert len(harness.tokens["r"]) == 2


def test_ignore_eos_ends_where_the_grammar_ends() -> None:
    request = constrained("r", Grammar("regex", "a{0,5}"), max_tokens=30)
    request = reworked(sampled(request, ignore_eos=True), eos_token_ids=())
    harness = Harness()
    harness.serve(request)
    assert text_of(harness.tokens["r"][:-1]) == "aaaaa"
    assert harness.finished["r"].finish_reason is FinishReason.STOP


@pytest.mark.parametrize("cut", [1, 2, 3, 5, 8])
def test_an_answer_goes_on_in_another_engine(cut: int) -> None:
    whole = Harness()
    for grammar in GRAMMARS:
        request = constrained("r", grammar, max_tokens=40)
        whole = Harness()
        whole.serve(request)
        chunks: list[int] = []
        first = Harness()
        first.add(request)
        while len(first.tokens["r"]) < cut and "r" not in first.finished:
            first.tick()
        chunks = first.tokens["r"]
        second = Harness()
        second.add(msgspec.structs.replace(request, output_token_ids=list(chunks)))
        second.run()
        assert second.tokens["r"] == whole.tokens["r"]


def test_an_answer_survives_its_worker_in_every_step() -> None:
    request = constrained("r", LONG, max_tokens=40)
    whole = Harness()
    whole.serve(request)
    for lost_at in range(8):
        harness, executor = speaking()
        harness.add(request)
        harness.ticks(lost_at)
        executor.say(WorkerLost("gone"))
        harness.run()
        assert harness.tokens["r"] == whole.tokens["r"]


@pytest.mark.parametrize(
    ("grammar", "error"),
    [
        (Grammar("regex", "(a"), "unclosed group"),
        (Grammar("json_schema", '{"not": {"type": "string"}}'), "not supported: not"),
        (Grammar("json_schema", '{"type": "foo"}'), "Invalid type: foo"),
        (Grammar("json_schema", '{"oneOf": [{}, {"type": "number"}]}'), "anyOf can be held"),
        (Grammar("lark", 'start: "a" b\nb: foo'), "line 2, column 4"),
        (Grammar("lark", "start: start"), "allows no answer"),
        (Grammar("lark", ""), "Empty grammar"),
        (Grammar("regex", "(" * 5000 + "a" + ")" * 5000), "regular expression"),
        (Grammar("json_schema", '{"a":' * 5000 + "1" + "}" * 5000), "JSON schema"),
        (Grammar("json_schema", '{"enum": [' + ",".join(map(str, range(300_000))) + "]}"), "large"),
        (Grammar("regex", "a{1000000000}"), "large"),
    ],
)
def test_a_wrong_grammar_is_refused_in_one_sentence(grammar: Grammar, error: str) -> None:
    harness = Harness()
    assert harness.core.add(constrained("r", grammar)) == []
    harness.step()
    (refusal,) = harness.core.drain_refusals()
    assert (refusal.request_id, refusal.error[-1]) == ("r", ".")
    assert error in refusal.error
    assert len(refusal.error) < 500
    assert isinstance(harness.core.add(constrained("r", grammar)), RequestRefused)
    harness.check_nothing_left()


@pytest.mark.parametrize(
    "text", ["(a+)+b", "(.*a){30}", "((a{1,1000}){1,1000}){1,1000}", "(a|aa)+"]
)
def test_expressions_that_explode_elsewhere_are_served(text: str) -> None:
    Harness().serve(constrained("r", Grammar("regex", text), max_tokens=20))


def test_words_in_all_scripts_are_no_work_for_a_large_vocabulary() -> None:
    letters = [letter for letter in map(chr, range(0xAA, 0x3100)) if letter.isalpha()]
    backend = Tokenizer.from_str(token_texts().tokenizer)
    backend.add_tokens([AddedToken(letter, normalized=False) for letter in letters])
    vocab_size = backend.get_vocab_size()
    texts = TokenTexts(backend.to_str(), (EOS,))
    grammars = Grammars(lambda: texts, vocab_size, run=lambda work: work())
    grammar = Grammar("regex", r"a\w{3,30}b")
    grammars.take(constrained("r", grammar), grammar)
    ((_, place),) = grammars.drain()
    assert isinstance(place, Constraint)
    assert place.consume(0)
    mask = place.mask()
    assert mask is not None
    assert int.from_bytes(mask, "little").bit_count() > 5000


def test_a_grammar_that_takes_too_much_work_within_an_answer_is_the_clients_mistake() -> None:
    letters = "abcdefghij"
    words = " | ".join(f'"{a}{b}{c}{d}"' for a, b, c, d in product(letters, repeat=4))
    grammar = Grammar("lark", f"start: FIRST word\nFIRST: /[a-z]/\nword: {words}")
    harness = Harness()
    harness.add(constrained("r", grammar))
    harness.run()
    chunk = harness.finished["r"]
    assert chunk.finish_reason is FinishReason.ERROR
    assert chunk.blamed_field == "grammar"
    assert chunk.error == "the grammar takes too much work at this point of the answer."


def dear_grammars(call_s: float) -> Grammars:
    """Grammars whose every call takes processor time."""

    def compiled(grammar: Grammar, vocabulary: Vocabulary) -> CompiledGrammar:
        source = LLMatcher.grammar_from_regex(grammar.text)
        matcher = LLMatcher(vocabulary.tokenizer, source, log_level=0)
        readings = count(0.0, call_s)
        clock = TokenClock(lambda: next(readings), lambda: next(readings), call_s)
        return CompiledGrammar(matcher, vocabulary, clock=clock)

    return Grammars(token_texts, VOCAB_SIZE, run=lambda work: work(), compile_with=compiled)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_dear_grammars_take_turns_and_others_need_not_wait(num_stages: int) -> None:
    harness = Harness(num_stages=num_stages, open_grammars=partial(dear_grammars, 0.0025))
    plain = make_request("plain", [1, 2, 3], max_tokens=60)
    requests = [constrained(f"r{i}", Grammar("regex", "[ab]{12}")) for i in range(5)]
    requests = [sampled(request, max_tokens=20) for request in requests]
    harness.add(plain)
    for request in requests:
        harness.add(request)
    num_dear, num_plain_steps = [], 0
    while harness.scheduler.requests:
        assert harness.tick()
        for step in harness.scheduler.in_flight:
            slots = {part.request.request_id for part in step.scheduled}
            if "plain" not in harness.finished and len(harness.tokens["r4"]) > 1:
                num_dear.append(len(slots - {"plain"}))
                num_plain_steps += "plain" in slots
    assert max(num_dear) == 1
    assert num_plain_steps >= len(num_dear) // num_stages
    assert_complete(harness, [plain, *requests])


def test_dear_grammars_alone_go_on_in_turn() -> None:
    harness = Harness(open_grammars=partial(dear_grammars, 0.0025))
    harness.serve(*(constrained(f"r{i}", Grammar("regex", "[ab]{5}")) for i in range(5)))


def test_a_token_that_takes_too_long_ends_the_answer_as_the_clients_mistake() -> None:
    harness = Harness(open_grammars=partial(dear_grammars, TOKEN_LIMIT_S))
    harness.add(constrained("r", Grammar("regex", "[ab]{12}")))
    harness.run()
    assert harness.finished["r"].blamed_field == "grammar"


def test_a_busy_machine_makes_no_grammar_dear() -> None:
    source = LLMatcher.grammar_from_regex("[ab]{12}")
    vocabulary = Vocabulary(token_texts(), VOCAB_SIZE)
    readings = count(0.0, 10 * TOKEN_LIMIT_S)
    place = CompiledGrammar(
        LLMatcher(vocabulary.tokenizer, source, log_level=0),
        vocabulary,
        clock=TokenClock(lambda: 0.0, lambda: next(readings)),
    ).begin()
    for _ in range(12):
        mask = place.mask()
        assert mask is not None
        assert place.consume(next(i for i in range(VOCAB_SIZE) if mask[i >> 3] >> (i & 7) & 1))
    assert place.cost_s == 0.0


def test_a_full_table_of_lexer_states_ends_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagoda.engine.structured_output.grammar_compiler.MAX_LEXER_STATES", 600)
    words = Grammar("regex", r"\w{500}:")
    request = constrained("r", words)
    grammars = open_grammars()
    places = []
    for _ in range(3):
        place = grammars.take(request, words)
        if place is None:
            [(_, place)] = grammars.drain()
        assert isinstance(place, Constraint)
        places.append(place)
    for _ in range(500):
        for place in places:
            assert place.mask() is not None
            assert place.consume(A)
    for place in places:
        assert place.forced_tokens() == [COLON]
        assert place.consume(COLON)
        assert place.forced_tokens() == [EOS]


def test_a_long_forced_text_is_appended_in_parts() -> None:
    number = 2 * MAX_FORCED_TOKENS + 10
    place = constraint_of(constrained("r", Grammar("regex", "z" * number)))
    assert place is not None
    parts = []
    while (forced := place.forced_tokens()) and forced != [EOS]:
        parts.append(len(forced))
        assert all(map(place.consume, forced))
    assert len(parts) > 1
    assert max(parts) == MAX_FORCED_TOKENS


def test_output_outside_of_the_language_is_refused() -> None:
    harness = Harness()
    request = constrained("r", LONG, output_token_ids=[2, 2])
    harness.core.add(request)
    harness.step()
    (refusal,) = harness.core.drain_refusals()
    assert "not in the language" in refusal.error


def test_grammars_are_compiled_beside_the_loop_and_kept() -> None:
    compiled_by: list[str] = []

    def load() -> TokenTexts:
        compiled_by.append(threading.current_thread().name)
        return token_texts()

    grammars = Grammars(load, VOCAB_SIZE)
    request = constrained("r", LONG)
    assert grammars.take(request, LONG) is None
    assert grammars.take(constrained("dropped", LONG), LONG) is None
    assert grammars.drop("dropped")
    assert not grammars.drop("dropped")
    ((taken, place),) = drained(grammars)
    assert taken is request
    assert isinstance(place, Constraint)
    assert grammars.num_compiling == 0
    assert isinstance(grammars.take(request, LONG), Constraint)
    grammars.close()
    assert compiled_by == ["grammars"]
    assert threading.stack_size() == 0


def test_a_long_chain_of_rules_does_not_overflow_the_threads_stack() -> None:
    rules = "".join(f"r{i}: r{i + 1}\n" for i in range(9000))
    chain = Grammar("lark", f'start: r0\n{rules}r9000: "a"')
    grammars = Grammars(token_texts, VOCAB_SIZE)
    grammars.take(constrained("r", chain), chain)
    assert len(drained(grammars)) == 1
    grammars.close()


def test_a_panic_where_an_answer_is_followed_again_ends_that_answer_alone() -> None:
    class Panic(BaseException):
        pass

    class Broken:
        def deep_copy(self) -> NoReturn:
            raise Panic

    def broken(_grammar: Grammar, vocabulary: Vocabulary) -> CompiledGrammar:
        return CompiledGrammar(cast(LLMatcher, Broken()), vocabulary)

    grammars = Grammars(token_texts, VOCAB_SIZE, compile_with=broken)
    for number in range(2):
        request = constrained(f"r{number}", LONG, output_token_ids=[0])
        assert grammars.take(request, LONG) is None
        assert "cannot be followed" in str(drained(grammars)[0][1])
    grammars.close()


class SlowCompiler:
    """Compiles at once, but for expressions of b alone, which wait until they are let go."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.let_go = threading.Event()
        self.texts: list[str] = []
        self.quick = compile_grammar(LONG, Vocabulary(token_texts(), VOCAB_SIZE))

    def __call__(self, grammar: Grammar, _vocabulary: Vocabulary) -> CompiledGrammar | str:
        self.texts.append(grammar.text)
        if set(grammar.text) == {"b"}:
            self.begun.release()
            self.let_go.wait()
        return self.quick


def slow(number: int) -> Grammar:
    return Grammar("regex", "b" * (number + 1))


def test_a_grammar_that_takes_too_long_is_refused_and_others_go_on() -> None:
    clock, compiler = VirtualClock(), SlowCompiler()
    grammars = Grammars(token_texts, VOCAB_SIZE, clock=clock, compile_with=compiler)
    first, second = constrained("first", slow(0)), constrained("second", slow(0))
    other = constrained("other", LONG)
    assert grammars.next_event_at() is None
    for request in (first, second, other):
        assert grammars.take(request, request.grammar or LONG) is None
    compiler.begun.acquire()
    assert grammars.next_event_at() == COMPILE_LIMIT_S
    clock.advance_to(COMPILE_LIMIT_S)
    outcomes = {request.request_id: place for request, place in drained(grammars, 3)}
    assert isinstance(outcomes["other"], Constraint)
    assert outcomes["first"] == outcomes["second"]
    assert "takes too long to compile" in str(outcomes["first"])
    assert grammars.take(first, slow(0)) == outcomes["first"]
    compiler.let_go.set()
    clock.advance_to(COMPILE_LIMIT_S + LATE_FOR_S)
    assert grammars.take(constrained("third", slow(0)), slow(0)) is None
    assert isinstance(drained(grammars)[0][1], Constraint)
    assert compiler.texts.count("b") == 2
    grammars.close()


def test_a_tenant_with_many_grammars_in_line_does_not_keep_another_waiting() -> None:
    compiler = SlowCompiler()
    grammars = Grammars(token_texts, VOCAB_SIZE, clock=VirtualClock(), compile_with=compiler)
    under_way = msgspec.structs.replace(constrained("slow", slow(0)), tenant="heavy")
    assert grammars.take(under_way, slow(0)) is None
    compiler.begun.acquire()
    for tenant, numbers in (("heavy", range(1, 9)), ("light", range(9, 11))):
        for number in numbers:
            grammar = Grammar("regex", f"a{{{number}}}")
            one = msgspec.structs.replace(constrained(f"r{number}", grammar), tenant=tenant)
            assert grammars.take(one, grammar) is None
    compiler.let_go.set()
    order = [request.request_id for request, _ in drained(grammars, 11)]
    assert order == ["slow", "r9", "r1", "r10", *(f"r{number}" for number in range(2, 9))]
    grammars.close()


def test_while_many_grammars_take_too_long_unknown_ones_come_again() -> None:
    clock, compiler = VirtualClock(), SlowCompiler()
    grammars = Grammars(token_texts, VOCAB_SIZE, clock=clock, compile_with=compiler)
    grammars.take(constrained("known", LONG), LONG)
    drained(grammars)
    waiting = [constrained(f"r{i}", slow(i)) for i in range(MAX_LATE_THREADS + 2)]
    for request in waiting:
        assert grammars.take(request, request.grammar or LONG) is None
    outcomes = {}
    for _ in range(MAX_LATE_THREADS):
        compiler.begun.acquire()
        clock.advance_to(clock.now() + COMPILE_LIMIT_S)
        outcomes |= {r.request_id: place for r, place in drained(grammars)}
    outcomes |= {r.request_id: place for r, place in drained(grammars, 5 - len(outcomes))}
    assert ["too long" in str(outcomes[r.request_id]) for r in waiting[:-2]] == [True] * 3
    assert [outcomes[r.request_id] for r in waiting[-2:]] == [BUSY, BUSY]
    assert isinstance(grammars.take(constrained("again", LONG), LONG), Constraint)
    unknown = Grammar("regex", "a{7}")
    assert grammars.take(constrained("unknown", unknown), unknown) == BUSY
    compiler.let_go.set()
    while grammars.take(constrained("unknown", unknown), unknown) == BUSY:
        select.select(grammars.pollables(), [], [])
        grammars.drain()
    assert isinstance(drained(grammars)[0][1], Constraint)
    grammars.close()


def test_grammars_of_a_tenant_that_take_too_long_keep_no_other_tenant_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "pagoda.engine.structured_output.grammar_threads.MAX_HUNG_THREADS", MAX_LATE_THREADS + 2
    )
    clock, compiler = VirtualClock(), SlowCompiler()
    grammars = Grammars(token_texts, VOCAB_SIZE, clock=clock, compile_with=compiler)

    def ask(tenant: str, grammar: Grammar) -> object:
        request = msgspec.structs.replace(constrained(grammar.text, grammar), tenant=tenant)
        place = grammars.take(request, grammar)
        if place is None and set(grammar.text) == {"b"}:
            compiler.begun.acquire()
            clock.advance_to(clock.now() + COMPILE_LIMIT_S)
        return drained(grammars)[0][1] if place is None else place

    for number in range(MAX_LATE_THREADS + 2):
        if number >= MAX_LATE_THREADS:  # those before will hardly end
            clock.advance_to(clock.now() + HUNG_S)
        assert "too long" in str(ask("heavy", slow(number)))
        if number in (MAX_LATE_THREADS - 1, MAX_LATE_THREADS + 1):
            fresh = Grammar("regex", f"a{{{number}}}")
            assert ask("heavy", fresh) == BUSY
            assert isinstance(ask("light", fresh), Constraint)
    monkeypatch.setattr(
        "pagoda.engine.structured_output.grammar_threads.MAX_THREADS", MAX_LATE_THREADS + 2
    )
    assert ask("light", Grammar("regex", "a{9}")) == BUSY
    compiler.let_go.set()
    grammars.close()


def test_grammars_that_hang_for_ever_keep_others_out_for_a_minute_only() -> None:
    clock, compiler = VirtualClock(), SlowCompiler()
    grammars = Grammars(token_texts, VOCAB_SIZE, clock=clock, compile_with=compiler)
    for index in range(MAX_LATE_THREADS):
        hanging = constrained(f"r{index}", slow(index))
        assert grammars.take(hanging, slow(index)) is None
        compiler.begun.acquire()
        clock.advance_to(clock.now() + COMPILE_LIMIT_S)
        assert "too long" in str(drained(grammars)[0][1])
    assert grammars.take(constrained("new", LONG), LONG) == BUSY
    clock.advance_to(clock.now() + HUNG_S)
    assert grammars.take(constrained("new", LONG), LONG) is None
    assert isinstance(drained(grammars)[0][1], Constraint)
    compiler.let_go.set()
    grammars.close()


def test_an_answer_that_has_begun_is_not_refused_for_want_of_room_or_time() -> None:
    clock, compiler = VirtualClock(), SlowCompiler()
    grammars = Grammars(token_texts, VOCAB_SIZE, clock=clock, compile_with=compiler)
    waiting = [constrained(f"r{i}", slow(i)) for i in range(MAX_LATE_THREADS)]
    for request in waiting:
        grammars.take(request, request.grammar or LONG)
        compiler.begun.acquire()
        clock.advance_to(clock.now() + COMPILE_LIMIT_S)
        assert "too long" in str(drained(grammars)[0][1])
    assert grammars.take(constrained("new", LONG), LONG) == BUSY
    begun = msgspec.structs.replace(constrained("begun", LONG), output_token_ids=[0])
    assert grammars.take(begun, LONG) is None
    assert isinstance(drained(grammars)[0][1], Constraint)
    late = msgspec.structs.replace(waiting[0], output_token_ids=[0])
    assert grammars.take(late, slow(0)) is None
    compiler.begun.acquire()
    assert grammars.next_event_at() == clock.now() + RETURN_LIMIT_S
    clock.advance_to(clock.now() + 2 * COMPILE_LIMIT_S)
    compiler.let_go.set()
    assert isinstance(drained(grammars)[0][1], Constraint)
    grammars.close()


def test_a_client_whose_grammar_cannot_be_compiled_now_is_told_to_come_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness = Harness()
    harness.step()
    assert harness.core.parts is not None
    monkeypatch.setattr(harness.core.parts.grammars, "take", lambda *_: BUSY)
    assert harness.core.add(constrained("r", LONG)) == RequestRefused("r", retry_after_s=1)


def test_the_number_of_kept_grammars_is_bounded() -> None:
    grammars = open_grammars()
    for number in range(2 * MAX_CACHED_GRAMMARS):
        grammar = Grammar("regex", f"a{{{number + 1}}}")
        grammars.take(constrained("r", grammar), grammar)
        assert len(grammars.drain()) == 1
    kept = [Grammar("regex", f"a{{{n + 1}}}") for n in range(2 * MAX_CACHED_GRAMMARS)]
    found = [grammars.take(constrained("r", grammar), grammar) for grammar in reversed(kept)]
    assert sum(place is not None for place in found) == MAX_CACHED_GRAMMARS


def test_an_aborted_request_does_not_wait_for_its_grammar() -> None:
    harness = Harness()
    harness.core.add(constrained("r", LONG))
    assert harness.core.load().num_waiting == 1
    harness.core.abort("r")
    harness.run()
    assert harness.core.load().num_waiting == 0


def test_a_model_without_an_end_token_refuses_grammars() -> None:
    texts = msgspec.structs.replace(token_texts(), eos_token_ids=())
    grammars = Grammars(lambda: texts, VOCAB_SIZE, run=lambda work: work())
    grammars.take(constrained("r", LONG), LONG)
    ((_, problem),) = grammars.drain()
    assert "no end-of-sequence token" in str(problem)
