# SPDX-License-Identifier: Apache-2.0
"""API keys: who a client is, and what it may do."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Annotated

import msgspec

from pagoda.errors import ConfigError
from pagoda.telemetry.request_tracker import LOWEST_PRIORITY

_MARK = ":="
"""Separator of a name and its key. `=` alone may occur in a key, and no part of a key must become a name."""
_NAME_PATTERN = r"^[A-Za-z][A-Za-z0-9_-]{0,31}\Z"
_NAME = re.compile(_NAME_PATTERN)
NAME_RULE = "a letter and up to 31 letters, digits, _ or -"


class Scope(StrEnum):
    """A kind of routes that a key may use."""

    ANSWER = "answer"
    """Generations, embeddings, models, tokens; the client's own files, batches, responses and running requests."""
    LOOK = "look"
    """Figures of the whole server: metrics, load, the live page, hosts, settings."""
    OPERATE = "operate"
    """Changes of the server: traces, adapters, hosts, caches."""
    OTHERS = "others"
    """Running requests of other keys, to list and to end. No scope opens what other keys keep here."""

    URGENT = "urgent"
    """Requests with a `priority` below 0, which go before those of other keys. Opens no route by itself."""


EVERY_ROUTE = frozenset((Scope.ANSWER, Scope.LOOK, Scope.OPERATE))
"""Scopes of a client without a key file: all routes, but no other client's requests."""

Positive = Annotated[int, msgspec.Meta(gt=0)]


class ApiKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A key without the key itself; also a line of a keys file."""

    name: Annotated[str, msgspec.Meta(pattern=_NAME_PATTERN)]
    """Name in metrics, logs and the page. Files, batches and responses belong to it."""
    sha256: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
    """SHA-256 of the key, in hexadecimal digits."""
    scopes: frozenset[Scope]
    weight: Annotated[float, msgspec.Meta(ge=0.01, le=100.0)] = 1.0
    """Share of the tokens that the key gets beside other keys when all want more than there is."""
    max_concurrent_requests: Positive | None = None
    requests_per_minute: Positive | None = None
    tokens_per_minute: Positive | None = None
    """Tokens of prompts and answers together."""


ANYBODY = ApiKey(name="", sha256="", scopes=EVERY_ROUTE)
"""Every client of a server without keys."""
NOBODY = ApiKey(name="", sha256="", scopes=frozenset())
"""A client without a key that the server knows."""


class ApiKeys:
    """The keys that a server accepts; only their digests are kept."""

    def __init__(
        self, flags: Sequence[str] = (), *, in_file: Iterable[ApiKey] | None = None
    ) -> None:
        """`flags` are `KEY` or `NAME:=KEY`. A key without a name is named by its position: `key1`, `key2`, ...
        `in_file` are those of a file; with a file, even an empty one, clients need a key.

        Raises ConfigError: a key is empty or cannot be sent, a name is malformed, or two names or keys are the
        same.
        """
        self._flagged: list[ApiKey] = []
        for place, flag in enumerate(flags, start=1):
            name, key = _parts(flag, place)
            if any(name == own.name for own in self._flagged):
                raise ConfigError(f"--api-key gives the name {name} to two keys.")
            digest = digest_of(key)
            if any(digest == own.sha256 for own in self._flagged):
                raise ConfigError(f"--api-key has the same key twice, the second time as {name}.")
            self._flagged.append(ApiKey(name=name, sha256=digest, scopes=EVERY_ROUTE))
        self._are_needed = bool(self._flagged) or in_file is not None
        self._by_digest: dict[str, ApiKey] = {}
        self._by_name: dict[str, ApiKey] = {}
        self.replace_file(() if in_file is None else in_file)

    def replace_file(self, in_file: Iterable[ApiKey]) -> None:
        """Takes these keys instead of those that came from the file before, all at once.
        Raises ConfigError: two names or keys are the same; the keys before stay."""
        by_digest: dict[str, ApiKey] = {}
        by_name: dict[str, ApiKey] = {}
        for key in (*self._flagged, *in_file):
            if key.name in by_name:
                raise ConfigError(f"--api-keys-file: the name {key.name} belongs to two keys.")
            if key.sha256 in by_digest:
                raise ConfigError(
                    f"--api-keys-file: {by_digest[key.sha256].name} and {key.name} have the same key."
                )
            by_name[key.name] = by_digest[key.sha256] = key
        self._by_digest, self._by_name = by_digest, by_name

    def __bool__(self) -> bool:
        """True if clients need a key."""
        return self._are_needed

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all keys; without keys, requests have the empty name."""
        return tuple(self._by_name) if self._are_needed else ("",)

    def least_priority(self, key: ApiKey | None) -> int:
        """The lowest `priority` that requests of the key may have: where there are several keys, one below the
        usual 0 needs the scope."""
        is_alone = len(self._by_name) <= 1
        is_urgent = is_alone or (key is not None and Scope.URGENT in key.scopes)
        return LOWEST_PRIORITY if is_urgent else 0

    def named(self, name: str) -> ApiKey | None:
        """The key of this name, for work that goes on without a client; None if it was revoked."""
        return self._by_name.get(name) if self._are_needed else ANYBODY

    def find(self, authorization: str, x_api_key: str | None = None) -> ApiKey | None:
        """The key in an `Authorization` header, or without one in `x-api-key` (Anthropic's clients, and
        llama.cpp's). `ANYBODY` if no key is needed, None if the key is unknown.

        One look into a hash table, however many keys there are. Its time tells nothing: it depends on the SHA-256
        of what was sent, and nobody can choose keys by the beginning of their digests but by trying them, which
        leads to no key of 256 random bits.
        """
        if not self._are_needed:
            return ANYBODY
        if x_api_key is not None and not authorization:
            authorization = f"Bearer {x_api_key}"
        scheme, _, given = authorization.partition(" ")
        found = self._by_digest.get(digest_of(given.strip()))
        return found if scheme.lower() == "bearer" else None


def is_name(text: str) -> bool:
    """True if a key may have this name."""
    return _NAME.match(text) is not None


def digest_of(key: str) -> str:
    """The SHA-256 of a key. Text of clients that is not valid UTF-8 has a digest too, which no key has."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def _parts(flag: str, place: int) -> tuple[str, str]:
    """The name and the key of a flag. Errors do not quote the flag: it may be a key."""
    name, mark, key = flag.partition(_MARK)
    if not mark:
        name, key = f"key{place}", flag
    elif not is_name(name):
        raise ConfigError(
            f"--api-key must have {NAME_RULE} before {_MARK}, as the name of the key."
        )
    if not key:
        raise ConfigError("--api-key must not be empty.")
    if not (key.isascii() and key.isprintable()) or key != key.strip():
        raise ConfigError(
            "--api-key must be of visible ASCII characters, with spaces only between them; "
            "HTTP may change others on their way."
        )
    return name, key


NO_KEYS = ApiKeys()
