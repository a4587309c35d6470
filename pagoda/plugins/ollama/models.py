# SPDX-License-Identifier: Apache-2.0
"""Ollama's list of models, and what it says of one."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from aiohttp import web

from pagoda.api.errors import ApiError
from pagoda.api.http.request_context import RequestContext
from pagoda.api.infill import marks_of
from pagoda.checkpoints.card import ModelCard
from pagoda.plugins.ollama.names import rfc3339, served_name, tagged_name
from pagoda.version import __version__

_OLLAMA_VERSION = "0.12.11"
"""Version of Ollama whose API is spoken here; editors refuse servers of versions before those that they need."""
_FAR_FUTURE = "9999-12-31T23:59:59Z"
"""The model stays loaded."""


class ShowBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /api/show`."""

    model: str | None = None
    name: str | None = None
    """Older name of `model`."""
    verbose: bool | None = None


async def tags(context: RequestContext) -> web.StreamResponse:
    """The models that are served."""
    context.service.ready_generator()
    return context.json({"models": [await _entry(context)]})


async def running(context: RequestContext) -> web.StreamResponse:
    """The models in memory, which are all that are served."""
    limits = context.service.ready_generator().endpoint.limits
    entry = await _entry(context)
    more = {
        "expires_at": _FAR_FUTURE,
        "size_vram": entry["size"],
        "context_length": limits.max_model_len,
    }
    return context.json({"models": [{**entry, **more}]})


async def _card(context: RequestContext) -> ModelCard:
    return await asyncio.to_thread(context.service.config.read_card)


def _details(card: ModelCard) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": card.format,
        "family": card.architecture,
        "families": [card.architecture],
        "parameter_size": card.parameter_size,
        "quantization_level": card.weights,
    }


async def _entry(context: RequestContext) -> dict[str, Any]:
    service = context.service
    card = await _card(context)
    name = tagged_name(service.config.served_model_name)
    return {
        "name": name,
        "model": name,
        "modified_at": rfc3339(service.created),
        "size": card.num_bytes,
        "digest": card.digest,
        "details": _details(card),
    }


async def show(context: RequestContext) -> web.StreamResponse:
    """The template, the preferred sampling and the abilities of a model."""
    body = await context.parse(ShowBody)
    name = body.model or body.name
    if not name:
        raise ApiError(400, "model is missing.", "model")
    service = context.service
    generator = service.named(served_name(service, name), context.client_request)
    text, limits = generator.text, generator.endpoint.limits
    card = await _card(context)
    kind = card.architecture
    template = text.chat_template
    abilities = ["completion" if text.pooling.generates else "embedding"]
    if marks_of(text.tokenizer) is not None:
        abilities.append("insert")
    if text.takes_tools:
        abilities.append("tools")
    if text.formats.reasoning is not None:
        abilities.append("thinking")
    parameters = [f"{field} {value}" for field, value in text.default_sampling.items()]
    return context.json(
        {
            "modified_at": rfc3339(service.created),
            "modelfile": f"FROM {service.config.served_model_name}",
            "license": "",
            "template": "" if template is None else template.source,
            "parameters": "\n".join(parameters),
            "details": _details(card),
            "model_info": {
                "general.architecture": kind,
                "general.basename": service.config.served_model_name,
                "general.parameter_count": card.num_parameters,
                **{f"{kind}.{size}": value for size, value in card.sizes.items()},
                f"{kind}.context_length": limits.max_model_len,
                f"{kind}.vocab_size": limits.vocab_size,
            },
            "capabilities": abilities,
        }
    )


async def version(context: RequestContext) -> web.StreamResponse:
    return context.json({"version": _OLLAMA_VERSION, "pagoda": __version__})
