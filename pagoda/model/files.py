# SPDX-License-Identifier: Apache-2.0
"""Files that a job writes; what goes wrong is one sentence."""

from __future__ import annotations

import errno
from pathlib import Path

from pagoda.errors import ConfigError


def write_text(path: Path, text: str) -> None:
    """Raises ConfigError: the disk is full or refuses."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise unwritable(path, error) from error


def unwritable(path: Path, error: Exception) -> ConfigError:
    """The sentence for a file that could not be written; safetensors turns errors of the system into text."""
    full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
    if full or "No space left" in str(error) or "quota exceeded" in str(error):
        return ConfigError("the disk is full: free some space, or write to another one.")
    return ConfigError(f"cannot write {path.name}: {getattr(error, 'strerror', None) or error}.")
