# SPDX-License-Identifier: Apache-2.0
"""Items that APIs keep for their clients: their ids, and pages of them as OpenAI lists them."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from pagoda.errors import refuse

_MAX_LISTED = 100
_DEFAULT_LISTED = 20
_MAX_DIGITS = 16

Item = dict[str, Any]
"""An item of input or output, as OpenAI spells it."""


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def page_of_items(items: Sequence[Item], query: Mapping[str, str]) -> dict[str, Any]:
    """A page of items, by default the newest first, as OpenAI lists them."""
    limit = query_number(query, "limit", _DEFAULT_LISTED)
    if not 1 <= limit <= _MAX_LISTED:
        refuse("limit", f"must be from 1 to {_MAX_LISTED}")
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        refuse("order", "must be asc or desc")
    ordered = list(items if order == "asc" else reversed(items))
    after = query.get("after")
    if after is not None:
        ids = [item["id"] for item in ordered]
        if after not in ids:
            refuse("after", "is not the id of one of the items")
        ordered = ordered[ids.index(after) + 1 :]
    page = ordered[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else "",
        "last_id": page[-1]["id"] if page else "",
        "has_more": len(ordered) > limit,
    }


def query_number(query: Mapping[str, str], name: str, default: int) -> int:
    """A number of the query. Raises InvalidRequestError: it is none."""
    given = query.get(name, "")
    if not given:
        return default
    if not (given.isascii() and given.isdecimal() and len(given) < _MAX_DIGITS):
        refuse(name, "must be a whole number")
    return int(given)
