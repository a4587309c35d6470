# SPDX-License-Identifier: Apache-2.0
"""Web pages of other origins that may use the server (CORS, https://fetch.spec.whatwg.org/#http-cors-protocol)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from pagoda.errors import ConfigError

ANY = "*"
LOCAL = "localhost"
"""Stands for every page of this machine, at any port."""
_LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})
_EXPOSED = "X-Request-Id, Retry-After, openai-processing-ms, x-pagoda-ignored"
_MAX_HEADER_NAMES_CHARS = 2048
_HEADER_NAMES = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~, -]*")
_MAX_AGE_S = 600
"""Seconds for which a browser need not ask again."""


class CorsOrigins:
    """The origins whose pages may use the server, besides its own."""

    def __init__(self, flags: Sequence[str] = ()) -> None:
        """`flags` are origins such as `http://localhost:3000`, `localhost` for all of this machine, or `*`.
        Raises ConfigError: one is neither."""
        origins = [origin for flag in flags for origin in flag.split(",")]
        for origin in origins:
            if origin not in (ANY, LOCAL) and not _is_origin(origin):
                raise ConfigError(
                    f"--cors-origins takes origins such as http://localhost:3000, {LOCAL} or {ANY}, "
                    f"got {origin!r}."
                )
        self._origins = frozenset(origin.lower() for origin in origins)

    def __bool__(self) -> bool:
        return bool(self._origins)

    def allows(self, origin: str) -> bool:
        if ANY in self._origins or origin.lower() in self._origins:
            return True
        return LOCAL in self._origins and _is_local(origin)

    def headers(self, origin: str | None) -> dict[str, str]:
        """The headers of an answer to a page of `origin`; empty if it is not allowed, or there is none."""
        if origin is None or not self.allows(origin):
            return {}
        return {
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Allow-Credentials": "true",
            "Access-Control-Expose-Headers": _EXPOSED,
            "Vary": "Origin",
        }

    def preflight(self, request: Mapping[str, str], methods: Sequence[str]) -> dict[str, str]:
        """The headers of the answer to a question before a request; `request` are the headers of the question."""
        headers = self.headers(request.get("Origin"))
        if not headers:
            return {}
        wanted = request.get("Access-Control-Request-Headers", "")[:_MAX_HEADER_NAMES_CHARS]
        return headers | {
            "Access-Control-Allow-Methods": ", ".join((*methods, "OPTIONS")),
            "Access-Control-Allow-Headers": wanted if _HEADER_NAMES.fullmatch(wanted) else "",
            "Access-Control-Max-Age": str(_MAX_AGE_S),
        }


def _is_origin(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return bool(parts.scheme and parts.hostname) and parts._replace(scheme="", netloc="") == (
            urlsplit("")
        )
    except ValueError:
        return False


def _is_local(origin: str) -> bool:
    try:
        return urlsplit(origin).hostname in _LOCAL_HOSTS
    except ValueError:
        return False


NO_ORIGINS = CorsOrigins()
