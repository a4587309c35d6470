"""Checks of the directory for KV blocks, before anything starts."""

from __future__ import annotations

import os
from pathlib import Path

from pagoda.errors import ConfigError
from pagoda.kv.disk_policy import check_quota


def check_kv_directory(path: str, quota_bytes: int, model: str) -> str:
    """The absolute path of `path`, which need not exist yet; `model` is that of a `WorkerConfig`.

    Raises:
        ConfigError: it is no place for KV blocks.
    """
    if not path or "\0" in path:
        raise ConfigError(f"--kv-disk-path must be a directory, got {path!r}.")
    directory = os.path.realpath(os.path.expanduser(path))
    model_directory = os.path.realpath(model)
    if os.path.isdir(model_directory) and Path(directory).is_relative_to(model_directory):
        raise ConfigError(f"--kv-disk-path {path!r} lies in the model's directory; name another.")
    existing = _nearest_existing(directory)
    if not os.path.isdir(existing):
        raise ConfigError(f"--kv-disk-path {path!r} must be a directory, but {existing} is a file.")
    if not os.access(existing, os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
        raise ConfigError(
            f"--kv-disk-path {path!r} cannot be used: this user may not read and write {existing}."
        )
    check_quota(Path(directory), quota_bytes)
    return directory


def _nearest_existing(path: str) -> str:
    """The path itself, or the lowest directory above it that is there."""
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    return path
