# SPDX-License-Identifier: Apache-2.0
"""Models as Anthropic's API lists them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

VERSION_HEADER = "anthropic-version"
"""The header by which Anthropic's clients are known."""


def anthropic_model(name: str, created: int, max_model_len: int) -> dict[str, Any]:
    """One model; `created` is in seconds since 1970."""
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": max_model_len,
        "max_tokens": max_model_len,
    }


def anthropic_models(models: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The page of all models, of which there is one at least."""
    first, last = models[0]["id"], models[-1]["id"]
    return {"data": list(models), "has_more": False, "first_id": first, "last_id": last}
