# SPDX-License-Identifier: Apache-2.0
"""Columns of sampling tables are those of the native kernels and of the kernels for GPUs, with the same types."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pagoda.backend.sampling_table import COLUMNS

CSRC = Path(__file__).parents[2] / "csrc"
CPP_TYPES = {"b": "int8_t", "f": "float", "q": "int64_t", "Q": "uint64_t"}
LISTS = {"stops", "bias_ids", "biases", "num_biases", "seen", "counts", "num_seen"}
"""Columns of lists in host memory, which the device gets one by one with their rows."""


def test_the_native_kernels_have_the_same_columns_of_the_same_types() -> None:
    source = (CSRC / "sampling_table.h").read_text(encoding="utf-8")
    bound = dict(re.findall(r'bind\((\w+)_, "(\w+)"\);', source))
    assert bound == {name: name for name in [*COLUMNS, "mask"]}
    declared = {
        name.strip(" *").removesuffix("_"): kind
        for kind, names in re.findall(r"^ +const (\w+) ?(\*[^;(]+);", source, re.MULTILINE)
        for name in names.split(",")
    }
    wanted = {name: CPP_TYPES[typecode] for name, typecode in COLUMNS.items()}
    assert declared == wanted | {"mask": "uint32_t"}
    read = set(re.findall(r"(\w+)_\[slot\]", source))
    assert read == COLUMNS.keys()


def test_the_kernels_for_gpus_have_the_same_columns() -> None:
    pytest.importorskip("triton", reason="the kernels are Triton's")
    from pagoda.plugins.cuda.kernels import sampler, sampling

    assert {*sampler.PACKED} | LISTS == COLUMNS.keys()
    assert not {*sampler.PACKED} & LISTS
    assert len(sampler.PACKED) == sampling.COLUMNS
    places = {"lowest_power": "LOWEST", "num_stops": "FORBIDS"}
    for place, name in enumerate(sampler.PACKED):
        assert getattr(sampling, places.get(name, name.upper())) == place
