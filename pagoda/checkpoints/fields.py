# SPDX-License-Identifier: Apache-2.0
"""Typed access to named values whose author may have made mistakes: JSON objects, and metadata of GGUF files."""

from __future__ import annotations

import difflib
import json
import re
import sys
from collections.abc import Mapping
from typing import NoReturn, TypeVar

from pagoda.errors import ConfigError
from pagoda.whole_numbers import whole_numbers

T = TypeVar("T")

_LARGEST = 2**31 - 1
"""Largest size or number of anything: tensors are indexed, and tokens counted, in 32 bits."""


class Fields:
    """Values by name; every error is a ConfigError that names the file and the field. None counts as absent."""

    def __init__(self, values: Mapping[str, object], source: str, prefix: str = "") -> None:
        self.values = values
        self.source = source
        self._prefix = prefix

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def refuse(self, name: str, rule: str) -> NoReturn:
        value = repr(self.values.get(name))
        shown = value if len(value) <= 80 else f"{value[:80]} ..."
        raise ConfigError(f"{self.source}: {self._prefix}{name} {rule}, got {shown}.")

    def pattern(self, name: str, pattern: str) -> re.Pattern[str]:
        """A regular expression, perhaps behind `re:`, of a field. Raises ConfigError: it is none."""
        try:
            return re.compile(pattern.removeprefix("re:"))
        except (re.error, RecursionError, OverflowError):
            self.refuse(name, f"must hold valid regular expressions, not {pattern!r}")

    def amount(self, name: str, default: float | None = None) -> float:
        value = self._get(name, (int, float), "a number", default)
        if not abs(value) <= sys.float_info.max:
            self.refuse(name, "must be a finite number")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._get(name, (int, float), "a positive number", default)
        if not 0 < value <= sys.float_info.max:
            self.refuse(name, "must be a positive number")
        return float(value)

    def count(self, name: str, default: int | None = None) -> int:
        """An integer from 0 on."""
        value = self._get(name, (int,), "a whole number", default)
        if value < 0:
            self.refuse(name, "must not be negative")
        return self._bounded(name, value, _LARGEST)

    def positive(self, name: str, default: int | None = None, *, most: int = _LARGEST) -> int:
        value = self._get(name, (int,), "a positive integer", default)
        if value <= 0:
            self.refuse(name, "must be a positive integer")
        return self._bounded(name, value, most)

    def _bounded(self, name: str, value: int, most: int) -> int:
        if value > most:
            self.refuse(name, f"must be at most {most}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.refuse(name, "must be true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        return self._get(name, (str,), "a string", default)

    def table(self, name: str) -> Fields | None:
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.refuse(name, "must be a JSON object")
        return Fields(value, self.source, f"{self._prefix}{name}.")

    def updated(self, values: Mapping[str, object]) -> Fields:
        """The values, of which some are other ones."""
        return Fields({**self.values, **values}, self.source, self._prefix)

    def below(self, prefix: str) -> Fields:
        """The values whose names begin with `prefix`, by the rest of their names."""
        values = {
            name.removeprefix(prefix): value
            for name, value in self.values.items()
            if name.startswith(prefix)
        }
        return Fields(values, self.source, f"{self._prefix}{prefix}")

    def require(self, name: str, neutral: object) -> None:
        """Refuses any value but an absent one, null and `neutral`, which leave the arithmetic as it is."""
        if self.values.get(name) is not None and self.values[name] != neutral:
            self.refuse(name, f"is not supported; it must be absent or {json.dumps(neutral)}")

    def optional_number(self, name: str) -> float | None:
        return None if self.values.get(name) is None else self.number(name)

    def texts(self, name: str, default: list[str] | None = None) -> list[str]:
        return self._list(name, str, "strings", default)

    def integers(self, name: str) -> list[int]:
        value = whole_numbers(self.values.get(name))
        return Fields({name: value}, self.source, self._prefix)._list(name, int, "whole numbers")

    def numbers(self, name: str) -> list[float]:
        numbers = self._list(name, float, "numbers")
        if any(number != number for number in numbers):
            self.refuse(name, "must be a list of numbers")
        return numbers

    def amounts(self, name: str) -> list[float]:
        """Whole or other numbers, all of them positive."""
        values: list[object] = self._get(name, (list,), "a list of numbers", None)
        numbers: list[float] = []
        for value in values:
            if (
                not isinstance(value, (int, float))
                or isinstance(value, bool)
                or not 0 < value < 1e30
            ):
                self.refuse(name, "must be a list of positive numbers")
            numbers.append(float(value))
        return numbers

    def _list(self, name: str, kind: type[T], rule: str, default: list[T] | None = None) -> list[T]:
        value = self._get(name, (list,), f"a list of {rule}", default)
        if any(type(item) is not kind for item in value):
            self.refuse(name, f"must be a list of {rule}")
        return value

    def _get(self, name: str, types: tuple[type, ...], kind: str, default: T | None) -> T:
        value = self.values.get(name)
        if value is None:
            if default is None:
                raise ConfigError(f"{self.source} lacks {self._prefix}{name}, {kind}.")
            return default
        if int in types and float not in types:
            value = whole_numbers(value)
        if not isinstance(value, types) or isinstance(value, bool):
            self.refuse(name, f"must be {kind}")
        return value  # type: ignore[return-value]


def three_nearest(name: str, known: Mapping[str, str]) -> str:
    """The three nearest of `known`, which has what is said by what is compared: "A, B and C"."""
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.0)
    *others, last = dict.fromkeys(known[it] for it in near)
    return f"{', '.join(others)} and {last}" if others else last
