# SPDX-License-Identifier: Apache-2.0
"""Grammars of tool calls, walked at random: every answer in them is read as calls that fit their schemas."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from pagoda.api.answers.output_parser import READERS, OutputParser
from pagoda.api.parsers.deltas import AnswerDelta
from pagoda.errors import InvalidRequestError
from pagoda.messages.frontend import Grammar
from pagoda.text.answer_formats import HARMONY, THINK, AnswerFormats, ParserChoice
from pagoda.text.grammars.tool_grammars import CallableTool, CallRules, answer_grammar
from pagoda.text.reasoning_border import ReasoningBorder
from pagoda.text.tokenizers.detokenizer import byte_level_alphabet
from pagoda.text.tokenizers.tokenizer import Tokenizer

ADD: dict[str, Any] = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": -9, "maximum": 9},
        "unit": {"enum": ["km", "m"]},
        "s": {"type": "string", "maxLength": 4},
        "list": {"type": "array", "items": {"$ref": "#/$defs/flag"}, "maxItems": 2},
    },
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {"flag": {"type": "boolean"}},
}
NONE: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"add": ADD, "now": NONE}
TOOLS = [CallableTool(name, schema, is_strict=False) for name, schema in SCHEMAS.items()]
OFFERED = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
NAMES = [*READERS, "openai"]
EOS = "<eos>"


class Model:
    """A tokenizer of bytes and added tokens, and walks through grammars with it."""

    def __init__(self, tags: tuple[str, ...]) -> None:
        backend = Backend(BPE(vocab=byte_level_alphabet(), merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_tokens([AddedToken(EOS, special=True, normalized=False)])
        backend.add_tokens([AddedToken(tag, special=True, normalized=False) for tag in tags])
        self.tokenizer = Tokenizer(backend)
        self.eos = backend.token_to_id(EOS)
        self._backend = backend
        self._walked = LLTokenizer(backend.to_str(), eos_token=[self.eos])

    def matcher(self, text: str) -> LLMatcher:
        source = LLMatcher.grammar_from_lark(text)
        matcher = LLMatcher(self._walked, source, log_level=0)
        assert not matcher.is_error(), f"{matcher.get_error()}\n{text}"
        return matcher

    def walk(self, text: str, chance: random.Random, most: int = 3000) -> str | None:
        """An answer of the grammar, drawn at random; None if it does not end in time."""
        matcher = self.matcher(text)
        ids: list[int] = []
        while len(ids) < most and not matcher.is_stopped():
            bits = matcher.compute_bitmask()
            allowed = [
                i for i in range(self.eos + 40) if i // 8 < len(bits) and bits[i // 8] >> i % 8 & 1
            ]
            assert allowed, self.decode(ids)
            likely = [i for i in allowed if i >= self.eos] or allowed
            token_id = chance.choice(likely if chance.random() < 0.5 else allowed)
            if token_id == self.eos:
                return self.decode(ids)
            assert matcher.consume_token(token_id)
            ids.append(token_id)
        return self.decode(ids) if matcher.is_stopped() else None

    def walk_to_the_end(self, text: str, chance: random.Random) -> str:
        for _ in range(50):
            answer = self.walk(text, chance)
            if answer is not None:
                return answer
        raise AssertionError("no walk came to an end")

    def decode(self, ids: list[int]) -> str:
        return self._backend.decode(ids, skip_special_tokens=False)

    def accepts(self, text: str, answer: str) -> bool:
        """True if the whole answer is in the grammar."""
        matcher = self.matcher(text)
        ids = self._backend.encode(answer, add_special_tokens=False).ids
        return all(map(matcher.consume_token, ids)) and matcher.is_accepting()


def formats_of(name: str) -> AnswerFormats:
    return ParserChoice(name, "none").formats("")


def tags_of(name: str) -> tuple[str, ...]:
    return formats_of(name).tokens(calls_tools=True)


def grammar_of(model: Model, name: Any, tools: list[CallableTool], *, must_call: bool) -> str:
    rules = CallRules(tools, must_call=must_call, is_single=False)
    return answer_grammar(
        model.tokenizer.added_token_id,
        formats_of(name),
        calls=rules,
        tool_format=name,
        reasoning=None,
    ).text


def parsed(answer: str, name: Any, **options: Any) -> AnswerDelta:
    parser = OutputParser(tool_format=name, tools=OFFERED, **options)
    return AnswerDelta.joined((parser.push(answer), parser.flush()))


def calls_in(delta: AnswerDelta) -> list[tuple[str, Any]]:
    calls: dict[int, list[str]] = {}
    for piece in delta.tool_calls:
        if piece.name is not None:
            calls[piece.index] = [piece.name, ""]
        calls[piece.index][1] += piece.arguments
    return [(name, json.loads(arguments)) for name, arguments in calls.values()]


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_answers_that_must_call_are_calls_that_fit(name: Any, has_tokens: bool) -> None:
    tags = tags_of(name) if has_tokens else ()
    model, chance = Model(tags), random.Random(5)
    rules = CallRules(TOOLS, must_call=True, is_single=False)
    grammar = answer_grammar(
        model.tokenizer.added_token_id,
        formats_of(name),
        calls=rules,
        tool_format=name,
        reasoning=None,
    )
    read = 0
    for _ in range(30):
        answer = model.walk(grammar.text, chance)
        if answer is None:
            continue
        delta = parsed(answer, name)
        assert name == "openai" or delta.content == "", answer
        calls = calls_in(delta)
        assert calls, answer
        for tool, arguments in calls:
            if name in ("qwen3_coder", "glm45"):  # strings without quotes have no length
                arguments.pop("s", None)
            jsonschema.validate(arguments, SCHEMAS[tool])
        read += 1
    assert read > 3


@pytest.mark.parametrize("name", NAMES)
def test_a_single_call_is_one(name: Any) -> None:
    model, chance = Model(tags_of(name)), random.Random(6)
    rules = CallRules(TOOLS[1:], must_call=True, is_single=True)
    grammar = answer_grammar(
        model.tokenizer.added_token_id,
        formats_of(name),
        calls=rules,
        tool_format=name,
        reasoning=None,
    )
    answer = model.walk_to_the_end(grammar.text, chance)
    assert calls_in(parsed(answer, name)) == [("now", {})]


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_answers_that_may_call_are_free_until_they_do(name: Any, has_tokens: bool) -> None:
    model = Model(tags_of(name) if has_tokens else ())
    rules = CallRules(TOOLS, must_call=False, is_single=False)
    lazy = answer_grammar(
        model.tokenizer.added_token_id,
        formats_of(name),
        calls=rules,
        tool_format=name,
        reasoning=None,
    ).text
    forced = answer_grammar(
        model.tokenizer.added_token_id,
        formats_of(name),
        calls=CallRules(TOOLS, must_call=True, is_single=False),
        tool_format=name,
        reasoning=None,
    ).text
    free = "Let me < see."
    if name == "openai":
        free = f"<|channel|>final<|message|>{free}"
    assert model.accepts(lazy, free)
    call = model.walk_to_the_end(forced, random.Random(7))
    assert model.accepts(lazy, call)
    assert not model.accepts(forced, free)
    broken = call.replace("add", "sub").replace("now", "sub")
    assert broken != call
    assert not model.accepts(lazy, broken)


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize("is_open", [True, False])
def test_calls_behind_reasoning(is_open: bool, has_tokens: bool) -> None:
    formats = AnswerFormats("hermes", THINK)
    model = Model(formats.tokens(calls_tools=True) if has_tokens else ())
    rules = CallRules(TOOLS[1:], must_call=True, is_single=True)
    text = answer_grammar(
        model.tokenizer.added_token_id,
        formats,
        calls=rules,
        tool_format="hermes",
        reasoning=ReasoningBorder(THINK, is_open=is_open),
    ).text
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    begin = "" if is_open else "<think>"
    assert model.accepts(text, f"{begin}I {{should}} call</think>\n\n{call}")
    assert model.accepts(text, call) is not is_open
    assert not model.accepts(text, f"{begin}I {{should}} call</think>\n\nno")


@pytest.mark.parametrize("is_open", [True, False])
def test_a_budget_ends_reasoning(is_open: bool) -> None:
    formats = AnswerFormats(None, THINK)
    model = Model(formats.tokens(calls_tools=False))
    text = answer_grammar(
        model.tokenizer.added_token_id,
        formats,
        calls=None,
        tool_format=None,
        reasoning=ReasoningBorder(THINK, is_open=is_open),
        budget=5,
    ).text
    begin = "" if is_open else "<think>"
    assert model.accepts(text, f"{begin}1234</think>so it is")
    assert model.accepts(text, f"{begin}12345</think>so it is")
    assert not model.accepts(text, f"{begin}123456</think>so it is")
    assert model.accepts(text, "so it is") is not is_open


def test_a_budget_ends_the_analysis_of_gpt_oss() -> None:
    formats = AnswerFormats("openai", HARMONY)
    model = Model(formats.tokens(calls_tools=False))
    text = answer_grammar(
        model.tokenizer.added_token_id,
        formats,
        calls=None,
        tool_format=None,
        reasoning=ReasoningBorder(HARMONY, is_open=False),
        budget=5,
    ).text
    answer = (
        "<|channel|>analysis<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>so"
    )
    assert model.accepts(text, answer.format("12345"))
    assert not model.accepts(text, answer.format("123456"))


@pytest.mark.parametrize("may_call", [False, True])
def test_no_preamble_of_gpt_oss_stands_before_content_that_is_held(may_call: bool) -> None:
    formats = AnswerFormats("openai", HARMONY)
    model = Model(formats.tokens(calls_tools=True))
    text = answer_grammar(
        model.tokenizer.added_token_id,
        formats,
        calls=CallRules(TOOLS[1:], must_call=False, is_single=True) if may_call else None,
        tool_format="openai" if may_call else None,
        reasoning=ReasoningBorder(HARMONY, is_open=False),
        content=Grammar("regex", "[0-9]"),
    ).text
    start = "<|start|>assistant"
    analysis = f"<|channel|>analysis<|message|>so<|end|>{start}"
    preamble = f"<|channel|>commentary<|message|>I look.<|end|>{start}"
    final = "<|channel|>final<|message|>1"
    call = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}"
    assert model.accepts(text, final)
    assert model.accepts(text, analysis + final)
    assert not model.accepts(text, preamble + final)
    assert model.accepts(text, analysis + preamble + call) is may_call


def test_a_budget_needs_a_token_that_ends_reasoning() -> None:
    with pytest.raises(InvalidRequestError, match="</think>"):
        answer_grammar(
            lambda _: None,
            AnswerFormats(None, THINK),
            calls=None,
            tool_format=None,
            reasoning=ReasoningBorder(THINK, is_open=True),
            budget=5,
        )


def test_a_strict_tool_whose_strings_cannot_be_held_is_refused() -> None:
    schema = {"type": "object", "properties": {"s": {"type": "string", "pattern": "^a+$"}}}
    rules = CallRules([CallableTool("f", schema, is_strict=True)], must_call=True, is_single=True)
    with pytest.raises(InvalidRequestError, match="pattern"):
        answer_grammar(
            lambda _: None,
            formats_of("glm45"),
            calls=rules,
            tool_format="glm45",
            reasoning=None,
        )


PIECES = (
    "</parameter>",
    "</function>",
    "<function=f>",
    "</tool_call>",
    "<tool_call>",
    "<parameter=x>",
)
PIECES += (
    "</arg_value>",
    "<arg_key>x</arg_key>",
    "\n",
    " ",
    "\\",
    '"',
    "'",
    "}",
    "]",
    ")",
    ",",
    "```",
    "é",
    "5",
)
TEXTS = st.lists(st.sampled_from(PIECES), max_size=6).map("".join)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.just(0.5) | TEXTS,
    lambda parts: st.lists(parts, max_size=2) | st.dictionaries(TEXTS, parts, max_size=2),
    max_leaves=4,
)
KEYS = st.sampled_from(["x", "from", "a-b", "True", "two words"])


def spelled(name: str, arguments: dict[str, Any]) -> str:
    """A call of tool `t-o` as the grammar has it; strings of tagged formats without quotes."""
    text = json.dumps(arguments, ensure_ascii=False)
    raw = {
        k: v if isinstance(v, str) else json.dumps(v, ensure_ascii=False)
        for k, v in arguments.items()
    }
    named, called = (
        f'{{"name": "t-o", "arguments": {text}}}',
        f'{{"name": "t-o", "parameters": {text}}}',
    )
    keywords = ", ".join(f"{k}={json.dumps(v, ensure_ascii=False)}" for k, v in arguments.items())
    begin, end = (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    )
    xml = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in raw.items())
    pairs = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in raw.items())
    return {
        "hermes": f"<tool_call>\n{named}\n</tool_call>",
        "qwen3_coder": f"<tool_call>\n<function=t-o>\n{xml}</function>\n</tool_call>",
        "glm45": f"<tool_call>t-o\n{pairs}</tool_call>",
        "llama3_json": called,
        "pythonic": f"[t-o({keywords})]",
        "mistral": f"[TOOL_CALLS]t-o[ARGS]{text}",
        "deepseek_v3": f"{begin}function<｜tool▁sep｜>t-o\n```json\n{text}\n```{end}",
        "deepseek_v31": f"{begin}t-o<｜tool▁sep｜>{text}{end}",
        "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.t-o:0"
        f"<|tool_call_argument_begin|>{text}<|tool_call_end|><|tool_calls_section_end|>",
        "granite": f"<|tool_call|>[{named}]",
        "phi4_mini_json": f"functools[{named}]",
        "bare_list": f"[{called}]",
        "openai": f"<|channel|>commentary to=functions.t-o <|constrain|>json<|message|>{text}",
    }[name]


@pytest.fixture(scope="module")
def models() -> dict[str, Model]:
    """Models whose tags are tokens where they are no text between quotes or other tags, too."""
    in_text = ("hermes", "qwen3_coder", "glm45")
    return {name: Model(() if name in in_text else tags_of(name)) for name in NAMES}


@settings(max_examples=60)
@given(st.sampled_from(NAMES), st.dictionaries(KEYS, TEXTS | VALUES, max_size=2), st.booleans())
def test_what_a_grammar_admits_is_read_as_it_was_meant(
    models: dict[str, Model], name: Any, arguments: dict[str, Any], must_call: bool
) -> None:
    types = {k: {"type": "string"} if isinstance(v, str) else {} for k, v in arguments.items()}
    schema = {"type": "object", "properties": types, "additionalProperties": False}
    tool = CallableTool("t-o", schema, is_strict=False)
    grammar = grammar_of(models[name], name, [tool], must_call=must_call)
    answer = spelled(name, arguments)
    offered = [{"type": "function", "function": {"name": "t-o", "parameters": schema}}]
    is_admitted = models[name].accepts(grammar, answer)
    tags = ("<",) if name in ("qwen3_coder", "glm45") else tags_of(name)
    assert is_admitted or any(tag in str(arguments) for tag in tags)
    if is_admitted:
        parser = OutputParser(tool_format=name, tools=offered)
        delta = AnswerDelta.joined((parser.push(answer), parser.flush()))
        assert (calls_in(delta), delta.content) == ([("t-o", arguments)], "")


@pytest.mark.parametrize("must_call", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_arguments_that_no_schema_names_are_free(
    models: dict[str, Model], name: Any, must_call: bool
) -> None:
    tool = CallableTool("t-o", {"type": "object"}, is_strict=False)
    grammar = grammar_of(models[name], name, [tool], must_call=must_call)
    for arguments in ({}, {"x": "a b", "y": [1]}):
        assert models[name].accepts(grammar, spelled(name, arguments))


@pytest.mark.parametrize("name", ["llama3_json", "pythonic"])
def test_text_that_begins_like_a_call_is_free(models: dict[str, Model], name: Any) -> None:
    grammar = grammar_of(models[name], name, TOOLS, must_call=False)
    for free in ('{"city": "Oslo"}', "\n\nSo", "[text](url)", "[1, 2]", "```json\n[1]\n```", ""):
        assert models[name].accepts(grammar, free)
    for call in ('{"name": "sub"', "[sub(", 'So:\n{"name": "add", "parameters": {"a": 99}}'):
        assert not models[name].accepts(grammar, call)


@pytest.mark.parametrize(
    "said", ["Here is my thought process: a Here's my response: b", "Here's my thought process:"]
)
def test_all_spellings_of_a_border_are_in_the_grammar(said: str) -> None:
    formats = ParserChoice("none", "granite").formats("")
    assert formats.reasoning is not None
    text = answer_grammar(
        lambda _: None,
        formats,
        calls=None,
        tool_format=None,
        reasoning=ReasoningBorder(formats.reasoning, is_open=False),
        content=Grammar("regex", "b"),
    ).text
    assert Model(()).accepts(text, said) is said.endswith("b")
