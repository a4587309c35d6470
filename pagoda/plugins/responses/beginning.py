# SPDX-License-Identifier: Apache-2.0
"""The beginning of a response: its conversation, the generation of its answer, and what is kept of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

from pagoda.api.answers.conversation import Conversation, begin_conversation
from pagoda.api.answers.generation import Generation
from pagoda.api.answers.kept_conversations import SizedItems, check_room, sized
from pagoda.api.answers.kept_json import kept_bytes
from pagoda.api.bodies.fields import renamed
from pagoda.api.bodies.items import Item
from pagoda.api.http.request_context import Caller
from pagoda.concurrency.async_utils import bound_to_loop
from pagoda.plugins.responses.background import BackgroundRun
from pagoda.plugins.responses.bodies import InputTokensRequest, ResponsesRequest, check_body
from pagoda.plugins.responses.events import EventLog, EventWriter
from pagoda.plugins.responses.items import kept_items, without_references
from pagoda.plugins.responses.response import ResponseAnswer
from pagoda.plugins.responses.state import ResponseState
from pagoda.plugins.responses.store import ResponseStore, StoredResponse
from pagoda.plugins.responses.translation import (
    ChatTranslation,
    PlacedItems,
    chat_request,
    placed_items,
    turns,
    without_beginning,
)
from pagoda.text.prompt_checks import PromptTooLongError

ITEM_CHARS = 32
"""Characters that an item of an earlier response counts for, at least."""


@dataclass(frozen=True)
class BegunResponse:
    """A response that has been prepared and is not answered yet."""

    answer: ResponseAnswer
    generation: Generation
    stored: StoredResponse
    """The response as it is kept when the answer has ended, where the body says so."""

    def run_in_background(self, store: ResponseStore) -> BackgroundRun:
        """Starts the answer, which is found in the store from now on."""
        stored = self.stored
        stored.response = self.answer.object()
        run = stored.run = BackgroundRun(self.answer, self.generation, stored.log)
        store.put(stored, kept_bytes(stored.response))
        run.start()
        return run


async def begin_response(caller: Caller, body: ResponsesRequest) -> BegunResponse:
    """Prepares a response. Raises InvalidRequestError: a field is wrong; names it."""
    check_body(body)
    store = caller.service.state(ResponseState).responses
    if body.background:
        store.check_room(_key(caller))
    items = await input_items(caller, body)
    talk = None
    if body.conversation_id is not None:
        talk = caller.service.state(ResponseState).conversations.get(
            _key(caller), body.conversation_id
        )
        check_room(talk, max(len(items), 1), "conversation")
    conversation = await _begin(caller, body, items)
    generation = conversation.generation
    streams = bool(body.stream)
    log = EventLog() if body.background and streams else None
    kept = await caller.translate(partial(_kept, body, items))
    num_bytes = sum(map(itemgetter(1), kept))
    stored = StoredResponse(_key(caller), {}, list(map(itemgetter(0), kept)), num_bytes, log=log)

    @bound_to_loop
    def keep(response: dict[str, Any], num_bytes: int, added: SizedItems) -> None:
        stored.response, stored.run = response, None
        if talk is not None:
            caller.service.state(ResponseState).conversations.add(talk, added)
        if body.is_stored:
            store.put(stored, num_bytes)

    def measure(response: dict[str, Any]) -> None:
        """Lets a response be kept that has been put together, maybe in another thread."""
        goes_on = talk is not None and response["status"] in ("completed", "incomplete")
        added = [*kept, *sized(response["output"])] if goes_on else []
        keep(response, kept_bytes(response) if body.is_stored else 0, added)

    answer = ResponseAnswer(
        body,
        conversation,
        model=caller.service.name_of(generation.generator),
        writer=EventWriter(None if log is None else bound_to_loop(log.append)) if streams else None,
        on_finish=measure,
    )
    return BegunResponse(answer, generation, stored)


async def answer_response(caller: Caller, body: ResponsesRequest) -> dict[str, Any]:
    """The response in one piece. Raises: as `begin_response`."""
    begun = await begin_response(caller, body)
    return await begun.generation.run(begun.answer)


def _kept(body: ResponsesRequest, items: Sequence[Item]) -> SizedItems:
    """The items of an input as they are kept."""
    return sized(kept_items(body.input or "", items))


def _key(caller: Caller) -> str:
    return caller.client_request.key_name


async def input_items(caller: Caller, body: ResponsesRequest | InputTokensRequest) -> list[Item]:
    """The items of the input; none if it is a text."""
    if body.input is None or isinstance(body.input, str):
        return []
    find = partial(caller.service.state(ResponseState).responses.item, _key(caller))
    return await without_references(body.input, find)


def conversation_items(
    caller: Caller, body: ResponsesRequest | InputTokensRequest, items: Sequence[Item]
) -> PlacedItems:
    """All items: those of earlier responses or of the conversation, and those of the input."""
    if body.conversation_id is not None:
        stored = caller.service.state(ResponseState).conversations.get(
            _key(caller), body.conversation_id
        )
        return placed_items(body.input, list(stored.items.values()), items)
    history = caller.service.state(ResponseState).responses.history(
        _key(caller), body.previous_response_id
    )
    return placed_items(body.input, history, items)


async def _begin(caller: Caller, body: ResponsesRequest, items: Sequence[Item]) -> Conversation:
    """Prepares the answer. Raises: as `begin_conversation`, with the names of the body's fields.

    With `truncation: auto`, a conversation that is too long loses as many of its first turns as it must.
    """
    placed = conversation_items(caller, body, items)

    async def attempt(start: int, *, clamps: bool) -> Conversation:
        translation = ChatTranslation()
        chat = await caller.translate(
            lambda: chat_request(
                body, translation, without_beginning(placed, start), caller.ignored
            ),
            more=ITEM_CHARS * len(placed),
        )
        with renamed(translation.names):
            begun = await begin_conversation(caller, chat, clamp_max_tokens=clamps)
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
