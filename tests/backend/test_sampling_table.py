# SPDX-License-Identifier: Apache-2.0
"""Columns of sampling tables are those of the native kernels, with the same types."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pagoda.backend.cpu import native
from pagoda.backend.sampling_table import COLUMNS, LISTS
from pagoda.devices import BackendUnavailableError

CSRC = Path(__file__).parents[2] / "csrc"
CPP_TYPES = {"b": "int8_t", "f": "float", "q": "int64_t", "Q": "uint64_t"}


def test_the_native_kernels_have_the_same_columns_of_the_same_types() -> None:
    source = (CSRC / "sampler.h").read_text(encoding="utf-8")
    declared = re.findall(r"^ +(NUMBER|LIST)\((\w+), (\w+)\)", source, re.MULTILINE)
    assert {name for kind, _, name in declared if kind == "LIST"} == {*LISTS}
    numbers = {name: kind for list_or_number, kind, name in declared if list_or_number == "NUMBER"}
    wanted = {name: CPP_TYPES[code] for name, code in COLUMNS.items() if name not in LISTS}
    assert numbers == wanted


def test_native_kernels_of_other_columns_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    native.load_native()
    monkeypatch.setattr(native, "COLUMNS", {**COLUMNS, "smoothing": "f"})
    with pytest.raises(BackendUnavailableError, match="of another version; install"):
        native.load_native()
