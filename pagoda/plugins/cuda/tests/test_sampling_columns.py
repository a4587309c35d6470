# SPDX-License-Identifier: Apache-2.0
"""Columns of sampling tables that the kernels for GPUs read."""

from __future__ import annotations

import re
from pathlib import Path

from pagoda.backend.sampling_table import COLUMNS, LISTS
from pagoda.plugins.cuda.kernels import sampling


def test_the_kernels_for_gpus_read_every_column_that_they_are_given() -> None:
    source = Path(sampling.__file__).read_text(encoding="utf-8")
    read = dict(
        re.findall(r'^(_\w+) = tl.constexpr\(PACKED.index\("(\w+)"\)\)', source, re.MULTILINE)
    )
    # How many likeliest tokens a row reports is read where rows are packed.
    assert {*read.values()} == {*sampling.PACKED} - {"logprobs"}
    assert COLUMNS.keys() - {*sampling.PACKED} == {*LISTS, "num_biases", "num_seen"}
    shorter = {"_LOWEST": "lowest_power", "_FORBIDS": "num_stops"}
    assert all(column == shorter.get(name, name[1:].lower()) for name, column in read.items())
    assert all(len(re.findall(rf"\b{name}\b", source)) > 1 for name in read)
