# SPDX-License-Identifier: Apache-2.0
"""Answers with two calls in the form of each format, and what the parser makes of answers."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

from pagoda.api.answers.output_parser import OutputParser


class Parts:
    def __init__(self) -> None:
        self.content = self.reasoning = ""
        self.calls: list[list[str]] = []

    def as_tuple(self) -> tuple[Any, ...]:
        return self.content, self.reasoning, self.calls


def parse(deltas: list[str], *, is_cut: bool = False, **options: Any) -> Parts:
    parser = OutputParser(**options)
    parts = Parts()
    pushed = (parser.push(delta) for delta in deltas)
    for delta in itertools.chain(pushed, (parser.flush(is_cut=is_cut) for _ in range(1))):
        parts.content += delta.content
        parts.reasoning += delta.reasoning
        for piece in delta.tool_calls:
            if piece.name is not None:
                assert piece.index == len(parts.calls)
                parts.calls.append([piece.name, ""])
            parts.calls[piece.index][1] += piece.arguments
    return parts


def cut(text: str, borders: Sequence[int]) -> list[str]:
    """The text in pieces; `borders` are any numbers."""
    edges = [0, *sorted(b % (len(text) + 1) for b in borders), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer"},
                    "s": {"type": "string"},
                    "o": {"anyOf": [{"type": "object"}, {"type": "null"}]},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "g"}},
]
VALUES = {"a": -1, "s": 'two\nlines, "quoted" ]} é', "o": {"x": [True, None, 1.5]}}
JSON = json.dumps(VALUES, ensure_ascii=False)
PYTHON = f"a=-1, s={VALUES['s']!r}, o={VALUES['o']!r}"
XML = {name: value if name == "s" else json.dumps(value) for name, value in VALUES.items()}
"""Two calls in each format: f with `VALUES`, and g without arguments."""
CALLS = {
    "hermes": f'<tool_call>\n{{"name": "f", "arguments": {JSON}}}\n</tool_call>'
    '<tool_call>{"name": "g", "arguments": {}}</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=f>\n"
    + "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in XML.items())
    + "</function>\n</tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call>",
    "glm45": "<tool_call>f\n"
    + "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in XML.items())
    + "</tool_call>\n<tool_call>g\n</tool_call>",
    "llama3_json": f'{{"name": "f", "parameters": {JSON}}}; {{"name": "g", "parameters": {{}}}}',
    "pythonic": f"[f({PYTHON}), g()]",
    "mistral": f"[TOOL_CALLS]f[ARGS]{JSON}[TOOL_CALLS]g[CALL_ID]abcdefghi[ARGS]{{}}",
    "deepseek_v3": "<｜tool▁calls▁begin｜>"
    f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{JSON}\n```<｜tool▁call▁end｜>\n"
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n```<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>",
    "deepseek_v31": "<｜tool▁calls▁begin｜>"
    f"<｜tool▁call▁begin｜>f<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜>"
    "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "kimi_k2": "<|tool_calls_section_begin|>"
    f"<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{JSON}<|tool_call_end|>"
    "<|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
    "<|tool_calls_section_end|>",
    "granite": f'<|tool_call|>[{{"name": "f", "arguments": {JSON}}}, {{"name": "g"}}]',
    "phi4_mini_json": f'functools[{{"name": "f", "arguments": {JSON}}}, {{"arguments": {{}}, "name": "g"}}]',
    "bare_list": f'[{{"name": "f", "parameters": {JSON}}}, {{"name": "g", "parameters": {{}}}}]',
    "openai": f"<|channel|>commentary to=functions.f <|constrain|>json<|message|>{JSON}<|call|>"
    "<|start|>assistant to=functions.g<|channel|>commentary<|message|>{}<|call|>",
}
OTHER_FORMS = {
    "mistral": f'[TOOL_CALLS] [{{"name": "f", "arguments": {JSON}}}, {{"name": "g", "arguments": {{}}}}]',
    "llama3_json": f'<|python_tag|>{{"type": "function", "name": "f", "parameters": {JSON}}};'
    '{"name": "g", "parameters": {}}',
    "granite": f'<tool_call>[{{"name": "f", "arguments": {JSON}}}, {{"name": "g"}}]</tool_call>',
    "phi4_mini_json": f'<|tool_call|>[{{"name": "f", "arguments": {JSON}}}, {{"name": "g"}}]<|/tool_call|>',
    "pythonic": f"<|python_start|>[f({PYTHON}), g()]<|python_end|>",
    "qwen3_coder": "<function=f>"
    + "".join(f"<parameter={k}>{v}" for k, v in XML.items())
    + "</function><function=g></function>",
}
ANY_FORM = [*CALLS.items(), *OTHER_FORMS.items()]
