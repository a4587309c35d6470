# SPDX-License-Identifier: Apache-2.0
"""YAML files whose mistakes are named with their lines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

from pagoda.errors import ConfigError
from pagoda.files import read_file

T = TypeVar("T")
Place = tuple[str | int, ...]
"""Keys and indices that lead to a value."""


class YamlFile:
    """Values of a YAML file, and the lines in which they stand."""

    def __init__(self, path: Path, flag: str) -> None:
        """Raises ConfigError: the file cannot be read, is no YAML, or names a key twice."""
        self.path = path
        text = read_file(path, flag).decode(errors="replace")
        self._lines: dict[Place, int] = {(): 1}
        try:
            root = yaml.compose(text, Loader=yaml.SafeLoader)
            self.value: Any = yaml.safe_load(text)
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            line = 1 if mark is None else mark.line + 1
            problem = getattr(error, "problem", None) or "it is no YAML"
            raise ConfigError(f"{path} line {line}: {problem}.") from None
        if root is not None:
            self._note(root, ())
        if not isinstance(self.value, Mapping):
            raise self.error((), "a mapping of names to values is expected")

    def _note(self, node: yaml.Node, place: Place) -> None:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                inner = (*place, key.value)
                if inner in self._lines:
                    raise ConfigError(
                        f"{self.path} line {key.start_mark.line + 1}: {key.value} stands twice."
                    )
                self._lines[inner] = key.start_mark.line + 1
                self._note(value, inner)
        elif isinstance(node, yaml.SequenceNode):
            for index, value in enumerate(node.value):
                self._lines[(*place, index)] = value.start_mark.line + 1
                self._note(value, (*place, index))

    def error(self, place: Place, sentence: str) -> ConfigError:
        """An error that names the line of a value, or of what it stands in; `sentence` lacks its full stop."""
        while place not in self._lines:
            place = place[:-1]
        return ConfigError(f"{self.path} line {self._lines[place]}: {sentence}.")

    def convert(self, value: object, kind: type[T], place: Place = ()) -> T:
        """The value at a place as an object of `kind`. Raises ConfigError with its line."""
        try:
            return msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            what, _, where = str(error).partition(" - at `$")
            inner = tuple(part for part in where.rstrip("`").split(".") if part)
            field = inner[0].partition("[")[0] if inner else ""
            name = ".".join(str(part) for part in (*place, field) if part != "")
            prefix = f"{name}: " if name else ""
            raise self.error((*place, field) if field else place, f"{prefix}{what}") from None

    def section(self, name: str, kind: type[T]) -> dict[str, T]:
        """The objects by name of a mapping in the file; none if it is not there. Raises ConfigError."""
        values = self.value.get(name) or {}
        if not isinstance(values, Mapping):
            raise self.error((name,), f"{name} is a mapping of names to values")
        return {str(key): self.convert(it, kind, (name, str(key))) for key, it in values.items()}
