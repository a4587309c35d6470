# SPDX-License-Identifier: Apache-2.0
"""`POST /v1/load_lora_adapter` and `POST /v1/unload_lora_adapter`, as vLLM has them."""

from __future__ import annotations

import msgspec
from aiohttp import web

from pagoda.api.errors import ApiError
from pagoda.api.http.request_context import RequestContext
from pagoda.errors import refuse
from pagoda.text.text_generator import TextGenerator

_TEXT = "text/plain; charset=utf-8"


class LoadLoraAdapter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    lora_name: str
    lora_path: str
    base_model_name: str | None = None
    """The model that the adapter is for; it must be the one that is served."""
    load_inplace: bool | None = None


class UnloadLoraAdapter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    lora_name: str
    lora_int_id: int | None = None
    """Number of the adapter, without effect: adapters are known by their names."""


async def load_lora_adapter(context: RequestContext) -> web.StreamResponse:
    generator = _changeable(context)
    body = await context.parse(LoadLoraAdapter)
    config = context.service.config
    names = (config.served_model_name, *config.model_aliases)
    if body.base_model_name is not None:
        context.service.check_model(body.base_model_name, context.client_request)
    if body.load_inplace:
        refuse("load_inplace", "is not supported; unload the adapter first")
    await generator.adapters.load(body.lora_name, body.lora_path, names)
    return context.text(f"Success: LoRA adapter {body.lora_name!r} added successfully.", _TEXT)


async def unload_lora_adapter(context: RequestContext) -> web.StreamResponse:
    generator = _changeable(context)
    body = await context.parse(UnloadLoraAdapter)
    if generator.adapters.find(body.lora_name) is None:
        raise ApiError(
            404,
            f"The adapter {body.lora_name[:200]!r} is not loaded.",
            "lora_name",
            "model_not_found",
        )
    await generator.adapters.unload(body.lora_name)
    return context.text(f"Success: LoRA adapter {body.lora_name!r} removed successfully.", _TEXT)


def _changeable(context: RequestContext) -> TextGenerator:
    """Raises ApiError: 403, the operator does not allow that adapters come and go."""
    generator = context.service.ready_generator()
    if not generator.adapters.allows_loading:
        raise ApiError(
            403,
            "Adapters can only be loaded and unloaded where the server was started with --allow-lora-loading.",
        )
    return generator
