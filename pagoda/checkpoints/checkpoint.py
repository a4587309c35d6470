# SPDX-License-Identifier: Apache-2.0
"""Files that hold the weights of a Hugging Face model directory."""

from __future__ import annotations

import json
from pathlib import Path

from pagoda.errors import ConfigError
from pagoda.files import read_regular

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_MAX_NAME_CHARS = 255


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files, in order of their names. Raises ConfigError if there are none, or one is missing."""
    index = directory / INDEX_FILE
    if index.exists():
        return sorted(set(read_index(index).values()))
    path = directory / SINGLE_FILE
    if not path.exists():
        raise ConfigError(
            f"{directory} has no weights that Pagoda reads: neither {SINGLE_FILE} nor {INDEX_FILE}."
        )
    return [path]


def read_index(path: Path) -> dict[str, Path]:
    """Returns the file of each tensor, by the index.
    Raises ConfigError: it is damaged, or names a file that is missing."""
    try:
        index = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON.") from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{path} has no weight_map from tensor names to files.")
    for name in weight_map.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise ConfigError(f"{path}: weight_map must name files beside it, got {name!r}.")
        if len(name) > _MAX_NAME_CHARS or "\0" in name or not (path.parent / name).is_file():
            raise ConfigError(f"{path} names {name[:_MAX_NAME_CHARS]!r}, which is missing.")
    return {tensor: path.parent / name for tensor, name in weight_map.items()}
