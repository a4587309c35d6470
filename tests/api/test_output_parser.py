# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest
from counted_text import assert_linear_copies
from hypothesis import given
from hypothesis import strategies as st
from parsed_answers import ANY_FORM, CALLS, TOOLS, VALUES, cut, parse

from pagoda.api.answers.output_parser import READERS, OutputParser
from pagoda.api.parsers.json_calls import MAX_HEAD_CHARS
from pagoda.text.answer_formats import HARMONY, THINK, ParserChoice
from pagoda.text.reasoning_border import ReasoningBorder

THINKS = ReasoningBorder(THINK, is_open=False)
THINKING = ReasoningBorder(THINK, is_open=True)
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": {"c": "}\\""}}}\n</tool_call>'

BAD_ESCAPE = '{"name": "\\q", "arguments": {"a": 1}}'


@pytest.mark.parametrize(
    ("text", "options", "content", "reasoning"),
    [
        *(
            (text, {"reasoning": THINKS}, content, reasoning)
            for text, content, reasoning in (
                ("plain", "plain", ""),
                ("<think>\nwhy\n</think>\n\nso", "so", "why"),
                ("\n<think>why</think>so", "so", "why"),
                ("<think>cut off", "", "cut off"),
                ("<think></think>\n\nso", "so", ""),
                ("<thinking>", "<thinking>", ""),
                ("a <think>b</think>", "a <think>b</think>", ""),
                ("  ", "  ", ""),
                ("<th", "<th", ""),
            )
        ),
        ("\nwhy\n</think>\n\nso", {"reasoning": THINKING}, "so", "why"),
        # Tags mean nothing to a model that does not use them.
        (f"<think>x</think>{CALL}", {}, f"<think>x</think>{CALL}", ""),
    ],
)
def test_reasoning(text: str, options: dict[str, Any], content: str, reasoning: str) -> None:
    assert parse([text], **options).as_tuple() == (content, reasoning, [])


def test_several_calls_and_text_around() -> None:
    parts = parse([f"Let me see.\n{CALL}\n{CALL} and {CALL}\n"], tool_format="hermes")
    assert parts.content == "Let me see.\n\n and"
    assert [name for name, _ in parts.calls] == ["add", "add", "add"]
    assert json.loads(parts.calls[0][1]) == {"a": 1, "b": {"c": '}"'}}


@pytest.mark.parametrize(
    ("body", "name", "arguments"),
    [
        ('{"arguments": {"a": 1}, "name": "f"}', "f", {"a": 1}),
        ('{"name": "f"}', "f", {}),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', "f", {"a": 1}),
        ('{"name": "\\u00e9", "arguments": {}}', "é", {}),
    ],
)
def test_calls_in_unusual_order(body: str, name: str, arguments: object) -> None:
    [[found, text]] = parse([f"<tool_call>{body}</tool_call>"], tool_format="hermes").calls
    assert (found, json.loads(text)) == (name, arguments)


@pytest.mark.parametrize("body", ["no json", "[1]", '{"name": 5}', "{" * 5000, BAD_ESCAPE])
def test_what_is_no_call_is_content(body: str) -> None:
    text = f"a <tool_call>{body}</tool_call>"
    assert parse([text], tool_format="hermes").content == text


def test_a_call_cut_off_keeps_its_arguments_so_far() -> None:
    parts = parse(['<tool_call>{"name": "f", "arguments": {"a": '], tool_format="hermes")
    assert parts.calls == [["f", '{"a": ']]


def test_arguments_stream_as_they_come() -> None:
    parser = OutputParser(tool_format="hermes")
    assert parser.push('<tool_call>{"name": "f", "arg').tool_calls == ()
    first = parser.push('uments": {"text": "lo').tool_calls
    assert [(piece.index, piece.name, piece.arguments) for piece in first] == [
        (0, "f", '{"text": "lo')
    ]
    assert not parser.one_call_complete
    [more] = parser.push('ng"}}\n').tool_calls
    assert (more.index, more.name, more.arguments) == (0, None, 'ng"}')
    assert parser.one_call_complete


def test_plain_content_is_not_held_back() -> None:
    parser = OutputParser(reasoning=THINKS, tool_format="hermes")
    for text, content in (("Hello", "Hello"), (" <", ""), ("b>", " <b>")):
        assert parser.push(text).content == content


def test_transparent_once_only_content_can_follow() -> None:
    parser = OutputParser(reasoning=THINKS)
    seen = [parser.transparent]
    for text in ("<think>x</think>", "y"):
        parser.push(text)
        seen.append(parser.transparent)
    assert seen == [False, False, True]


TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
PIECES = st.sampled_from([*TAGS, CALL, " ", "\n", "a", "<", '{"name": "f"'])


