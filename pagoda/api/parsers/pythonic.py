"""Tool calls as a Python list of calls with keyword arguments: `[f(a=1), g(b="x")]` (Llama 3.2, Llama 4)."""

from __future__ import annotations

import ast
import json

from pagoda.api.parsers.deltas import AnswerBuilder
from pagoda.api.parsers.schemas import ToolSchemas
from pagoda.api.parsers.source import Steps, Tags, TextSource

_BEGIN, _END = "<|python_start|>", "<|python_end|>"
_JSON_NAMES = {"true": True, "false": False, "null": None}
_FAULTS = (ValueError, SyntaxError, TypeError, MemoryError, RecursionError)


def read_pythonic(source: TextSource, answer: AnswerBuilder, tools: ToolSchemas) -> Steps[None]:
    """A list from the beginning, or between `<|python_start|>` and `<|python_end|>`."""
    del tools
    taken = yield from source.spaces()
    while True:
        if (yield from source.accept(_BEGIN)):
            taken += _BEGIN + (yield from source.spaces())
        if (yield from source.accept("[")):
            yield from _read_calls(source, answer, taken + "[")
            yield from source.accept(_END)
        else:
            answer.add_content(taken)
        if (yield from source.until(Tags(_BEGIN), answer.add_content)) is None:
            return
        source.put_back(_BEGIN)
        taken = ""


def _read_calls(source: TextSource, answer: AnswerBuilder, taken: str) -> Steps[None]:
    """Reads the calls of a list; from the first element on that is none, text is content."""
    scanner = _Scanner()
    held: list[str] = []
    while text := (yield from source.take_some()):
        found = scanner.scan(text)
        if found is None:
            held.append(text)
            continue
        source.put_back(text[found + 1 :])
        held.append(text[:found])
        element = "".join(held)
        call = _parse_call(element)
        if call is None:
            answer.add_content(taken + element + text[found])
            return
        answer.begin_call(call[0])
        answer.add_arguments(call[1])
        answer.end_call()
        taken, held = "", []
        if text[found] == "]":
            return
    answer.add_content(taken + "".join(held))


class _Scanner:
    """Finds commas between the elements of a Python list, and its end, in a text that comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._quote = ""
        self._escaped = False

    def scan(self, piece: str) -> int | None:
        """The index of the next comma or of the closing bracket."""
        for index, character in enumerate(piece):
            if self._quote:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == self._quote:
                    self._quote = ""
            elif character in "'\"":
                self._quote = character
            elif character in "([{":
                self._depth += 1
            elif self._depth == 0 and character in ",]":
                return index
            elif character in ")]}":
                self._depth -= 1
        return None


def _parse_call(text: str) -> tuple[str, str] | None:
    """Name and arguments (as JSON text) of a Python call with keyword arguments."""
    try:
        call = ast.parse(text.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        name = ast.unparse(call.func)
        if not all(part.isidentifier() for part in name.split(".")):
            return None
        arguments = {str(k.arg): _value(k.value) for k in call.keywords if k.arg is not None}
        if len(arguments) < len(call.keywords):
            return None
        return name, json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except _FAULTS:
        return None


def _value(node: ast.expr) -> object:
    """The value of a literal, the names of JSON among them. Raises ValueError: it is no literal."""
    if isinstance(node, ast.Name) and node.id in _JSON_NAMES:
        return _JSON_NAMES[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [None if key is None else _value(key) for key in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise ValueError("a key is not a string")
        return dict(zip(keys, map(_value, node.values), strict=True))
    return ast.literal_eval(node)
