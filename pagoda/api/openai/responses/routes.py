"""`/v1/responses`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from aiohttp import web

from pagoda.api.conversation import Conversation, begin_conversation, count_prompt_tokens
from pagoda.api.dialect import Dialect
from pagoda.api.errors import ApiError, as_api_error
from pagoda.api.fields import renamed
from pagoda.api.generation import Generation
from pagoda.api.openai.conversations.store import check_room
from pagoda.api.openai.responses.background import BackgroundRun
from pagoda.api.openai.responses.bodies import (
    InputTokensRequest,
    Item,
    ResponsesRequest,
    check_body,
)
from pagoda.api.openai.responses.events import EventLog, EventWriter
from pagoda.api.openai.responses.items import (
    kept_items,
    page_of_items,
    query_number,
    without_references,
)
from pagoda.api.openai.responses.response import ResponseAnswer
from pagoda.api.openai.responses.store import StoredResponse
from pagoda.api.openai.responses.translation import (
    ChatTranslation,
    PlacedItems,
    chat_request,
    placed_items,
    turns,
    without_beginning,
)
from pagoda.api.request_context import RequestContext
from pagoda.api.route import Route
from pagoda.api.sse import EventStream, encode_json
from pagoda.errors import refuse
from pagoda.frontend.text_generator import PromptTooLongError


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
    check_body(body)
    store = context.service.responses
    if body.background:
        store.check_room()
    items = _items(context, body)
    talk = None
    if body.conversation_id is not None:
        talk = context.service.conversations.get(_key(context), body.conversation_id)
        check_room(talk, max(len(items), 1), "conversation")
    conversation = await _begin(context, body, items)
    generation = conversation.generation
    streams = bool(body.stream)
    log = EventLog() if body.background and streams else None
    stored = StoredResponse(_key(context), {}, kept_items(body.input or "", items), log=log)

    def keep(response: dict[str, Any]) -> None:
        stored.response, stored.run = response, None
        if talk is not None and response["status"] in ("completed", "incomplete"):
            context.service.conversations.add(talk, stored.items)
        if body.is_stored:
            store.put(stored)

    answer = ResponseAnswer(
        body,
        conversation,
        model=context.service.name_of(generation.generator),
        writer=EventWriter(None if log is None else log.append) if streams else None,
        on_finish=keep,
    )
    if body.background:
        stored.response = answer.object()
        stored.run = BackgroundRun(answer, generation, log)
        store.put(stored)
        stored.run.start()
        return await _show(context, stored, first_event=0)
    if streams:
        return await context.stream(lambda stream: _stream(context, answer, generation, stream))
    return context.json(await generation.run(answer))


async def count_input_tokens(context: RequestContext) -> web.StreamResponse:
    """Answers with the number of tokens of an input."""
    body = await context.parse(InputTokensRequest)
    items = _items(context, body)
    translation = ChatTranslation()
    chat = chat_request(body, translation, _conversation(context, body, items))
    with renamed(translation.names):
        count = await count_prompt_tokens(context.caller, chat)
    return context.json({"object": "response.input_tokens", "input_tokens": count})


async def get_response(context: RequestContext) -> web.StreamResponse:
    """Answers with a response, its events, or its input items."""
    response_id, _, part = context.path_argument.partition("/")
    stored = context.service.responses.get(_key(context), response_id)
    query = context.http.query
    if part == "input_items":
        return context.json(page_of_items(stored.input_items, query))
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
    stored = context.service.responses.get(_key(context), response_id)
    if not stored.response["background"]:
        raise ApiError(400, "Cannot cancel a synchronous response.", "response_id")
    if stored.run is not None:
        await stored.run.cancel()
    return context.json(stored.current)


async def delete_response(context: RequestContext) -> web.StreamResponse:
    response_id, _, part = context.path_argument.partition("/")
    _check_part(part, "")
    store = context.service.responses
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


def _items(context: RequestContext, body: ResponsesRequest | InputTokensRequest) -> list[Item]:
    """The items of the input; none if it is a text."""
    if body.input is None or isinstance(body.input, str):
        return []
    find = partial(context.service.responses.item, _key(context))
    return without_references(body.input, find)


def _conversation(
    context: RequestContext, body: ResponsesRequest | InputTokensRequest, items: Sequence[Item]
) -> PlacedItems:
    """All items: those of earlier responses or of the conversation, and those of the input."""
    if body.conversation_id is not None:
        stored = context.service.conversations.get(_key(context), body.conversation_id)
        return placed_items(body.input, list(stored.items.values()), items)
    history = context.service.responses.history(_key(context), body.previous_response_id)
    return placed_items(body.input, history, items)


async def _begin(
    context: RequestContext, body: ResponsesRequest, items: Sequence[Item]
) -> Conversation:
    """Prepares the answer. Raises: as `begin_conversation`, with the names of the body's fields.

    With `truncation: auto`, a conversation that is too long loses as many of its first turns as it must.
    """
    placed = _conversation(context, body, items)

    async def attempt(start: int, *, clamps: bool) -> Conversation:
        translation = ChatTranslation()
        chat = chat_request(body, translation, without_beginning(placed, start))
        with renamed(translation.names):
            begun = await begin_conversation(context.caller, chat, clamp_max_tokens=clamps)
        begun.generation.rename_constraints(translation.names)
        return begun

    is_auto = body.truncation == "auto"
    clamps = not is_auto or body.max_output_tokens is None
    try:
        return await attempt(0, clamps=clamps)
    except PromptTooLongError:
        if not is_auto:
            raise
    starts = turns(placed)
    found, low, high = None, 1, len(starts)
    while low < high:
        middle = (low + high) // 2
        try:
            found = await attempt(starts[middle], clamps=clamps)
            high = middle
        except PromptTooLongError:
            low = middle + 1
    return await attempt(starts[-1], clamps=True) if found is None else found


async def _stream(
    context: RequestContext, answer: ResponseAnswer, generation: Generation, stream: EventStream
) -> None:
    """The events of a response. An error behind the first event is an event, too."""
    try:
        await generation.stream(answer, stream)
    except ConnectionError:
        raise
    except Exception as error:
        if not stream.is_open:
            raise
        await stream.send(answer.fail(as_api_error(error, context.request_id)))


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
            ResponsesRequest,
            dialect=RESPONSES,
            streams=True,
        )
    },
    "/v1/responses/input_tokens": {
        "POST": Route(count_input_tokens, "Counts the tokens of an input.", InputTokensRequest)
    },
    "/v1/responses/*": {
        "GET": Route(get_response, "A response, or its input items.", statuses=(404,)),
        "POST": Route(change_response, "Cancels a background response.", statuses=(404,)),
        "DELETE": Route(delete_response, "Forgets a response.", statuses=(404,)),
    },
}
