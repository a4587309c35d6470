# SPDX-License-Identifier: Apache-2.0
"""Tables of inputs that one case tries, row by row."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any


def each_row(
    names: str | tuple[str, ...], rows: Iterable[Any]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a test one case that is called with every row, as `pytest.mark.parametrize` makes a case of each.

    Raises:
        ExceptionGroup: what the rows that failed raised, each with its row as a note.
    """
    table = [
        dict(zip(names, row, strict=True) if isinstance(names, tuple) else [(names, row)])
        for row in rows
    ]

    def decorate(test: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(test)
        fixtures = [it for name, it in signature.parameters.items() if name not in table[0]]

        @functools.wraps(test)
        async def try_all(**given: Any) -> None:
            errors = []
            for row in table:
                try:
                    outcome = test(**given, **row)
                    if inspect.isawaitable(outcome):
                        await outcome
                except Exception as error:
                    error.add_note(f"row: {row!r:.500}")
                    errors.append(error)
            if errors:
                raise ExceptionGroup(f"{len(errors)} of {len(table)} rows", errors)

        try_all.__signature__ = signature.replace(parameters=fixtures)  # type: ignore[attr-defined]
        return try_all

    return decorate
