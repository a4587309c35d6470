# SPDX-License-Identifier: Apache-2.0
"""Values that models write in JSON or as Python's literals."""

from __future__ import annotations

import ast
import json
import warnings

from pagoda.api.parsers.json_text import mended

_JSON_NAMES = {"true": True, "false": False, "null": None}
_FAULTS = (ValueError, SyntaxError, TypeError, MemoryError, RecursionError)


def read_literal(text: str) -> object:
    """The value of a literal. Raises ValueError: the text is none."""
    for read in (json.loads, _python_value, _mended_value):
        try:
            value: object = read(text)
        except _FAULTS:
            continue
        return value
    raise ValueError("no literal")


def _mended_value(text: str) -> object:
    [value] = json.loads(mended(f"[{text}]", takes_words=False) or "")
    return value


def _python_value(text: str) -> object:
    # Warnings of escapes and numbers would be for whoever reads the log.
    with warnings.catch_warnings(action="ignore"):
        return _node_value(ast.parse(text.strip(), mode="eval").body)


def _node_value(node: ast.expr) -> object:
    """The value of a node, the names of JSON among them. Raises ValueError: it is no literal."""
    if isinstance(node, ast.Name) and node.id in _JSON_NAMES:
        return _JSON_NAMES[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_node_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [None if key is None else _node_value(key) for key in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise ValueError("a key is not a string")
        return dict(zip(keys, map(_node_value, node.values), strict=True))
    return ast.literal_eval(node)
