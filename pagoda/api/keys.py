"""Who may use a server: API keys, and the names by which operators tell them apart."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence

from pagoda.errors import ConfigError

_MARK = ":="
"""Between a name and its key. `=` alone may be a part of a key, of which nothing must become a name."""
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}")


class ApiKeys:
    """Some keys; only digests of them are kept."""

    def __init__(self, flags: Sequence[str] = ()) -> None:
        """`flags` are `KEY` or `NAME:=KEY`. One without a name is called by its place: `key1`, `key2` and so on.

        Raises:
            ConfigError: a key is empty or cannot be sent, a name is none, or two names or keys are the same.
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
        """Whether any key is asked for."""
        return bool(self._digests)

    @property
    def names(self) -> tuple[str, ...]:
        """Of all that requests may come with; without keys they come with the empty one."""
        return tuple(self._digests) or ("",)

    def name_of(self, authorization: str) -> str | None:
        """Whose key an `Authorization` header has; empty if none is asked for, None if it has none of them.

        It takes as long whichever it is.
        """
        if not self._digests:
            return ""
        scheme, _, given = authorization.partition(" ")
        digest = _digest(given.strip())
        found = None
        for name, own in self._digests.items():
            if hmac.compare_digest(digest, own):
                found = name
        return found if scheme.lower() == "bearer" else None


def _parts(flag: str, place: int) -> tuple[str, str]:
    """Name and key. What is refused is not quoted: it may be a key."""
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
            "--api-key must be of visible ASCII characters, with spaces between them at most; "
            "others may not arrive as they were sent."
        )
    return name, key


def _digest(key: str) -> bytes:
    """Also of what clients send that is not valid UTF-8, which no key is."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


NO_KEYS = ApiKeys()
