# SPDX-License-Identifier: Apache-2.0
"""Adapters that are loaded beside a model (LoRA), and messages about them on both wires."""

from __future__ import annotations

import msgspec

from pagoda.messages.ranges import Name, Sentence


class Adapter(msgspec.Struct, frozen=True):
    """One adapter: requests, KV blocks and workers know it by its digest."""

    name: str
    """Name of the model in the API."""
    path: str
    """Absolute path of its directory."""
    digest: str
    """SHA-256 of its files, in hex: equal names with other weights share nothing."""


class LoadAdapter(msgspec.Struct, frozen=True, tag="load_adapter"):
    """Load an adapter between two steps; `AdapterLoaded` follows. One that is there already is kept."""

    adapter: Adapter


class UnloadAdapter(msgspec.Struct, frozen=True, tag="unload_adapter"):
    """Forget an adapter as soon as no request needs it; unknown digests are ignored."""

    digest: str


class AdapterLoaded(msgspec.Struct, frozen=True, tag="adapter_loaded"):
    digest: Name
    error: Sentence = ""
    """A sentence for the user where the adapter could not be loaded; empty where it was."""
