"""API keys, and the names by which operators tell them apart."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence

from pagoda.errors import ConfigError

_MARK = ":="
"""Separator of a name and its key. `=` alone may occur in a key, and no part of a key must become a name."""
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}")


class ApiKeys:
    """The keys that a server accepts; only their digests are kept."""

    def __init__(self, flags: Sequence[str] = ()) -> None:
        """`flags` are `KEY` or `NAME:=KEY`. A key without a name is named by its position: `key1`, `key2`, ...

        Raises ConfigError: a key is empty or cannot be sent, a name is malformed, or two names or keys are the
        same.
        """
        self._digests: dict[str, bytes] = {}
        for place, flag in enumerate(flags, start=1):
            name, key = _parts(flag, place)
            if name in self._digests:
                raise ConfigError(f"--api-key gives the name {name} to two keys.")
            digest = _digest(key)
            if digest in self._digests.values():
                raise ConfigError(f"--api-key has the same key twice, the second time as {name}.")
            self._digests[name] = digest

    def __bool__(self) -> bool:
        return bool(self._digests)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all keys; without keys, requests have the empty name."""
        return tuple(self._digests) or ("",)

    def name_of(self, authorization: str, x_api_key: str | None = None) -> str | None:
        """The name of the key in an `Authorization` header, or without one in `x-api-key` (Anthropic's clients,
        and llama.cpp's); empty if no key is needed, None if the key is unknown.

        All keys are compared in constant time, so that the time tells nothing of the keys.
        """
        if not self._digests:
            return ""
        if x_api_key is not None and not authorization:
            authorization = f"Bearer {x_api_key}"
        scheme, _, given = authorization.partition(" ")
        digest = _digest(given.strip())
        found = None
        for name, own in self._digests.items():
            if hmac.compare_digest(digest, own):
                found = name
        return found if scheme.lower() == "bearer" else None


def _parts(flag: str, place: int) -> tuple[str, str]:
    """The name and the key of a flag. Errors do not quote the flag: it may be a key."""
    name, mark, key = flag.partition(_MARK)
    if not mark:
        name, key = f"key{place}", flag
    elif not _NAME.fullmatch(name):
        raise ConfigError(
            "--api-key must have a letter and up to 31 letters, digits, _ or - "
            f"before {_MARK}, as the name of the key."
        )
    if not key:
        raise ConfigError("--api-key must not be empty.")
    if not (key.isascii() and key.isprintable()) or key != key.strip():
        raise ConfigError(
            "--api-key must be of visible ASCII characters, with spaces only between them; "
            "HTTP may change others on their way."
        )
    return name, key


def _digest(key: str) -> bytes:
    """The SHA-256 of a key. Text of clients that is not valid UTF-8 has a digest too, which no key has."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


NO_KEYS = ApiKeys()
