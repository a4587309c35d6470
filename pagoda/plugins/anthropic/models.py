# SPDX-License-Identifier: Apache-2.0
"""Models as Anthropic's API lists them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from pagoda.api.http.request_context import RequestContext
from pagoda.api.monitoring.info import all_models, longest_sequence, one_model
from pagoda.text.text_generator import TextGenerator

VERSION_HEADER = "anthropic-version"
"""The header by which Anthropic's clients are known."""


async def models(context: RequestContext) -> web.StreamResponse:
    """Answers with one page of all models, of which there is one at least."""
    shown = all_models(context, _model)
    first, last = shown[0]["id"], shown[-1]["id"]
    return context.json({"data": shown, "has_more": False, "first_id": first, "last_id": last})


async def model(context: RequestContext) -> web.StreamResponse:
    return context.json(one_model(context, _model))


def _model(context: RequestContext, name: str, generator: TextGenerator) -> dict[str, Any]:
    created = datetime.fromtimestamp(context.service.created, UTC)
    max_model_len = longest_sequence(generator)
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": created.isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": max_model_len,
        "max_tokens": max_model_len,
    }
