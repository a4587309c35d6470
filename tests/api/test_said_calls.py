# SPDX-License-Identifier: Apache-2.0
"""Tool calls as models really say them, in every format: no call is missed, and no text is lost."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parsed_answers import ANY_FORM, TOOLS, VALUES, cut, parse

A = '{"a": 1}'
F = '{"name": "f", "arguments": {"a": 1}}'
G = '{"name": "g", "arguments": {}}'
SAID: list[tuple[str, str, list[tuple[str, object]], str]] = [
    # Order and names of keys, lists, objects within objects, several in one block.
    (
        "hermes",
        '<tool_call>{"arguments": {"s": "</tool_call>"}, "name": "f"}</tool_call>',
        [("f", {"s": "</tool_call>"})],
        "",
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "parameters": {"a": 1}, "id": "x"}</tool_call>',
        [("f", {"a": 1})],
        "",
    ),
    (
        "hermes",
        '<tool_call>{"id": "x", "name": "f", "arguments": {"a": 1}}</tool_call>',
        [("f", {"a": 1})],
        "",
    ),
    ("hermes", f"<tool_call>[{F}, {G}]</tool_call>", [("f", {"a": 1}), ("g", {})], ""),
    ("hermes", f"<tool_call>\n{F}\n{G}\n</tool_call>", [("f", {"a": 1}), ("g", {})], ""),
    (
        "hermes",
        f'<tool_call>{{"type": "function", "function": {F}}}</tool_call>',
        [("f", {"a": 1})],
        "",
    ),
    (
        "hermes",
        '<tool_call>{"function": "f", "arguments": {"a": 1}}</tool_call>',
        [("f", {"a": 1})],
        "",
    ),
    ("hermes", '<tool_call>{"name": "functions.f", "arguments": {}}</tool_call>', [("f", {})], ""),
    (
        "hermes",
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
        [("f", {"a": 1})],
        "",
    ),
    ("qwen3_coder", f"<tool_call>\n{F}\n</tool_call>", [("f", {"a": 1})], ""),
    ("qwen3_coder", f"<function=f>{A}</function>", [("f", {"a": 1})], ""),
    # Arguments that are the text of JSON, null, or empty.
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        [("f", {"a": 1})],
        "",
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": ""}</tool_call>', [("f", {})], ""),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', [("f", {})], ""),
    ("hermes", '<tool_call>{"name": "f", "arguments": []}</tool_call>', [("f", {})], ""),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', [("f", {})], ""),
    ("mistral", "[TOOL_CALLS]g[ARGS]", [("g", {})], ""),
    ("mistral", f"[TOOL_CALLS]g[ARGS][TOOL_CALLS]f{A}", [("g", {}), ("f", {"a": 1})], ""),
    (
        "kimi_k2",
        "<|tool_call_begin|>g:0<|tool_call_argument_begin|><|tool_call_end|>",
        [("g", {})],
        "",
    ),
    ("kimi_k2", f"<|tool_call_begin|>f:0{A}<|tool_call_end|>", [("f", {"a": 1})], ""),
    ("deepseek_v31", "<｜tool▁call▁begin｜>g<｜tool▁sep｜><｜tool▁call▁end｜>", [("g", {})], ""),
    (
        "deepseek_v31",
        f"<｜tool▁call▁begin｜>f\n```json\n{A}\n```<｜tool▁call▁end｜>",
        [("f", {"a": 1})],
        "",
    ),
    (
        "deepseek_v3",
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n{A}<｜tool▁call▁end｜>",
        [("f", {"a": 1})],
        "",
    ),
    ("openai", "<|channel|>commentary to=functions.g<|message|><|call|>", [("g", {})], ""),
    # Names without their namespace, and headers in other orders.
    (
        "openai",
        f"<|channel|>commentary to=f <|constrain|>json<|message|>{A}<|call|>",
        [("f", {"a": 1})],
        "",
    ),
    ("openai", f" to=f<|channel|>commentary<|message|>{A}", [("f", {"a": 1})], ""),
    (
        "openai",
        f"<|channel|>analysis to=functions.f code<|message|>```json\n{A}\n```<|call|>",
        [("f", {"a": 1})],
        "",
    ),
    ("openai", f"<|channel|>commentary to=python<|message|>{A}<|call|>", [], A),
    (
        "openai",
        f"<|channel|>commentary?<|channel|>commentary to=f<|message|>{A}",
        [("f", {"a": 1})],
        "",
    ),
    ("openai", "<|channel|>??<|end|><|start|>assistant<|channel|>final<|message|>so", [], "so"),
    (
        "openai",
        "<|channel|>Well<|end|><|start|>assistant<|channel|>final<|message|> so",
        [],
        "Well\nso",
    ),
    (
        "kimi_k2",
        f"<|tool_call_begin|>functions_f_12<|tool_call_argument_begin|>{A}",
        [("f", {"a": 1})],
        "",
    ),
    (
        "kimi_k2",
        f"<|tool_call_begin|>functionsf5<|tool_call_argument_begin|>{A}",
        [("f", {"a": 1})],
        "",
    ),
    ("hermes", '<tool_call>{"name": "f", "a": 1}</tool_call>', [("f", {"a": 1})], ""),
    # Code blocks and text around calls.
    ("hermes", f"<tool_call>\n```json\n{F}\n```\n</tool_call>", [("f", {"a": 1})], ""),
    (
        "hermes",
        f"One. <tool_call>{F}</tool_call> Two.\n<tool_call>{G}</tool_call>\nThree.",
        [("f", {"a": 1}), ("g", {})],
        "One.  Two.\n\nThree.",
    ),
    ("granite", f"<|tool_call|>```json\n[{F}]\n```", [("f", {"a": 1})], ""),
    ("mistral", f"[TOOL_CALLS]```json\n[{F}]\n```", [("f", {"a": 1})], ""),
    (
        "llama3_json",
        f'Now:\n```json\n{{"name": "f", "parameters": {A}}}\n```',
        [("f", {"a": 1})],
        "Now:",
    ),
    (
        "llama3_json",
        f'I look.\n{{"name": "f", "parameters": {A}}}\nDone.',
        [("f", {"a": 1})],
        "I look.\n\nDone.",
    ),
    ("llama3_json", f"[{F}]", [("f", {"a": 1})], ""),
    ("llama3_json", "[f(a=1)]", [("f", {"a": 1})], ""),
    ("llama3_json", "<|python_tag|>f.call(a=1)", [("f", {"a": 1})], ""),
    ("pythonic", f'{{"name": "f", "parameters": {A}}}', [("f", {"a": 1})], ""),
    (
        "pythonic",
        f'<|python_start|>{{"name": "f", "parameters": {A}}}<|python_end|>',
        [("f", {"a": 1})],
        "",
    ),
    ("pythonic", "I look.\n[f(a=1), g(),]", [("f", {"a": 1}), ("g", {})], "I look."),
    ("pythonic", "```python\n[f(a=1)]\n```", [("f", {"a": 1})], ""),
    # What Python and JSON spell differently.
    (
        "pythonic",
        '[f(s="\\/\\ud83d\\ude00 \'", o={"x": true, "y": (1, 2)})]',
        [("f", {"s": "/😀 '", "o": {"x": True, "y": [1, 2]}})],
        "",
    ),
    ("pythonic", "[f(class=1, x-y='z')]", [("f", {"class": 1, "x-y": "z"})], ""),
    ("pythonic", '[f(s="""a "b" c""")]', [("f", {"s": 'a "b" c'})], ""),
    (
        "hermes",
        "<tool_call>{'name': 'f', 'arguments': {'s': 'it\\'s \"so\"', 'b': True, 'n': None}}</tool_call>",
        [("f", {"s": 'it\'s "so"', "b": True, "n": None})],
        "",
    ),
    # JSON that is none: raw line breaks, unknown escapes, commas too many, braces too few or too many.
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"s": "one\ntwo\t\\d\\x41\\u12"}}</tool_call>',
        [("f", {"s": "one\ntwo\t\\dA\\u12"})],
        "",
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"s": "say "hi" and "yo"", "a": 1}}</tool_call>',
        [("f", {"s": 'say "hi" and "yo"', "a": 1})],
        "",
    ),
    (
        "hermes",
        "<tool_call>{'arguments': {'s': 'it's so'}, 'name': 'f'}</tool_call>",
        [("f", {"s": "it's so"})],
        "",
    ),
    (
        "hermes",
        '<tool_call>{"arguments": {"s": "one\ntwo"}, "name": "f",}</tool_call>',
        [("f", {"s": "one\ntwo"})],
        "",
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": [1, 2, ], }}</tool_call>',
        [("f", {"a": [1, 2]})],
        "",
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call> so',
        [("f", {"a": 1})],
        "so",
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": [1}}</tool_call> so',
        [("f", {"a": [1]})],
        "so",
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call> so',
        [("f", {"a": 1})],
        "so",
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1}}}</tool_call> so',
        [("f", {"a": 1})],
        "so",
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1', [("f", {"a": 1})], ""),
    ("hermes", f"<tool_call>{F}\nI wait.", [("f", {"a": 1})], "I wait."),
    ("hermes", f"<tool_call>{F[:-1]}\nI wait.", [("f", {"a": 1})], "I wait."),
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}', [("f", {"a": 1})], ""),
    (
        "kimi_k2",
        '<|tool_call_begin|>f:0<|tool_call_argument_begin|>{"a": 1<|tool_call_end|> so',
        [("f", {"a": 1})],
        "so",
    ),
    ("openai", '<|channel|>commentary to=f<|message|>{"a": 1<|call|>', [("f", {"a": 1})], ""),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": [1 2 {} "x"] "b": 1}}</tool_call>',
        [("f", {"a": [1, 2, {}, "x"], "b": 1})],
        "",
    ),
    ("granite", f"<|tool_call|>{F}, {G}] so", [("f", {"a": 1}), ("g", {})], "] so"),
    ("llama3_json", f"{F}; {F}; so", [("f", {"a": 1}), ("f", {"a": 1})], "; so"),
    # Tags that are missing, and values that hold what looks like one.
    (
        "qwen3_coder",
        "<function=f>\n<parameter=s>\nX\n<parameter=a>\n1\n</function>",
        [("f", {"s": "X", "a": 1})],
        "",
    ),
    (
        "qwen3_coder",
        "<function=f>\n<parameter=s>\nX\n</function>\n</tool_call>",
        [("f", {"s": "X"})],
        "",
    ),
    (
        "qwen3_coder",
        "<tool_call><function=f>\n<parameter=s>\nX\n</tool_call>",
        [("f", {"s": "X"})],
        "",
    ),
    ("qwen3_coder", "<function=f>\n<parameter=s>\nX\n</parameter>\n", [("f", {"s": "X"})], ""),
    (
        "qwen3_coder",
        "<function=f>\n<parameter=s>\n</parameter> . <parameter=z> </function> . </tool_call> ."
        "\n</parameter>\n</function>",
        [("f", {"s": "</parameter> . <parameter=z> </function> . </tool_call> ."})],
        "",
    ),
    (
        "glm45",
        "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>X\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>",
        [("f", {"s": "X", "a": 1})],
        "",
    ),
    (
        "glm45",
        "<tool_call>f<arg_key>s</arg_key><arg_value></arg_value> . <arg_key>z</arg_key> .</arg_value></tool_call>",
        [("f", {"s": "</arg_value> . <arg_key>z</arg_key> ."})],
        "",
    ),
    ("glm45", "<tool_call>g", [("g", {})], ""),
    ("glm45", "<tool_call>f<arg_key>s</arg_key>X</arg_value></tool_call>", [("f", {"s": "X"})], ""),
    ("qwen3_coder", "<function=f\n<parameter=a\n1\n</parameter></function>", [("f", {"a": 1})], ""),
    ("qwen3_coder", '<function="f"><parameter="a">1</parameter></function>', [("f", {"a": 1})], ""),
    ("qwen3_coder", "<function=f><parameter=a: 1\n</parameter></function>", [("f", {"a": 1})], ""),
    (
        "qwen3_coder",
        "<function=f><parameter=\n1</parameter></function> so",
        [("f", {})],
        "<parameter=\n1</parameter> so",
    ),
    (
        "glm45",
        "<tool_call>f<arg_key>s</arg_key><arg_value>\n\n</arg_value></tool_call>",
        [("f", {"s": "\n\n"})],
        "",
    ),
    (
        "glm45",
        "<tool_call>f<arg_key>a<arg_value>1</arg_value><tool_call>g</tool_call>",
        [("f", {"a": 1}), ("g", {})],
        "",
    ),
    # Values that JSON does not have.
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": +01, "o": {"a": .5, "b": [1., NaN]}, "s": C#}}</tool_call>',
        [("f", {"a": 1, "o": {"a": 0.5, "b": [1.0, "NaN"]}, "s": "C#"})],
        "",
    ),
    ("openai", "<|channel|>commentary to=f<|message|>so<|call|>", [("f", "so")], ""),
    *(
        ("pythonic", f"[f(a={value})]", [], f"[f(a={value})]")
        for value in ("1j", "b'x'", "{1, 2}", "...")
    ),
    # What is no call ends where that shows, and calls behind it are read.
    ("llama3_json", f"{{{F}\n{F}\nso", [("f", {"a": 1})], f"{{{F}\n\nso"),
    ("llama3_json", f'{{"x": 1}}\n{F}', [("f", {"a": 1})], '{"x": 1}'),
    (
        "llama3_json",
        f'{{"name": "no", "arguments": {{}}}}\n{F}',
        [("f", {"a": 1})],
        '{"name": "no", "arguments": {}}',
    ),
    # No calls.
    ("llama3_json", '{"city": "Oslo"}', [], '{"city": "Oslo"}'),
    ("llama3_json", "[text](url) and\n[f] and\n{x}", [], "[text](url) and\n[f] and\n{x}"),
    ("llama3_json", "```json\n[1]\n```\n", [], "```json\n[1]\n```\n"),
    ("pythonic", "So:\n[other(a=1)]", [], "So:\n[other(a=1)]"),
    (
        "hermes",
        f"<tool_call>{F}</tool_call>\n```python\nf()\n```",
        [("f", {"a": 1})],
        "```python\nf()\n```",
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": 5}</tool_call>',
        [],
        '<tool_call>{"name": "f", "arguments": 5}</tool_call>',
    ),
    (
        "hermes",
        '<tool_call>{"name": "\\ud83d", "arguments": {}}</tool_call>',
        [],
        '<tool_call>{"name": "\\ud83d", "arguments": {}}</tool_call>',
    ),
    ("kimi_k2", "<|tool_calls_section_begin|> none", [], "<|tool_calls_section_begin|> none"),
]


@pytest.mark.parametrize("case", range(len(SAID)))
def test_calls_as_models_say_them(case: int) -> None:
    name, text, calls, content = SAID[case]
    for deltas in ([text], list(text), [text[:9], *text[9:].partition("}")]):
        parts = parse(deltas, tool_format=name, tools=TOOLS)
        assert [(called, json.loads(arguments)) for called, arguments in parts.calls] == calls
        assert parts.content == content


SPANS = st.lists(
    st.tuples(
        st.integers(0, 2000),
        st.integers(0, 12),
        st.sampled_from(["", "zq", "\n", '"', "{", "}", "<", f"\n{F}\n"]),
    ),
    max_size=4,
)


def mutated(text: str, spans: list[tuple[int, int, str]]) -> str:
    """The text with other text in place of some of its parts."""
    for begin, length, other in spans:
        at = begin % (len(text) + 1)
        text = text[:at] + other + text[at + length :]
    return text


@settings(max_examples=300)
@given(st.sampled_from(ANY_FORM), SPANS, st.lists(st.integers(0, 2000), max_size=6), st.booleans())
def test_mutated_calls_are_read_alike_in_any_pieces_and_lose_no_text(
    form: tuple[str, str], spans: list[tuple[int, int, str]], borders: list[int], is_cut: bool
) -> None:
    name, text = form
    text = mutated(text, spans)
    options = {"tool_format": name, "tools": TOOLS, "is_cut": is_cut}
    whole = parse([text], **options)
    assert parse(cut(text, borders), **options).as_tuple() == whole.as_tuple()
    assert parse(list(text), **options).as_tuple() == whole.as_tuple()
    if not whole.calls and name != "openai":
        assert whole.content == text


WORDS = st.text("abc .,\n", min_size=1, max_size=12).map(lambda text: f"x{text}x")


@given(st.sampled_from(ANY_FORM), WORDS, WORDS)
def test_text_around_calls_is_content_to_the_byte(
    form: tuple[str, str], before: str, behind: str
) -> None:
    name, text = form
    if name == "openai":
        before, text = f"<|channel|>final<|message|>{before}", f"<|end|><|start|>assistant{text}"
        behind = f"<|start|>assistant<|channel|>final<|message|>{behind}"
    separator = "\n" if name in ("llama3_json", "pythonic", "bare_list") else ""
    space = "" if name == "openai" else " "
    said = [before, space, separator, text, separator, space, behind]
    parts = parse(said, tool_format=name, tools=TOOLS)
    assert [(called, json.loads(arguments)) for called, arguments in parts.calls] == [
        ("f", VALUES),
        ("g", {}),
    ]
    begin, end = (part.rpartition("<|message|>")[2] for part in (before, behind))
    assert parts.content.startswith(begin + space)
    assert parts.content.endswith(space + end)
    assert not parts.content.removeprefix(begin).removesuffix(end).strip()
