# SPDX-License-Identifier: Apache-2.0
"""Declarations of figures: how a field of a report is merged over replicas, and how `/metrics` shows the field."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import zip_longest
from typing import Any, NamedTuple, TypeVar, get_type_hints

import msgspec

from pagoda.messages.ranges import capped

_Struct = TypeVar("_Struct", bound=msgspec.Struct)


def added(values: Sequence[Any]) -> Any:
    """The sum of numbers; of lists, the sums of their columns, where a short list counts as padded with zeros."""
    if any(isinstance(value, list) for value in values):
        return [capped(sum(column)) for column in zip_longest(*values, fillvalue=0)]
    return capped(sum(values))


class Figure(NamedTuple):
    """Metadata of one field, given as `Annotated[int, counter(...)]`."""

    is_counter: bool
    name: str = ""
    """The name in `/metrics`, without `pagoda_`; empty for a field that is not shown under a name of its own."""
    help_text: str = ""
    vllm: tuple[str, ...] = ()
    """vLLM's names for the figure, without `vllm:`. Fields that share a name are added up under it."""
    label: str = ""
    """The label that holds the index of an item, if the field is a list."""
    merge: Callable[[Sequence[Any]], Any] = added


gauge, counter = partial(Figure, False), partial(Figure, True)


@cache
def figures_of(kind: type) -> dict[str, tuple[Figure, ...]]:
    """The declared figures of a struct, by field, in order. A field shown under two names has two."""
    hints = get_type_hints(kind, include_extras=True)
    found = {
        name: tuple(one for one in getattr(hint, "__metadata__", ()) if isinstance(one, Figure))
        for name, hint in hints.items()
    }
    return {name: figures for name, figures in found.items() if figures}


def merged(parts: Sequence[_Struct]) -> _Struct:
    """One struct for several of one kind: each figure is merged, other fields are those of the first.

    `parts` must not be empty.
    """
    values = {
        field: figures[0].merge([getattr(part, field) for part in parts])
        for field, figures in figures_of(type(parts[0])).items()
    }
    return msgspec.structs.replace(parts[0], **values)


def without_gauges(part: _Struct) -> _Struct:
    """The counters of `part`; gauges have their defaults."""
    return msgspec.structs.replace(part, **_gauge_defaults(type(part)))


@cache
def _gauge_defaults(kind: type[msgspec.Struct]) -> dict[str, Any]:
    defaults = {field.name: field.default for field in msgspec.structs.fields(kind)}
    found = figures_of(kind).items()
    return {field: defaults[field] for field, figures in found if not figures[0].is_counter}
