# SPDX-License-Identifier: Apache-2.0
"""The routes of Ollama."""

from __future__ import annotations

from pagoda.api.route import ANSWER, ANY_KEY, Route, refused
from pagoda.plugins.ollama.bodies import ChatBody, GenerateBody
from pagoda.plugins.ollama.dialect import OLLAMA
from pagoda.plugins.ollama.embeddings import EmbedBody, EmbeddingsBody, embed_prompt, embed_texts
from pagoda.plugins.ollama.generate import chat, generate
from pagoda.plugins.ollama.models import ShowBody, running, show, tags, version

_operators = refused("the operator chooses the model when the server starts.", OLLAMA)

ROUTES: dict[str, dict[str, Route]] = {
    "/api/chat": {
        "POST": Route(
            chat,
            "Answers a conversation.",
            ANSWER,
            ChatBody,
            dialect=OLLAMA,
            streams=True,
            is_queued=True,
        )
    },
    "/api/generate": {
        "POST": Route(
            generate,
            "Answers a prompt.",
            ANSWER,
            GenerateBody,
            dialect=OLLAMA,
            streams=True,
            is_queued=True,
        )
    },
    "/api/embed": {
        "POST": Route(
            embed_texts, "Vectors of texts.", ANSWER, EmbedBody, dialect=OLLAMA, is_queued=True
        )
    },
    "/api/embeddings": {
        "POST": Route(
            embed_prompt,
            "The vector of a text.",
            ANSWER,
            EmbeddingsBody,
            dialect=OLLAMA,
            is_queued=True,
        )
    },
    "/api/tags": {"GET": Route(tags, "The models.", ANY_KEY, dialect=OLLAMA, needs_model=True)},
    "/api/ps": {
        "GET": Route(running, "The models in memory.", ANY_KEY, dialect=OLLAMA, needs_model=True)
    },
    "/api/show": {
        "POST": Route(
            show, "One model.", ANSWER, ShowBody, dialect=OLLAMA, statuses=(404,), needs_model=True
        )
    },
    "/api/version": {"GET": Route(version, "The version.", ANY_KEY, dialect=OLLAMA)},
    "/api/pull": {"POST": _operators},
    "/api/push": {"POST": _operators},
    "/api/create": {"POST": _operators},
    "/api/copy": {"POST": _operators},
    "/api/delete": {"DELETE": _operators},
}
