# SPDX-License-Identifier: Apache-2.0
"""The types of arguments by the schemas of tools, for formats that write values without quotes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pagoda.api.parsers.json_text import dumped
from pagoda.api.parsers.literals import read_literal
from pagoda.text.grammars.schema_types import type_name, types_of

_STRING, _INTEGER = frozenset({"string"}), frozenset({"integer"})


class ToolSchemas:
    """The tools of a request by name."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        """`tools` are in OpenAI's form, and checked."""
        functions = [tool["function"] for tool in tools]
        self._parameters = {f["name"]: f.get("parameters") or {} for f in functions}

    def meant(self, name: str) -> str:
        """The tool that a model calls `name`: models put namespaces in front of names, and leave them out."""
        name = name.strip()
        if name in self._parameters:
            return name
        bare = name.removeprefix("functions.")
        others = (f"functions.{name}", bare, bare.rpartition(".")[2], bare.removesuffix(".call"))
        return next((other for other in others if other in self._parameters), bare)

    def offers(self, name: str) -> bool:
        return self.meant(name) in self._parameters

    def takes(self, tool: str, argument: str) -> bool:
        """The tool is one that was offered, and declares the argument or does not say which it has."""
        properties = self._parameters.get(tool, {"properties": {}}).get("properties")
        return not isinstance(properties, dict) or argument in properties

    def is_string(self, tool: str, argument: str) -> bool:
        """The argument is certainly a string; so is one that the schema does not know."""
        return self._types(tool, argument) == _STRING

    def value(self, tool: str, argument: str, text: str) -> str:
        """The JSON text of an argument that was written as `text`: a string unless its schema says otherwise."""
        types = self._types(tool, argument)
        if types == _STRING:
            return quoted(text)
        try:
            value = read_literal(text)
            if types == _INTEGER and isinstance(value, float) and value.is_integer():
                value = int(value)
            name = type_name(value)
            fits = not types or name in types or (name == "integer" and "number" in types)
            return dumped(value) if fits else quoted(text)
        except (ValueError, TypeError, RecursionError):
            return quoted(text)

    def _types(self, tool: str, argument: str) -> frozenset[str]:
        """Types that the argument may have; empty if its schema does not say."""
        parameters = self._parameters.get(tool, {})
        properties = parameters.get("properties")
        schema = properties.get(argument) if isinstance(properties, dict) else None
        return _STRING if schema is None else types_of(schema, parameters)


def quoted(text: str) -> str:
    """The JSON string of a text."""
    return json.dumps(text, ensure_ascii=False)