@given(
    st.lists(PIECES, max_size=8).map("".join),
    st.lists(st.integers(0, 400), max_size=8),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_does_not_depend_on_how_the_text_is_cut(
    text: str, borders: list[int], thinks: bool, opened: bool, tools: bool
) -> None:
    deltas = cut(text, borders)
    options = {
        "reasoning": ReasoningBorder(THINK, opened) if thinks else None,
        "tool_format": "hermes" if tools else None,
    }
    assert parse(deltas, **options).as_tuple() == parse([text], **options).as_tuple()
    assert parse(list(text), **options).as_tuple() == parse([text], **options).as_tuple()


@pytest.mark.parametrize(
    ("begin", "more"),
    [
        ("<tool_call>", "x" * 2000),
        ("<tool_call>", " " * 2000),
        ('<tool_call>{"name": "', "{" * 2000),
        ('<tool_call>{"name": "f", "arguments": {}}', "y" * 2000),
        ('<tool_call>{"name": "f", "arguments": {"a": "', "z" * 2000),
        ("<think>", "\n" * 2000),
        ("", "\n" * 2000),
        ("a", " " * 2000),
        ("a", "<tool_call" * 200),
    ],
)
def test_work_is_linear_in_a_text_that_is_held_back(begin: str, more: str) -> None:
    def feed(pieces: Iterable[str]) -> None:
        parser = OutputParser(reasoning=THINKS, tool_format="hermes")
        parser.push(begin)
        for piece in pieces:
            parser.push(piece)
        parser.flush()

    assert_linear_copies(feed, more)


def test_a_head_that_is_too_long_to_be_one_is_still_a_call() -> None:
    text = "<tool_call>" + " " * MAX_HEAD_CHARS + '{"name": "f", "arguments": {"a": 1}}</tool_call>'
    for deltas in ([text], list(text)):
        assert parse(deltas, tool_format="hermes").calls == [["f", '{"a": 1}']]


def test_all_formats_are_read() -> None:
    assert CALLS.keys() == {*READERS, "openai"}


@pytest.mark.parametrize(("name", "text"), ANY_FORM)
def test_calls_of_each_format(name: str, text: str) -> None:
    for deltas in ([text], list(text), [text[:7], *text[7:].partition("a")]):
        parts = parse(deltas, tool_format=name, tools=TOOLS)
        assert [(called, json.loads(args)) for called, args in parts.calls] == [
            ("f", VALUES),
            ("g", {}),
        ]
        assert (parts.content, parts.reasoning) == ("", "")


NOT_BARE = [name for name in CALLS if name not in ("llama3_json", "pythonic", "bare_list")]


@pytest.mark.parametrize("name", NOT_BARE)
def test_content_around_calls(name: str) -> None:
    opening = "<|channel|>final<|message|>" if name == "openai" else ""
    middle = "<|end|><|start|>assistant" if name == "openai" else " \n"
    parts = parse([f"{opening}Let me see.{middle}{CALLS[name]}"], tool_format=name, tools=TOOLS)
    assert parts.content == "Let me see."
    assert len(parts.calls) == 2


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama3_json", '{"name": "Bob", "parameters": {"age": 5}}'),
        ("llama3_json", '{"name": "Bob"}'),
        ("llama3_json", "<|python_tag|>print(1)"),
        ("bare_list", '[{"name": "Bob"}]'),
        ("bare_list", "[1, 2]"),
        ("pythonic", "[1, 2]"),
        ("pythonic", "[f(1)]"),
        ("pythonic", "[f(a=x)]"),
        ("pythonic", "[f(**a)]"),
        ("pythonic", "[f(a=1"),
        ("mistral", "[TOOL_CALLS]what is this?"),
        ("mistral", "[TOOL_CALLS]f[ARGS]no"),
        ("mistral", "[TOOL_CALLS]what is this[ARGS]{}"),
        ("granite", "<|tool_call|>f(1)"),
        ("phi4_mini_json", "functools[f]"),
        ("qwen3_coder", "<tool_call>\nf\n</tool_call>"),
        ("qwen3_coder", "<function="),
        ("glm45", "<tool_call>two words\n</tool_call>"),
        ("glm45", '<tool_call>\n{"name": "f"}\n</tool_call>'),
        ("kimi_k2", "<|tool_calls_section_begin|>no<|tool_calls_section_end|>"),
        ("kimi_k2", "<|tool_call_begin|>two words<|tool_call_end|>"),
        ("deepseek_v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n5<｜tool▁call▁end｜>"),
        ("hermes", "<tool_call>\n"),
    ],
)
def test_broken_calls_are_content(name: str, text: str) -> None:
    for deltas in ([text], list(text)):
        parts = parse(deltas, tool_format=name, tools=TOOLS)
        assert (parts.content, parts.calls) == (text, [])


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        (None, "5", "5"),
        ({}, "5", 5),
        ({}, "five", "five"),
        ({"type": "string"}, "5", "5"),
        ({"type": ["integer", "null"]}, "None", None),
        ({"type": "number"}, "5", 5),
        ({"type": "boolean"}, "True", True),
        ({"type": "integer"}, "five", "five"),
        ({"enum": ["5", "6"]}, "5", "5"),
        ({"const": 5}, "5", 5),
        ({"anyOf": [{"type": "string"}, {"type": "string"}]}, "5", "5"),
        ({"oneOf": [{"type": "array"}, {"$ref": "#/x"}]}, "[5]", [5]),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "object"}, "{" * 5000, "{" * 5000),
        (True, "5", 5),
    ],
)
def test_values_without_quotes_have_the_types_of_the_schema(
    schema: object, text: str, value: object
) -> None:
    properties = {} if schema is None else {"a": schema}
    tools = [{"function": {"name": "f", "parameters": {"properties": properties}}}]
    call = f"<function=f><parameter=a>{text}</parameter></function>"
    [[_, arguments]] = parse([call], tool_format="qwen3_coder", tools=tools).calls
    assert json.loads(arguments) == {"a": value}


