# SPDX-License-Identifier: Apache-2.0
"""`/v1/conversations`, checked with the types of OpenAI's client."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
from openai.types.conversations import Conversation, ConversationItemList
from template_texts import QWEN, prompt_of
from test_responses import respond

from pagoda.api.answers import kept_conversations as store_module
from pagoda.api.answers.kept_conversations import ConversationStore, StoredConversation, sized
from pagoda.api.answers.kept_json import kept_bytes
from pagoda.api.auth.keys import ApiKeys
from pagoda.api.http import request_context
from pagoda.api.http.sse import encode_json
from pagoda.plugins.responses.state import ResponseState

USER = {"role": "user", "content": "a"}


async def begin(api: Any, **body: Any) -> str:
    answer = await api.post("/v1/conversations", body)
    conversation = Conversation.model_validate_json(answer.body, strict=True)
    return f"/v1/conversations/{conversation.id}"


async def listed(api: Any, path: str) -> list[dict[str, Any]]:
    answer = await api.get(f"{path}/items", params={"order": "asc"})
    ConversationItemList.model_validate_json(answer.body, strict=True)
    items: list[dict[str, Any]] = answer.json()["data"]
    return items


async def test_a_conversation_grows_with_responses(serve_api) -> None:
    api = await serve_api("ok", text=QWEN)
    path = await begin(api, items=[USER], metadata={"k": "v"})
    name = path.rpartition("/")[2]
    first = await respond(api, input="b", conversation=name)
    assert first["conversation"] == {"id": name}
    await respond(api, input="c", conversation={"id": name}, store=False, stream=True)
    assert prompt_of(api) == "[user]a[user]b[assistant]ok[user]c[assistant]"
    roles = [item["role"] for item in await listed(api, path)]
    assert roles == ["user", "user", "assistant", "user", "assistant"]


async def test_items_and_metadata(serve_api) -> None:
    api = await serve_api("ok", text=QWEN)
    path = await begin(api)
    assert await listed(api, path) == []
    added = (await api.post(f"{path}/items", {"items": [USER, USER]})).json()["data"]
    assert await listed(api, path) == added
    item = f"{path}/items/{added[0]['id']}"
    assert (await api.get(item)).json() == added[0]
    assert (await api.request("DELETE", item)).json()["object"] == "conversation"
    assert (await api.get(item)).status == 404
    changed = (await api.post(path, {"metadata": {"x": "y"}})).json()
    assert changed == (await api.get(path)).json()
    assert changed["metadata"] == {"x": "y"}
    assert (await api.request("DELETE", path)).json()["deleted"] is True
    assert (await api.get(path)).status == 404
    assert api.service.state(ResponseState).conversations.num_bytes == 0


async def test_refusals(serve_api) -> None:
    api = await serve_api("ok", text=QWEN, api_keys=ApiKeys(["a:=1", "b:=2"]))
    mine, theirs = ({"Authorization": f"Bearer {key}"} for key in "12")
    answer = await api.post("/v1/conversations", {"items": [USER]}, headers=mine)
    path = f"/v1/conversations/{answer.json()['id']}"
    assert (await api.get(path, headers=mine)).status == 200
    assert (await api.get(path, headers=theirs)).status == 404
    body = {"input": "x", "conversation": answer.json()["id"]}
    assert (await api.post("/v1/responses", body, headers=theirs)).status == 404
    assert (await api.get(f"{path}/nothing", headers=mine)).status == 404
    bad = await api.post("/v1/conversations", {"items": [{"type": "x"}]}, headers=mine)
    assert (bad.status, bad.error()["param"]) == (400, "items[0].type")


def test_the_oldest_conversations_make_room() -> None:
    store = ConversationStore(max_bytes=2000)
    for number in range(20):
        stored = StoredConversation("", {})
        store.put(stored, sized([{"id": str(number), "text": "x" * 100}]))
    assert 0 < store.num_bytes <= 2000
    assert 2 < len(store) < 20
    assert json.dumps(store.get("", stored.conversation_id).object())


def test_a_conversation_that_grows_too_large_displaces_no_other() -> None:
    store = ConversationStore(max_bytes=1000)
    small, large = StoredConversation("", {}), StoredConversation("", {})
    for stored in (small, large):
        store.put(stored, [])
    store.add(large, sized([{"id": "1", "text": "x" * 2000}]))
    assert len(store) == 1
    assert store.get("", small.conversation_id) is small


def test_metadata_count() -> None:
    store = ConversationStore(max_bytes=1000)
    stored = StoredConversation("", {})
    store.put(stored, [])
    store.set_metadata(stored, {"k": "v" * 500})
    assert store.num_bytes > 500
    store.set_metadata(stored, {})
    store.remove(stored)
    assert store.num_bytes == 0


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("", {"metadata": {"k": "v" * 513}}, "metadata[...]"),
        ("", {"items": [{"role": "user", "content": "x" * 2000}]}, "items"),
        ("/one", {"items": [USER]}, "items"),
        ("/one/items", {"items": [USER], "metadata": {}}, "metadata"),
        ("/one/items", {"items": [{"role": "user", "content": "x" * 2000}]}, "items"),
    ],
)
async def test_what_is_not_kept_is_refused(serve_api, path: str, body: Any, param: str) -> None:
    api = await serve_api("ok", text=QWEN, response_store_bytes=2000)
    one = await begin(api)
    answer = await api.post(path.replace("/one", one) or "/v1/conversations", body)
    assert (answer.status, answer.error()["param"]) == (400, param)
    assert (await api.get(one)).status == 200


def test_items_that_go_take_all_of_their_bytes_with_them() -> None:
    store = ConversationStore(max_bytes=10**6)
    stored = StoredConversation("", {})
    store.put(stored, [])
    before = store.num_bytes
    store.add(stored, sized([{"id": "a", "text": "x"}, {"id": "b", "text": "é"}]))
    store.add(stored, sized([{"id": "a", "text": "y"}]))  # which gets an id of its own
    for item_id in list(stored.items):
        store.remove_item(stored, item_id)
    assert store.num_bytes == before


async def test_long_items_are_measured_and_written_beside_the_event_loop(
    serve_api, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, long = threading.get_ident(), "x" * 100_000
    told: list[str] = []

    def watched(name: str, work: Callable[[object], Any]) -> Callable[[object], Any]:
        def watch(value: object) -> Any:
            if threading.get_ident() == here and long in str(value):
                told.append(name)
            return work(value)

        return watch

    api = await serve_api("ok", text=QWEN, max_model_len=2**20)
    monkeypatch.setattr(store_module, "kept_bytes", watched("measured", kept_bytes))
    monkeypatch.setattr(request_context, "encode_json", watched("written", encode_json))
    items = [{"role": "user", "content": long}]
    path = await begin(api, items=items)
    assert (await api.post(f"{path}/items", {"items": items})).status == 200
    [item, _] = await listed(api, path)
    assert (await api.get(f"{path}/items/{item['id']}")).status == 200
    response = await respond(api, input=long, conversation=path.rpartition("/")[2])
    assert (await api.get(f"/v1/responses/{response['id']}/input_items")).status == 200
    assert (await api.request("DELETE", f"{path}/items/{item['id']}")).status == 200
    assert told == []
