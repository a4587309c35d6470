# SPDX-License-Identifier: Apache-2.0
"""Descriptions of the server in llama.cpp's words: properties, slots, adapters and the chat template."""

from __future__ import annotations

from itertools import islice
from typing import Any

import msgspec
from aiohttp import web

from pagoda.api.http.request_context import RequestContext
from pagoda.api.openai.bodies import Tools
from pagoda.messages.sampling_params import SamplingParams
from pagoda.plugins.llamacpp.answers import PreparedCompletion, generation_settings
from pagoda.plugins.llamacpp.bodies import SamplingFields
from pagoda.text.templates.conversation import Messages
from pagoda.version import __version__

_MAX_SLOTS = 1024
"""Most slots that are listed."""


class TemplateBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /apply-template`: a conversation."""

    messages: Messages
    model: str | None = None
    tools: Tools | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


async def apply_template(context: RequestContext) -> web.StreamResponse:
    """The prompt that a conversation becomes."""
    body = await context.parse(TemplateBody)
    generator = context.service.admit(body.model, context.client_request)
    prompt = await generator.render(
        body.messages,
        tools=body.tools,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        chat_template_kwargs=body.chat_template_kwargs,
    )
    return context.json({"prompt": prompt})


async def props(context: RequestContext) -> web.StreamResponse:
    """Properties of the server and of its model."""
    generator = context.service.ready_generator()
    text, limits = generator.text, generator.endpoint.limits
    name = context.service.config.served_model_name
    asked = PreparedCompletion(SamplingFields(), name, limits.max_model_len, text.eos_token_ids)
    defaults = SamplingParams(max_tokens=None, **text.default_sampling)  # type: ignore[arg-type]
    params = {**generation_settings(defaults, asked), "n_predict": -1, "max_tokens": -1, "seed": -1}
    template = text.chat_template
    special = {} if template is None else template.special_tokens
    return context.json(
        {
            "default_generation_settings": {"params": params, "n_ctx": limits.max_model_len},
            "total_slots": limits.max_num_seqs,
            "model_alias": name,
            "model_path": name,
            "chat_template": "" if template is None else template.source,
            "chat_template_caps": {
                "supports_tools": text.takes_tools,
                "supports_tool_calls": text.takes_tools,
                "supports_system_role": template is not None,
            },
            "modalities": {"vision": False, "audio": False},
            "bos_token": special.get("bos_token", ""),
            "eos_token": special.get("eos_token", ""),
            "build_info": f"pagoda-{__version__}",
            "is_sleeping": False,
        }
    )


async def slots(context: RequestContext) -> web.StreamResponse:
    """A slot for each sequence that may run at a time; only requests with the client's API key are in them."""
    service = context.service
    limits = service.ready_generator().endpoint.limits
    num_slots = min(limits.max_num_seqs, _MAX_SLOTS)
    running = list(islice(service.tracker.running_of(context.key_name).values(), num_slots))
    listed = []
    for index in range(num_slots):
        slot: dict[str, Any] = {
            "id": index,
            "n_ctx": limits.max_model_len,
            "speculative": False,
            "is_processing": index < len(running),
            "next_token": [{"has_next_token": False, "n_remain": -1, "n_decoded": 0}],
        }
        if index < len(running):
            record = running[index]
            left = max(record.max_tokens - record.num_output_tokens, 0)
            slot["id_task"] = record.request_id
            slot["n_prompt_tokens"] = record.num_prompt_tokens
            slot["n_prompt_tokens_cache"] = record.num_cached_tokens
            slot["next_token"] = [
                {
                    "has_next_token": left > 0,
                    "n_remain": left,
                    "n_decoded": record.num_output_tokens,
                }
            ]
        listed.append(slot)
    return context.json(listed)


async def adapters(context: RequestContext) -> web.StreamResponse:
    """The adapters that are loaded. Requests ask for one as their model, so none has a scale for all others."""
    loaded = context.service.ready_generator().adapters
    return context.json(
        [
            {"id": index, "path": adapter.path, "scale": 0.0, "name": adapter.name}
            for index, adapter in enumerate(loaded)
        ]
    )
