# SPDX-License-Identifier: Apache-2.0
"""The configuration of the tier: the options, and the directory that they name, checked before anything starts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from pagoda.errors import ConfigError
from pagoda.files import check_quota
from pagoda.ipc.bounded import within
from pagoda.messages.worker_config import KVTierConfig
from pagoda.plugins.disk_tier.objects import OPEN_TIMEOUT_S

if TYPE_CHECKING:
    from pagoda.plugins.disk_tier.options import (
        DiskOptions,  # which imports the command line's library
    )

TIER = "disk"
"""Name of the tier."""
MIN_TOUCHES = "min_touches"
"""Setting: a block is written once this many requests have passed through it."""


def configure(options: DiskOptions, model: str | None) -> KVTierConfig:
    """The tier that options, some of them given, ask for; `model` is that of a `WorkerConfig`, or None if each
    worker is to look at the directory on its own host.

    Raises ConfigError if an option lacks another, or as `check_kv_directory` does.
    """
    path, quota_bytes = options.kv_disk_path, options.kv_disk_bytes
    if path is None:
        flag = "--kv-disk-min-touches" if quota_bytes is None else "--kv-disk-bytes"
        raise ConfigError(f"{flag} needs --kv-disk-path.")
    if quota_bytes is None:
        raise ConfigError("--kv-disk-path needs --kv-disk-bytes, such as 100GiB.")
    quota_bytes = int(quota_bytes)  # amounts of memory are in bytes already
    if model is not None:
        directory = check_kv_directory(path, quota_bytes, model)
    elif os.path.isabs(path):
        directory = path
    else:
        raise ConfigError(
            f"--kv-disk-path must be an absolute path where workers are on several hosts, got {path!r}."
        )
    return KVTierConfig(directory, quota_bytes, {MIN_TOUCHES: options.kv_disk_min_touches})


def check_kv_directory(path: str, quota_bytes: int, model: str) -> str:
    """The absolute path of `path`, which need not exist yet; `model` is that of a `WorkerConfig`.

    Raises ConfigError if `path` cannot hold KV blocks, or its disk does not answer.
    """
    if not path or "\0" in path:
        raise ConfigError(f"--kv-disk-path must be a directory, got {path!r}.")
    try:
        return within(OPEN_TIMEOUT_S, lambda: _existing_directory(path, quota_bytes, model))
    except TimeoutError:
        raise ConfigError(
            f"--kv-disk-path {path!r} cannot be used: its disk has not answered for {OPEN_TIMEOUT_S:g} s."
        ) from None


def _existing_directory(path: str, quota_bytes: int, model: str) -> str:
    directory = os.path.realpath(os.path.expanduser(path))
    model_directory = os.path.realpath(model)
    if os.path.isdir(model_directory) and Path(directory).is_relative_to(model_directory):
        raise ConfigError(f"--kv-disk-path {path!r} lies in the model's directory; name another.")
    existing = directory
    while not os.path.lexists(existing):
        existing = os.path.dirname(existing)
    if not os.path.isdir(existing):
        raise ConfigError(f"--kv-disk-path {path!r} must be a directory, but {existing} is a file.")
    if not os.access(existing, os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
        raise ConfigError(
            f"--kv-disk-path {path!r} cannot be used: this user may not read and write {existing}."
        )
    check_quota(Path(directory), quota_bytes, "--kv-disk-bytes")
    return directory
