# SPDX-License-Identifier: Apache-2.0
"""The file of `--api-keys-file`: one key a line, as JSON, with the SHA-256 of the key instead of the key.

    {"name":"alice","sha256":"2c26b4...","scopes":["answer"],"requests_per_minute":60}

Keys are made here, of 256 random bits, never by a person. One SHA-256 is right for these: NIST SP 800-63B
(5.1.2.2) asks for salts and slow hashes for secrets of fewer than 112 bits only. A slow hash, which passwords
need, would cost the server tens of milliseconds for each wrong key that anybody sends.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from pagoda.api.auth.keys import ApiKey
from pagoda.errors import ConfigError
from pagoda.files import open_regular

FLAG = "--api-keys-file"
_PREFIX = "pagoda_"
"""Beginning of every key, by which programs that look for lost secrets know them."""
_KEY_BYTES = 32
_MAX_FILE_BYTES = 16 << 20
_log = logging.getLogger("pagoda.api")
_decode = msgspec.json.Decoder(ApiKey).decode


def new_key() -> str:
    """A key of 256 random bits."""
    return _PREFIX + secrets.token_urlsafe(_KEY_BYTES)


def read_keys(path: Path) -> list[ApiKey]:
    """The keys of a file. Raises ConfigError: it cannot be read, others may write to it, or a line is no key."""
    try:
        with open(path, "rb", opener=open_regular) as file:
            _check_owner(path, os.fstat(file.fileno()))
            data = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{FLAG}: cannot read {path}: {error.strerror}.") from None
    if len(data) > _MAX_FILE_BYTES:
        raise ConfigError(f"{FLAG}: {path} is longer than {_MAX_FILE_BYTES >> 20} MiB.")
    return list(_keys_in(path, data))


def _keys_in(path: Path, data: bytes) -> Iterator[ApiKey]:
    for number, line in enumerate(data.splitlines(), start=1):
        if line.strip():
            try:
                yield _decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise ConfigError(f"{FLAG}: {path} line {number}: {error}.") from None


def _check_owner(path: Path, status: os.stat_result) -> None:
    """Raises ConfigError: others may write, and give themselves keys. Readers learn no key."""
    if status.st_uid not in (0, os.geteuid()):
        raise ConfigError(f"{FLAG}: {path} must belong to the user of the server or to root.")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(f"{FLAG}: others may write to {path}; `chmod 600` it.")
    if status.st_mode & stat.S_IROTH:
        _log.warning("%s: every user of this machine may read %s; `chmod 600` it", FLAG, path)


@contextmanager
def changed_keys(path: Path) -> Iterator[list[ApiKey]]:
    """The keys of a file, to be changed in place; the file is written anew, in one piece, if nothing is raised.
    A file that is not there has none. Raises ConfigError: as `read_keys`, or it cannot be written."""
    target = path.resolve()
    try:
        lock = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ConfigError(f"{FLAG}: cannot open {target.parent}: {error.strerror}.") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        keys = read_keys(target) if target.exists() else []
        yield keys
        _write(target, keys)
    finally:
        os.close(lock)


def _write(path: Path, keys: Sequence[ApiKey]) -> None:
    """Only the user may read the new file; a server that reads meanwhile sees the old one or the new one."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.writelines(_encoded(key) + b"\n" for key in keys)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise ConfigError(f"{FLAG}: cannot write {path}: {error.strerror}.") from None


def _encoded(key: ApiKey) -> bytes:
    """A line without limits that there are not."""
    fields = {
        name: value for name, value in msgspec.structs.asdict(key).items() if value is not None
    }
    return msgspec.json.encode({**fields, "scopes": sorted(key.scopes)})
