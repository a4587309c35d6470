# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import get_args

from pagoda.messages.kv_formats import KV_FORMATS, OTHER_NAMES, KVDtype, format_of


def test_the_flag_takes_every_format_by_its_names() -> None:
    assert {*get_args(KVDtype)} == {"auto", *KV_FORMATS, *OTHER_NAMES}
    assert KV_FORMATS.keys() >= {*OTHER_NAMES.values()}


def test_formats_are_found_by_their_dtypes() -> None:
    for name, row in KV_FORMATS.items():
        assert format_of(f"torch.{row.dtype}") is row
        assert row.name == name


def test_scales_are_bytes_of_a_vector() -> None:
    assert KV_FORMATS["int8"].vector_bytes(128) == 132
    assert KV_FORMATS["fp8"].vector_bytes(128) == 128
    assert KV_FORMATS["bfloat16"].vector_bytes(128) == 256
