# SPDX-License-Identifier: Apache-2.0
"""`/v1/messages`."""

from __future__ import annotations

from functools import partial

from aiohttp import web

from pagoda.api.answers.conversation import begin_conversation, count_prompt_tokens
from pagoda.api.bodies.fields import renamed
from pagoda.api.bodies.ignored_fields import Ignored
from pagoda.api.dialect import Dialect
from pagoda.api.errors import ApiError
from pagoda.api.http.request_context import RequestContext
from pagoda.api.openai.bodies import ChatRequest
from pagoda.api.route import ANSWER, ANY_KEY, Route
from pagoda.plugins.anthropic.bodies import CountTokensRequest, MessagesRequest
from pagoda.plugins.anthropic.message import PING, MessageAnswer, message_event
from pagoda.plugins.anthropic.models import model, models
from pagoda.plugins.anthropic.translation import MessagesTranslation, chat_request

_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Anthropic's types of errors; other statuses are errors of the server."""


def _error_body(error: ApiError) -> dict[str, object]:
    kind = _ERROR_TYPES.get(error.status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


ANTHROPIC = Dialect(
    error_body=_error_body,
    error_event=lambda error: message_event(_error_body(error)),
    keep_alive=PING,
)


def _translated(
    body: CountTokensRequest, ignored: Ignored
) -> tuple[ChatRequest, MessagesTranslation]:
    translation = MessagesTranslation(body)
    return chat_request(body, translation, ignored), translation


async def create_message(context: RequestContext) -> web.StreamResponse:
    body = await context.parse(MessagesRequest)
    chat, translation = await context.caller.translate(partial(_translated, body, context.ignored))
    with renamed(translation.names):
        conversation = await begin_conversation(context.caller, chat, clamp_max_tokens=True)
    conversation.generation.rename_constraints(translation.names)
    model = context.service.name_of(conversation.generation.generator)
    answer = MessageAnswer(
        conversation,
        model=model,
        max_tokens=body.max_tokens,
        edits=body.context_management is not None,
    )
    return await conversation.generation.respond(context, answer, streams=bool(body.stream))


async def count_tokens(context: RequestContext) -> web.StreamResponse:
    """Answers with the number of tokens of a prompt, which may be longer than the context."""
    body = await context.parse(CountTokensRequest)
    chat, translation = await context.caller.translate(partial(_translated, body, context.ignored))
    with renamed(translation.names):
        count = await count_prompt_tokens(context.caller, chat)
    return context.json({"input_tokens": count})


ROUTES: dict[str, dict[str, Route]] = {
    "/v1/messages": {
        "POST": Route(
            create_message,
            "Answers a conversation, as Anthropic's API does.",
            ANSWER,
            MessagesRequest,
            dialect=ANTHROPIC,
            streams=True,
            is_queued=True,
        )
    },
    "/v1/messages/count_tokens": {
        "POST": Route(
            count_tokens,
            "Counts the tokens of a prompt.",
            ANSWER,
            CountTokensRequest,
            dialect=ANTHROPIC,
            needs_model=True,
        )
    },
}

_models = Route(models, "The models that are served.", ANY_KEY, needs_model=True)

MODEL_ROUTES: dict[str, dict[str, Route]] = {
    "/v1/models": {"GET": _models},
    "/models": {"GET": _models},
    "/v1/models/*": {"GET": Route(model, "One model.", ANY_KEY, statuses=(404,), needs_model=True)},
}
"""Routes that others have, too."""
