# SPDX-License-Identifier: Apache-2.0
"""The routes of SGLang that OpenAI has not."""

from __future__ import annotations

from aiohttp import web

from pagoda.api.http.request_context import RequestContext
from pagoda.api.monitoring.info import health_ready
from pagoda.api.route import ANSWER, OPEN, Route, refused
from pagoda.plugins.sglang.bodies import GenerateBody
from pagoda.plugins.sglang.generate import generate


async def model_info(context: RequestContext) -> web.StreamResponse:
    """The model in SGLang's words."""
    text = context.service.ready_generator().text
    name = context.service.config.served_model_name
    return context.json(
        {
            "model_path": name,
            "served_model_name": name,
            "tokenizer_path": name,
            "is_generation": True,
            "preferred_sampling_params": dict(text.default_sampling) or None,
            "weight_version": "default",
            "has_image_understanding": False,
            "has_audio_understanding": False,
        }
    )


_model_info = Route(model_info, "The model, in SGLang's words.", ANSWER, needs_model=True)
_health = Route(health_ready, "Whether the model makes progress.", OPEN, statuses=(503,))
_stays = refused("weights stay as they were loaded.")
_cached = refused("cache_salt keeps requests apart.")

ROUTES: dict[str, dict[str, Route]] = {
    "/generate": {
        "POST": Route(
            generate, "Continues prompts.", ANSWER, GenerateBody, streams=True, is_queued=True
        )
    },
    "/get_model_info": {"GET": _model_info},
    "/model_info": {"GET": _model_info},
    "/health_generate": {"GET": _health},
    "/flush_cache": {"GET": _cached, "POST": _cached},
    "/update_weights_from_disk": {"POST": _stays},
}
