# SPDX-License-Identifier: Apache-2.0
"""Fields of bodies that are accepted without effect.

A field that would change the answer works or is refused by name. One that would not is accepted: the response
header `x-pagoda-ignored` names it, and the log does so once. Fields that the server knows carry a note in their
annotation; of unknown names, those count as harmless that programs send to tell whom or what a request is for.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, field

IGNORED_HEADER = "x-pagoda-ignored"
"""The header that names what was ignored of a body, separated by commas."""

_MAX_NAMES_OF_REQUEST = 32
_MAX_NAMES_OF_LOG = 1000
"""Names that are logged; clients could make up any number of them."""
_MAX_NAME_CHARS = 64
_NOT_IN_NAME = re.compile(r"[^A-Za-z0-9_.:\-\[\]]")
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")

_WHOM = (
    "account|agent|app|chat|client|conversation|correlation|customer|device|generation|installation|"
    "interaction|message|org|organization|parent|project|query|request|run|session|span|task|team|tenant|"
    "thread|trace|turn|user|window|workspace"
)
_ABOUT = re.compile(
    rf"(?:\w+_)?metadata|x_\w+|tags|labels|client|session|trace|(?:\w+_)?(?:{_WHOM})_(?:ids?|uuid|name|tags|info)"
)
"""Names of data about a request: the client, session, user, trace or place in a program that it belongs to."""
_HARMLESS = frozenset(
    (
        *("provider", "route", "models", "fallbacks", "usage"),  # OpenRouter
        *("caching", "cache", "num_retries", "max_retries", "drop_params", "litellm_call_id"),
        *("intent", "snippy", "nwo", "copilot_cache_control", "debug", "telemetry"),
        *("vl_high_resolution_images", "tool_stream", "stream_delay", "keep_alive"),
    )
)
"""Other names that clients send, and that change nothing of an answer of text: which provider of a broker is asked
and what it bills, retries and caches of a client, resolution of images, how events are cut."""

_log = logging.getLogger("pagoda.api")


@dataclass(frozen=True)
class Hint:
    """The note of a field without which the answer is as good: any value is accepted, and named unless it is one
    of `served`, which is what happens anyway. Null counts as left out."""

    served: tuple[object, ...] = ()


def is_harmless(name: str) -> bool:
    """True for an unknown field that does not change an answer."""
    spelt = _HUMP.sub("_", name[:_MAX_NAME_CHARS]).replace("-", "_").lower()
    return spelt in _HARMLESS or _ABOUT.fullmatch(spelt) is not None


class IgnoredNames:
    """Names that clients have sent without effect; each is logged once. With `takes_unknown` every unknown field
    is taken, also one that may change the answer."""

    def __init__(self, *, takes_unknown: bool = False) -> None:
        self.names: set[str] = set()
        self.takes_unknown = takes_unknown

    def note(self, name: str) -> None:
        if name not in self.names and len(self.names) < _MAX_NAMES_OF_LOG:
            self.names.add(name)
            _log.warning("the field %s of a request is ignored", name)


@dataclass(frozen=True)
class Ignored:
    """Names of all that was ignored of one request."""

    all: IgnoredNames = field(default_factory=IgnoredNames)
    names: dict[str, None] = field(default_factory=dict)

    def takes(self, name: str) -> bool:
        """True if an unknown field may be ignored."""
        return self.all.takes_unknown or is_harmless(name)

    def note(self, name: str) -> None:
        """Remembers a name for the log and for the client's header."""
        clean = _NOT_IN_NAME.sub("_", name[:_MAX_NAME_CHARS])
        self.all.note(clean)
        if len(self.names) < _MAX_NAMES_OF_REQUEST:
            self.names[clean] = None

    @property
    def headers(self) -> dict[str, str]:
        """The header for the answer; none if nothing was ignored."""
        return {IGNORED_HEADER: ", ".join(self.names)} if self.names else {}
