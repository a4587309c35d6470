# SPDX-License-Identifier: Apache-2.0
"""Headers of safetensors files: what is stored where. The bytes of tensors are not read.

The format is Hugging Face's (https://github.com/huggingface/safetensors#format): the length of a JSON object in 8
bytes, the object, and the tensors' bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from pagoda.errors import ConfigError
from pagoda.files import open_regular

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 2**27
_METADATA = "__metadata__"

_Size = Annotated[int, Meta(ge=0)]


class StoredTensor(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[_Size, ...]
    data_offsets: tuple[_Size, _Size]
    """First byte and the one behind the last, counted from the end of the header."""


_decoder = msgspec.json.Decoder(dict[str, Any])


def read_header(path: Path) -> tuple[Mapping[str, StoredTensor], int]:
    """The tensors of a file by their names, and the place in the file from which their offsets count.

    Raises ConfigError: the file cannot be read, its header is damaged, or promises more than the file has."""
    try:
        with open(path, "rb", opener=open_regular) as file:
            room = path.stat().st_size - _LENGTH_BYTES
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if length > min(room, _MAX_HEADER_BYTES):
                raise ValueError("the header is cut off")
            entries = _decoder.decode(file.read(length))
        entries.pop(_METADATA, None)
        tensors = msgspec.convert(entries, dict[str, StoredTensor])
    except (OSError, ValueError, RecursionError) as error:
        raise _incomplete(path) from error
    for tensor in tensors.values():
        start, end = tensor.data_offsets
        if not start <= end <= room - length:
            raise _incomplete(path)
    return tensors, _LENGTH_BYTES + length


def _incomplete(path: Path) -> ConfigError:
    return ConfigError(f"{path} is not a complete safetensors file; fetch it again.")
