# SPDX-License-Identifier: Apache-2.0
"""`/v1/responses`."""

from __future__ import annotations

from functools import partial

from aiohttp import web

from pagoda.api.answers.conversation import count_prompt_tokens
from pagoda.api.auth.keys import ANYBODY
from pagoda.api.bodies.fields import renamed
from pagoda.api.bodies.items import page_of_items, query_number
from pagoda.api.dialect import Dialect
from pagoda.api.errors import ApiError, as_api_error
from pagoda.api.http.request_context import RequestContext
from pagoda.api.http.sse import EventStream, encode_json
from pagoda.api.route import ANSWER, Route
from pagoda.errors import refuse
from pagoda.plugins.responses.beginning import (
    ITEM_CHARS,
    BegunResponse,
    begin_response,
    conversation_items,
    input_items,
)
from pagoda.plugins.responses.bodies import InputTokensRequest, ResponsesRequest
from pagoda.plugins.responses.state import ResponseState
from pagoda.plugins.responses.store import StoredResponse
from pagoda.plugins.responses.translation import ChatTranslation, chat_request


def _error_event(error: ApiError) -> bytes:
    body = {
        "type": "error",
        "code": error.code,
        "message": error.message,
        "param": error.param,
        "sequence_number": 0,
    }
    return b"event: error\ndata: %b\n\n" % encode_json(body)


RESPONSES = Dialect(error_event=_error_event)


async def create_response(context: RequestContext) -> web.StreamResponse:
    body = await context.parse(ResponsesRequest)
    begun = await begin_response(context.caller, body)
    if body.background:
        run = begun.run_in_background(context.service.state(ResponseState).responses)
        try:
            return await _show(context, begun.stored, first_event=0)
        finally:  # from here on the work counts for the key, not the request
            if run.answer.is_running:
                run.on_end = context.service.key_limits.hold(context.key or ANYBODY)
    if body.stream:
        return await context.stream(lambda stream: _stream(context, begun, stream))
    return context.json(await begun.generation.run(begun.answer))


async def count_input_tokens(context: RequestContext) -> web.StreamResponse:
    """Answers with the number of tokens of an input."""
    body = await context.parse(InputTokensRequest)
    caller = context.caller
    translation = ChatTranslation()
    own = await input_items(caller, body)
    items = conversation_items(caller, body, own)
    chat = await caller.translate(
        partial(chat_request, body, translation, items, caller.ignored),
        more=ITEM_CHARS * len(items),
    )
    with renamed(translation.names):
        count = await count_prompt_tokens(caller, chat)
    return context.json({"object": "response.input_tokens", "input_tokens": count})


async def get_response(context: RequestContext) -> web.StreamResponse:
    """Answers with a response, its events, or its input items."""
    response_id, _, part = context.path_argument.partition("/")
    stored = context.service.state(ResponseState).responses.get(_key(context), response_id)
    query = context.http.query
    if part == "input_items":
        return await context.sized_json(
            page_of_items(stored.input_items, query), stored.num_input_bytes
        )
    _check_part(part, "")
    if query.get("stream", "false").lower() not in ("true", "1"):
        return context.json(stored.current)
    if stored.log is None:
        refuse("stream", "needs a response that was made with background and stream")
    return await _show(context, stored, first_event=query_number(query, "starting_after", -1) + 1)


async def change_response(context: RequestContext) -> web.StreamResponse:
    """Cancels a background response. One that has ended stays as it is."""
    response_id, _, part = context.path_argument.partition("/")
    _check_part(part, "cancel")
    stored = context.service.state(ResponseState).responses.get(_key(context), response_id)
    if not stored.response["background"]:
        raise ApiError(400, "Cannot cancel a synchronous response.", "response_id")
    if stored.run is not None:
        await stored.run.cancel()
    return context.json(stored.current)


async def delete_response(context: RequestContext) -> web.StreamResponse:
    response_id, _, part = context.path_argument.partition("/")
    _check_part(part, "")
    store = context.service.state(ResponseState).responses
    stored = store.get(_key(context), response_id)
    if stored.run is not None:
        await stored.run.cancel()
    store.remove(stored)
    return context.json({"id": response_id, "object": "response", "deleted": True})


def _check_part(part: str, expected: str) -> None:
    """Raises ApiError: 404, a response has no such part."""
    if part != expected:
        raise ApiError(404, f"A response has no route {part[:64]!r} for this method.")


def _key(context: RequestContext) -> str:
    return context.client_request.key_name


async def _stream(context: RequestContext, begun: BegunResponse, stream: EventStream) -> None:
    """The events of a response. An error behind the first event is an event, too."""
    try:
        await begun.generation.stream(begun.answer, stream)
    except ConnectionError:
        raise
    except Exception as error:
        if not stream.is_open:
            raise
        await stream.send(begun.answer.fail(as_api_error(error, context.request_id)))


async def _show(
    context: RequestContext, stored: StoredResponse, *, first_event: int
) -> web.StreamResponse:
    """A background response as it is now, or its events if it has some."""
    log = stored.log
    if log is None:
        return context.json(stored.current)
    return await context.stream(lambda stream: log.follow(stream, first_event))


ROUTES: dict[str, dict[str, Route]] = {
    "/v1/responses": {
        "POST": Route(
            create_response,
            "Makes a response.",
            ANSWER,
            ResponsesRequest,
            dialect=RESPONSES,
            streams=True,
            is_queued=True,
        )
    },
    "/v1/responses/input_tokens": {
        "POST": Route(
            count_input_tokens,
            "Counts the tokens of an input.",
            ANSWER,
            InputTokensRequest,
            needs_model=True,
        )
    },
    "/v1/responses/*": {
        "GET": Route(get_response, "A response, or its input items.", ANSWER, statuses=(404,)),
        "POST": Route(change_response, "Cancels a background response.", ANSWER, statuses=(404,)),
        "DELETE": Route(delete_response, "Forgets a response.", ANSWER, statuses=(404,)),
    },
}
