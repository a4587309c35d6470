# SPDX-License-Identifier: Apache-2.0
"""An attack: what a hostile client sends, and what it should hear."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

BODY_BYTES = 8 * 2**20 - 4096
"""Bytes of a body, a little below the server's limit."""
MESSAGES = [{"role": "user", "content": "hi"}]
ANSWERED = frozenset({200, 400})
REFUSED = frozenset({400})


@dataclass(frozen=True)
class Attack:
    """One request."""

    name: str
    path: str
    body: bytes
    statuses: frozenset[int] = ANSWERED
    """Right answers."""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Siege:
    """Something that takes connections rather than requests. `run` takes host and port, raises nothing and returns
    the fault of the server; empty if it did what is right."""

    name: str
    run: Callable[[str, int], Awaitable[str]]


def chat(name: str, statuses: frozenset[int] = ANSWERED, **fields: Any) -> Attack:
    body = {"messages": MESSAGES, "max_tokens": 60, **fields}
    return Attack(name, "/v1/chat/completions", json.dumps(body).encode(), statuses)


def completion(name: str, statuses: frozenset[int] = ANSWERED, **fields: Any) -> Attack:
    body = {"prompt": "hi", "max_tokens": 60, **fields}
    return Attack(name, "/v1/completions", json.dumps(body).encode(), statuses)


def raw(name: str, body: bytes, statuses: frozenset[int] = REFUSED) -> Attack:
    return Attack(name, "/v1/completions", body, statuses)
