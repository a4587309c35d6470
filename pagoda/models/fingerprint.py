"""Whether two hosts serve the same model."""

from __future__ import annotations

import hashlib
from pathlib import Path

from pagoda.models.resolve import ModelFiles

_TEXT_FILES = ("*.json", "*.jinja", "*.model", "*.txt")
_WEIGHT_FILES = ("*.safetensors",)
_HEAD_BYTES = 2**16


def model_digest(files: ModelFiles) -> str:
    """SHA-256 of all that turns text into tokens and back, and of which tensors there are, in hex.

    Of files of weights their lengths and beginnings count, where safetensors and GGUF name the tensors; hosts that
    were given other values in the same shapes are not told apart.
    """
    digest = hashlib.sha256()
    if files.gguf is not None:
        _add_head(files.gguf, digest)
    elif files.directory is not None:
        for path in _matching(files.directory, _TEXT_FILES):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
        for path in _matching(files.directory, _WEIGHT_FILES):
            _add_head(path, digest)
    else:
        digest.update(files.model.encode())
    return digest.hexdigest()


def _matching(directory: Path, patterns: tuple[str, ...]) -> list[Path]:
    return sorted(path for pattern in patterns for path in directory.glob(pattern))


def _add_head(path: Path, digest: hashlib._Hash) -> None:
    digest.update(path.stat().st_size.to_bytes(8, "little"))
    with path.open("rb") as file:
        digest.update(file.read(_HEAD_BYTES))
