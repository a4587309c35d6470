# SPDX-License-Identifier: Apache-2.0
"""What stands for names of other servers' packages while their tests run against Pagoda."""

from __future__ import annotations

from typing import Any

import pytest


def not_applicable(what: str) -> Any:
    pytest.skip(f"{what} is part of the other server", allow_module_level=True)


class Absent:
    """A name of vLLM: it may be imported, inherited from and annotated with; who calls it is skipped."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self._name}.{name}")

    def __call__(self, *_: Any, **__: Any) -> Any:
        not_applicable(self._name)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (object,) if len(bases) == 1 else ()

    def __getitem__(self, _: Any) -> Absent:
        return self

    def __or__(self, _: Any) -> Any:
        return Any

    __ror__ = __or__

    def __iter__(self) -> Any:
        not_applicable(self._name)

    def __bool__(self) -> bool:
        return False
