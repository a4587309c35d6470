# SPDX-License-Identifier: Apache-2.0
"""YAML files that commands read; an error names the file and the line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

from pagoda.errors import ConfigError
from pagoda.files import read_file

T = TypeVar("T")
Place = tuple[str | int, ...]
"""Keys and indices that lead to a value."""

_MOST_NESTED = 32
_PLAIN = tuple(f"tag:yaml.org,2002:{it}" for it in ("str", "int", "float", "bool", "null"))
"""Kinds of values; dates, binary data and the like are none."""
_STEP = re.compile(r"\.([^.\[\]`]+)|\[(\d+)\]")
"""One step of the path by which msgspec names a value."""


class _Loader(yaml.SafeLoader):
    """Reads 8e9 as a number, as YAML 1.2 and JSON do."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)


class YamlFile:
    """Values of a YAML file, and the lines in which they stand."""

    def __init__(self, path: Path, flag: str) -> None:
        """Raises ConfigError: the file cannot be read, is no YAML, names a key twice, or has aliases."""
        self.path = path
        self._name = f"{flag} {path}"
        self._lines: dict[Place, int] = {(): 1}
        loader = None
        try:
            loader = _Loader(read_file(path, flag))
            root = loader.get_single_node()
            if root is not None:
                self._note(root)
            value = None if root is None else loader.construct_document(root)
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            problem = getattr(error, "problem", None) or "characters stand there that cannot"
            where = "" if mark is None else f", line {mark.line + 1}"
            raise ConfigError(f"{self._name}{where}: this is not valid YAML ({problem}).") from None
        except RecursionError:
            raise ConfigError(f"{self._name}: values are nested too deeply.") from None
        except ValueError as error:
            raise ConfigError(f"{self._name}: this is not valid YAML ({error}).") from None
        finally:
            if loader is not None:
                loader.dispose()
        self.value = self.convert(value, dict[str, Any])

    def _note(self, root: yaml.Node) -> None:
        """Takes note of lines.

        Raises ConfigError: there is a name twice, of which YAML would drop one, an alias, by which a short file
        has endless values, or a value of another kind than JSON has.
        """
        seen: set[int] = set()
        waiting: list[tuple[yaml.Node, Place]] = [(root, ())]
        while waiting:
            node, place = waiting.pop()
            self._lines.setdefault(place, node.start_mark.line + 1)
            if id(node) in seen:
                raise self.error(place, "write values out, without aliases")
            if len(place) > _MOST_NESTED:
                raise self.error(place, "values are nested too deeply")
            seen.add(id(node))
            if isinstance(node, yaml.MappingNode):
                for key, value in node.value:
                    line = key.start_mark.line + 1
                    if not isinstance(key, yaml.ScalarNode) or key.tag != _PLAIN[0]:
                        problem = "names are texts; write others in quotes"
                        raise ConfigError(f"{self._name}, line {line}: {problem}.")
                    inner = (*place, key.value)
                    if inner in self._lines:
                        problem = f"{key.value!r} is there twice"
                        raise ConfigError(f"{self._name}, line {line}: {problem}.")
                    self._lines[inner] = line
                    waiting.append((value, inner))
            elif isinstance(node, yaml.SequenceNode):
                inner_nodes = enumerate(node.value)
                waiting += [(value, (*place, index)) for index, value in inner_nodes]
            elif node.tag not in _PLAIN:
                raise self.error(place, f"write {node.value!r} in quotes")

    def error(self, place: Place, sentence: str) -> ConfigError:
        """An error that names the line of a value, or of what it stands in; `sentence` lacks its full stop."""
        while place not in self._lines:
            place = place[:-1]
        return ConfigError(f"{self._name}, line {self._lines[place]}: {sentence}.")

    def convert(self, value: object, kind: type[T], place: Place = ()) -> T:
        """The value at a place as an object of `kind`. Raises ConfigError with its line and field."""
        try:
            return msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            problem, _, path = str(error).partition(" - at `$")
            known = path.partition("[...]")[0]
            inner = (*place, *(name or int(index) for name, index in _STEP.findall(known)))
            field = ".".join(map(str, inner)) or "the file"
            raise self.error(inner, f"{field}: {problem}") from None

    def section(self, name: str, kind: type[T]) -> dict[str, T]:
        """The objects by name of a mapping in the file; none if it is not there. Raises ConfigError."""
        values = self.convert(self.value.get(name) or {}, dict[str, Any], (name,))
        return {key: self.convert(it, kind, (name, key)) for key, it in values.items()}
