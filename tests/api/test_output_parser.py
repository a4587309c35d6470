from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from typing import Any

import pytest
from counted_text import assert_linear_copies
from hypothesis import given
from hypothesis import strategies as st

from pagoda.api.output_parser import MAX_HEAD_CHARS, OutputParser

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": {"c": "}\\""}}}\n</tool_call>'

BAD_ESCAPE = '{"name": "\\q", "arguments": {"a": 1}}'


class Parts:
    def __init__(self) -> None:
        self.content = self.reasoning = ""
        self.calls: list[list[str]] = []

    def as_tuple(self) -> tuple[Any, ...]:
        return self.content, self.reasoning, self.calls


def parse(deltas: list[str], **options: bool) -> Parts:
    parser = OutputParser(**options)
    parts = Parts()
    for step in [*(lambda d=d: parser.push(d) for d in deltas), parser.flush]:
        delta = step()
        parts.content += delta.content
        parts.reasoning += delta.reasoning
        for piece in delta.tool_calls:
            if piece.name is not None:
                assert piece.index == len(parts.calls)
                parts.calls.append([piece.name, ""])
            parts.calls[piece.index][1] += piece.arguments
    return parts


@pytest.mark.parametrize(
    ("text", "options", "content", "reasoning"),
    [
        *(
            (text, {"thinks": True}, content, reasoning)
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
        ("\nwhy\n</think>\n\nso", {"thinks": True, "in_reasoning": True}, "so", "why"),
        # Tags mean nothing to a model that does not use them.
        (f"<think>x</think>{CALL}", {}, f"<think>x</think>{CALL}", ""),
    ],
)
def test_reasoning(text: str, options: dict[str, bool], content: str, reasoning: str) -> None:
    assert parse([text], **options).as_tuple() == (content, reasoning, [])


def test_several_calls_and_text_around() -> None:
    parts = parse([f"Let me see.\n{CALL}\n{CALL} and {CALL}\n"], calls_tools=True)
    assert parts.content == "Let me see.and"
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
    [[found, text]] = parse([f"<tool_call>{body}</tool_call>"], calls_tools=True).calls
    assert (found, json.loads(text)) == (name, arguments)


@pytest.mark.parametrize("body", ["no json", "[1]", '{"name": 5}', "{" * 5000, BAD_ESCAPE])
def test_what_is_no_call_is_content(body: str) -> None:
    text = f"a <tool_call>{body}</tool_call>"
    assert parse([text], calls_tools=True).content in (text, text.replace("a <", "a<"))


def test_a_call_cut_off_keeps_its_arguments_so_far() -> None:
    parts = parse(['<tool_call>{"name": "f", "arguments": {"a": '], calls_tools=True)
    assert parts.calls == [["f", '{"a": ']]


def test_arguments_stream_as_they_come() -> None:
    parser = OutputParser(calls_tools=True)
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
    parser = OutputParser(thinks=True, calls_tools=True)
    for text, content in (("Hello", "Hello"), (" <", ""), ("b>", " <b>")):
        assert parser.push(text).content == content


def test_transparent_once_only_content_can_follow() -> None:
    parser = OutputParser(thinks=True)
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
    edges = [0, *sorted(b % (len(text) + 1) for b in borders), len(text)]
    deltas = [text[a:b] for a, b in itertools.pairwise(edges)]
    options = {"thinks": thinks, "in_reasoning": thinks and opened, "calls_tools": tools}
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
        parser = OutputParser(thinks=True, calls_tools=True)
        parser.push(begin)
        for piece in pieces:
            parser.push(piece)
        parser.flush()

    assert_linear_copies(feed, more)


def test_a_head_that_is_too_long_to_be_one_is_still_a_call() -> None:
    text = "<tool_call>" + " " * MAX_HEAD_CHARS + '{"name": "f", "arguments": {"a": 1}}</tool_call>'
    for deltas in ([text], list(text)):
        assert parse(deltas, calls_tools=True).calls == [["f", '{"a": 1}']]
