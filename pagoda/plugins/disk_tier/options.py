# SPDX-License-Identifier: Apache-2.0
"""The options of the tier on disk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter
from msgspec import Meta


@dataclass(frozen=True, kw_only=True)
class DiskOptions:
    """Options of the tier on disk."""

    kv_disk_path: Annotated[str | None, Parameter(metavar="DIR")] = None
    """A directory on SSD that holds KV blocks, also from one start to the next; may be shared by servers."""
    kv_disk_bytes: Annotated[
        Annotated[int, Meta(ge=1, le=2**63 - 1)] | str | None, Parameter(metavar="INT")
    ] = None
    """The most that all KV blocks in that directory may take, such as 100GiB."""
    kv_disk_min_touches: Annotated[int, Meta(ge=1, lt=2**31)] = 2
    """A KV block is written to disk once this many requests have passed through it."""
