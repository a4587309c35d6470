# SPDX-License-Identifier: Apache-2.0
"""Load of a server, as it tells of it."""

from __future__ import annotations

import urllib.request

import msgspec


class Tier(msgspec.Struct, frozen=True):
    """A tier of KV below the device."""

    name: str
    num_stored: int
    num_loaded: int
    num_failed: int


class Load(msgspec.Struct, frozen=True):
    """A part of `GET /v1/load`."""

    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    num_generated_tokens: int
    """Tokens sampled since the start."""
    tiers: tuple[Tier, ...] = ()


def load_of(url: str) -> Load:
    with urllib.request.urlopen(f"{url}/v1/load", timeout=30) as answer:
        return msgspec.json.decode(answer.read(), type=Load)
