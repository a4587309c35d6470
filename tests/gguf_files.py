# SPDX-License-Identifier: Apache-2.0
"""Writing of GGUF files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gguf import GGUFWriter


def add_values(writer: GGUFWriter, values: Mapping[str, Any]) -> None:
    """Metadata, each value as its type says."""
    add = {
        list: writer.add_array,
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
    }
    for key, value in values.items():
        add[type(value)](key, value)


def finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
