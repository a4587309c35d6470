# SPDX-License-Identifier: Apache-2.0
"""Fields of options: their values, and which of them are given."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar, get_args, get_type_hints

import msgspec

from pagoda.errors import ConfigError
from pagoda.ipc.amounts import parse_bytes
from pagoda.llm.flag_hints import hint

T = TypeVar("T")


def checked(options: T) -> T:
    """The same options, with every value of the type that its field says, and amounts of memory in bytes."""
    kind, given = type(options), dict(vars(options))
    for name, value in given.items():
        if name.endswith("_bytes") and isinstance(value, str):
            try:
                given[name] = parse_bytes(value)
            except ValueError as error:
                raise ConfigError(f"{flag_of(name)} {error}, got {value!r}.") from None
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        rule, _, place = str(error).replace("`", "").partition(" - at $.")
        rule = rule.removeprefix("Expected ").partition(", got ")[0].replace(" | null", "")
        if rule.startswith("Invalid enum value"):
            rule = f"one of {', '.join(_choices(get_type_hints(kind)[place]))}"
        said = f"{flag_of(place)} must be {rule}, got {given[place]!r}."
        raise ConfigError(said + hint(flag_of(place), given[place])) from None


def _choices(hint: object) -> list[str]:
    """The values of a Literal, which may stand beside None."""
    return [
        choice
        for value in get_args(hint)
        for choice in (_choices(value) if get_args(value) else [str(value)])
        if value is not type(None)
    ]


def given_fields(options: Any) -> list[str]:
    """The names of the fields that have another value than the default."""
    return [
        field.name for field in fields(options) if getattr(options, field.name) != field.default
    ]


def require(options: Any, *needs: tuple[str, str, bool]) -> None:
    """Checks what fields need, each where it has another value than the default: (field, need, is it there).

    Raises ConfigError if a need is not met.
    """
    given = given_fields(options)
    for name, need, is_met in needs:
        if name in given and not is_met:
            raise ConfigError(f"{flag_of(name)} needs {need}.")


def shared(options: Any, config: type[msgspec.Struct], prefix: str = "") -> dict[str, Any]:
    """The fields of a configuration that options have under the same names, less a prefix, and that are not
    None."""
    values = {name: getattr(options, prefix + name, None) for name in config.__struct_fields__}
    return {name: value for name, value in values.items() if value is not None}


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")
