# SPDX-License-Identifier: Apache-2.0
"""Chat completions that are kept, read with OpenAI's client."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from pagoda.api.answers.kept_conversations import MAX_CONVERSATIONS, StoredConversation, sized
from pagoda.api.auth.keys import ApiKeys
from pagoda.api.bodies.ignored_fields import IGNORED_HEADER
from pagoda.api.openai.chat_store import ChatStore
from pagoda.api.openai.stored_chats import MAX_KEPT_CHARS

HI: Any = [{"role": "user", "content": "hi"}]


def client_of(api: Any, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key=key, max_retries=0)


async def test_a_completion_is_kept_read_changed_and_deleted(api) -> None:
    async with client_of(api) as client:
        chats = client.chat.completions
        made = [
            await chats.create(model="tiny", messages=HI, store=True, metadata={"n": str(n)})
            for n in range(3)
        ]
        await chats.create(model="tiny", messages=HI)
        assert [one.id async for one in chats.list()] == [one.id for one in made]
        page = await chats.list(order="desc", limit=2)
        assert [one.id for one in page.data] == [made[2].id, made[1].id]
        assert [one.id async for one in chats.list(metadata={"n": "1"})] == [made[1].id]
        assert [one.id async for one in chats.list(model="other")] == []
        found = await chats.retrieve(made[0].id)
        assert (found.choices, found.metadata) == (made[0].choices, {"n": "0"})
        [message] = [one async for one in chats.messages.list(made[0].id)]
        assert (message.role, message.content) == ("user", "hi")
        changed = await chats.update(made[0].id, metadata={"n": "7"})
        assert changed.metadata == {"n": "7"}
        assert (await chats.delete(made[0].id)).deleted
        with pytest.raises(openai.NotFoundError, match="Chat completion with id"):
            await chats.retrieve(made[0].id)


async def test_completions_belong_to_their_key(serve_api) -> None:
    api = await serve_api(api_keys=ApiKeys(["one", "two"]))
    async with client_of(api, "one") as one, client_of(api, "two") as two:
        kept = await one.chat.completions.create(model="tiny", messages=HI, store=True)
        assert [it.id async for it in two.chat.completions.list()] == []
        for call in (two.chat.completions.retrieve, two.chat.completions.delete):
            with pytest.raises(openai.NotFoundError):
                await call(kept.id)


async def test_what_is_not_kept_is_named(serve_api) -> None:
    api = await serve_api()
    assert (await api.chat(store=True, stream=True)).headers[IGNORED_HEADER] == "store"
    assert IGNORED_HEADER not in (await api.chat(store=True)).headers
    long = [{"role": "user", "content": "hi", "name": "a" * 64, "note": "x"} for _ in range(2500)]
    api = await serve_api("x" * 400, max_model_len=2**20)
    body = {"messages": long, "store": True, "max_tokens": 2}
    answer = await api.post("/v1/chat/completions", body)
    assert (answer.status, answer.headers[IGNORED_HEADER]) == (200, "store")
    probabilities = {"logprobs": True, "top_logprobs": 20}
    answer = await api.chat(store=True, **probabilities)
    assert len(answer.body) > MAX_KEPT_CHARS
    assert (answer.status, answer.headers[IGNORED_HEADER]) == (200, "store")
    api = await serve_api(response_store_bytes=0)
    answer = await api.chat(store=True)
    assert (answer.status, answer.headers[IGNORED_HEADER]) == (200, "store")
    assert (await api.get("/v1/chat/completions")).json()["data"] == []


def test_the_store_is_bounded() -> None:
    store = ChatStore(2**30)
    for number in range(2 * MAX_CONVERSATIONS + 2):
        chat = StoredConversation("k", {}, conversation_id=str(number))
        store.put(chat, sized([{"id": str(number)}]))
    kept = store.all_of("k")
    assert len(kept) == MAX_CONVERSATIONS
    assert kept[-1].conversation_id == str(2 * MAX_CONVERSATIONS + 1)
