# SPDX-License-Identifier: Apache-2.0
"""The routes of llama.cpp that OpenAI has not."""

from __future__ import annotations

from functools import partial

from pagoda.api.core_routes import COUNT_CHAT_TOKENS, MODELS, READY
from pagoda.api.openai.bodies import ChatRequest
from pagoda.api.openai.chat import chat_completions
from pagoda.api.route import ANSWER, Route, refused
from pagoda.plugins.llamacpp.bodies import CompletionBody, InfillBody
from pagoda.plugins.llamacpp.completion import completion, infill
from pagoda.plugins.llamacpp.dialect import LLAMACPP, LLAMACPP_CHAT
from pagoda.plugins.llamacpp.embedding import EmbeddingBody, embedding
from pagoda.plugins.llamacpp.server import TemplateBody, adapters, apply_template, props, slots

_completion = Route(
    completion,
    "Continues prompts.",
    ANSWER,
    CompletionBody,
    dialect=LLAMACPP,
    streams=True,
    is_queued=True,
)

ROUTES: dict[str, dict[str, Route]] = {
    "/completion": {"POST": _completion},
    "/completions": {"POST": _completion},
    "/infill": {
        "POST": Route(
            infill,
            "Fills a gap.",
            ANSWER,
            InfillBody,
            dialect=LLAMACPP,
            streams=True,
            is_queued=True,
        )
    },
    "/embedding": {
        "POST": Route(
            embedding, "Vectors of texts.", ANSWER, EmbeddingBody, dialect=LLAMACPP, is_queued=True
        )
    },
    "/apply-template": {
        "POST": Route(
            apply_template,
            "The prompt of a conversation.",
            ANSWER,
            TemplateBody,
            dialect=LLAMACPP,
            needs_model=True,
        )
    },
    "/props": {
        "GET": Route(
            props, "Properties of the server.", ANSWER, dialect=LLAMACPP, needs_model=True
        ),
    },
    "/slots": {"GET": Route(slots, "Sequences that run.", ANSWER, dialect=LLAMACPP)},
    "/slots/*": {"POST": refused("all requests share one cache of prompts.", LLAMACPP)},
    "/lora-adapters": {
        "GET": Route(
            adapters, "The adapters that are loaded.", ANSWER, dialect=LLAMACPP, needs_model=True
        ),
    },
    "/chat/completions": {
        "POST": Route(
            partial(chat_completions, first_content=None),
            "Answers a conversation.",
            ANSWER,
            ChatRequest,
            dialect=LLAMACPP_CHAT,
            streams=True,
            is_queued=True,
        )
    },
    "/chat/completions/input_tokens": {"POST": COUNT_CHAT_TOKENS},
    "/models": {"GET": MODELS},
    "/v1/health": {"GET": READY},
}