def test_strings_stream_also_without_quotes() -> None:
    parser = OutputParser(tool_format="glm45", tools=TOOLS)
    head = "<tool_call>f\n<arg_key>s</arg_key><arg_value>one "
    assert parser.push(head).tool_calls[-1].arguments == '{"s": "one '
    assert parser.push("two").tool_calls[0].arguments == "two"


HARMONIES = (
    (f"<|channel|>analysis<|message|>{{}}<|end|><|start|>assistant{CALLS['openai']}", "", "{}", 2),
    (
        "<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>final<|message|> so ",
        "so ",
        "why",
        0,
    ),
    ("<|channel|>commentary<|message|>I call.<|end|>", "I call.", "", 0),
    (" to=functions.f<|channel|>commentary json<|message|>{}", "", "", 1),
    ("<|channel|>analysis<|message|>why<|channel|>final<|message|>so", "so", "why", 0),
    # Messages of one kind have a line break between them, if there is text on both sides.
    (
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>final<|message|><|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>c<|end|>"
        "<|start|>assistant<|channel|>final<|message|>so",
        "I look.\nso",
        "a\nb\nc",
        0,
    ),
    ("no header", "no header", "", 0),
    ("<|channel|>fin", "", "", 0),
    ("<|channel|>" + "x" * 2000, "<|channel|>" + "x" * 2000, "", 0),
)


@pytest.mark.parametrize(("text", "content", "reasoning", "num_calls"), HARMONIES)
def test_harmony(text: str, content: str, reasoning: str, num_calls: int) -> None:
    for deltas in ([text], list(text)):
        parts = parse(
            deltas,
            tool_format="openai",
            reasoning=ReasoningBorder(HARMONY, is_open=False),
            tools=TOOLS,
        )
        assert (parts.content, parts.reasoning) == (content, reasoning)
        assert len(parts.calls) == num_calls


@pytest.mark.parametrize(
    ("name", "text", "content", "reasoning"),
    [
        ("mistral", "[THINK]why[/THINK]so", "so", "why"),
        ("granite", "Here is my thought process:\nwhy\nHere's my response: so", "so", "why"),
        ("deepseek-r1", "why</think>so", "so", "why"),
        ("deepseek_r1", "<think>why", "", "why"),
        ("glm45", "<think>why</think>\nso", "so", "why"),
    ],
)
def test_reasoning_parsers(name: str, text: str, content: str, reasoning: str) -> None:
    style = ParserChoice(reasoning=name).formats("").reasoning
    assert style is not None
    for deltas in ([text], list(text)):
        parts = parse(deltas, reasoning=ReasoningBorder(style, style.is_open))
        assert (parts.content, parts.reasoning) == (content, reasoning)


FRAGMENTS = st.sampled_from(
    sorted(
        {text[i : i + 9] for _, text in ANY_FORM for i in range(0, len(text), 9)} | {" ", "<", "["}
    )
)


@given(
    st.sampled_from(sorted(CALLS)),
    st.one_of(
        st.lists(FRAGMENTS, max_size=30).map("".join), st.sampled_from([t for _, t in ANY_FORM])
    ),
    st.lists(st.integers(0, 2000), max_size=8),
    st.integers(0, 2000),
)
def test_no_format_depends_on_how_the_text_is_cut(
    name: str, text: str, borders: list[int], length: int
) -> None:
    text = text[: length % (len(text) + 1)] or text
    options = {"tool_format": name, "tools": TOOLS}
    whole = parse([text], **options).as_tuple()
    assert parse(cut(text, borders), **options).as_tuple() == whole
    assert parse(list(text), **options).as_tuple() == whole


@pytest.mark.parametrize(("name", "text"), ANY_FORM)
def test_work_is_linear_in_every_format(name: str, text: str) -> None:
    def feed(pieces: Iterable[str]) -> None:
        parser = OutputParser(tool_format=name, tools=TOOLS)
        for piece in pieces:
            parser.push(piece)
        parser.flush()

    for more in (text, text[: len(text) // 2], text[: len(text) // 4] + "x"):
        assert_linear_copies(feed, more * (2000 // len(more)))
