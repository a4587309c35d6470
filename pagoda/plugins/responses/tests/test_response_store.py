# SPDX-License-Identifier: Apache-2.0
"""Responses that are kept: retrieval, conversations, background work, bounds."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
from openai.types.responses import Response
from openai.types.responses.response_item_list import ResponseItemList
from template_texts import QWEN, prompt_of
from test_responses import checked, events_of, respond

from pagoda.api.answers.kept_conversations import ConversationStore
from pagoda.api.answers.kept_json import kept_bytes
from pagoda.api.auth.keys import ApiKeys
from pagoda.plugins.responses.events import EventLog
from pagoda.plugins.responses.response import ResponseAnswer
from pagoda.plugins.responses.state import ResponseState
from pagoda.plugins.responses.store import ResponseStore, StoredResponse


async def get(api: Any, path: str, **options: Any) -> dict[str, Any]:
    answer = await api.get(f"/v1/responses/{path}", **options)
    assert answer.status == 200, answer.body
    body: dict[str, Any] = answer.json()
    return body


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_is_kept_unless_the_client_says_no(serve_api, stream: bool) -> None:
    api = await serve_api("ok", text=QWEN)
    response = await respond(api, stream=stream)
    assert await get(api, response["id"]) == response
    forgotten = await respond(api, store=False, stream=stream)
    answer = await api.get(f"/v1/responses/{forgotten['id']}")
    assert answer.status == 404
    assert answer.error()["message"] == f"Response with id {forgotten['id']!r} not found."


async def test_deletion(serve_api) -> None:
    api = await serve_api("ok", text=QWEN)
    path = f"/v1/responses/{(await respond(api))['id']}"
    assert (await api.request("DELETE", path)).json()["deleted"] is True
    assert (await api.request("DELETE", path)).status == 404
    assert len(api.service.state(ResponseState).responses) == 0
    assert api.service.state(ResponseState).responses.num_bytes == 0


async def test_a_conversation_goes_on(serve_api) -> None:
    api = await serve_api("ok", text=QWEN)
    first = await respond(api, instructions="I", input="a")
    second = await respond(api, input="b", previous_response_id=first["id"], store=False)
    assert prompt_of(api) == "[user]a[assistant]ok[user]b[assistant]"
    assert second["previous_response_id"] == first["id"]
    third = await respond(api, input="c", previous_response_id=first["id"])
    assert prompt_of(api) == "[user]a[assistant]ok[user]c[assistant]"
    await respond(api, input="d", previous_response_id=third["id"])
    assert prompt_of(api) == "[user]a[assistant]ok[user]c[assistant]ok[user]d[assistant]"


async def test_a_conversation_needs_all_its_responses(serve_api) -> None:
    api = await serve_api("ok", text=QWEN)
    first = await respond(api)
    second = await respond(api, previous_response_id=first["id"])
    await api.request("DELETE", f"/v1/responses/{first['id']}")
    body = {"input": "x", "previous_response_id": second["id"]}
    answer = await api.post("/v1/responses", body)
    assert (answer.status, answer.error()["code"]) == (400, "previous_response_not_found")


async def test_items_of_a_long_body_are_looked_up_on_the_event_loop(
    serve_api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store is no thing for threads: one could find a response that another request takes away."""
    api = await serve_api("ok", text=QWEN, max_model_len=2**20)
    response = await respond(api, input="a")
    find, threads = api.service.state(ResponseState).responses.item, set[int]()

    def watched(*given: str) -> Any:
        threads.add(threading.get_ident())
        return find(*given)

    monkeypatch.setattr(api.service.state(ResponseState).responses, "item", watched)
    reference = {"id": response["output"][0]["id"]}
    await respond(api, input=[reference, {"role": "user", "content": "x" * 100_000}])
    assert threads == {threading.get_ident()}


async def test_what_a_thread_has_put_together_is_kept_on_the_event_loop(
    serve_api, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = await serve_api("ok", text=QWEN)
    conversation = (await api.post("/v1/conversations", {})).json()["id"]
    here, seen = threading.get_ident(), set[tuple[str, bool]]()

    def watched(work: Callable[..., Any]) -> Callable[..., Any]:
        def watch(*given: Any) -> Any:
            seen.add((work.__qualname__, threading.get_ident() == here))
            return work(*given)

        return watch

    monkeypatch.setattr(ResponseAnswer, "whole", watched(ResponseAnswer.whole))
    for owner, name in ((ResponseStore, "put"), (ConversationStore, "add"), (EventLog, "append")):
        monkeypatch.setattr(owner, name, watched(getattr(owner, name)))
    monkeypatch.setattr("pagoda.concurrency.async_utils.LONG_TEXT_CHARS", 8)
    monkeypatch.setattr("pagoda.concurrency.async_utils._SHORT_TEXT_CHARS", -1)
    response = await respond(api, conversation=conversation)
    await api.post("/v1/responses", {"input": "x", "background": True, "stream": True})
    assert seen == {
        ("ResponseAnswer.whole", False),
        ("ResponseStore.put", True),
        ("ConversationStore.add", True),
        ("EventLog.append", True),
    }
    assert (await api.get(f"/v1/responses/{response['id']}")).status == 200
    items = (await api.get(f"/v1/conversations/{conversation}/items")).json()["data"]
    assert len(items) == 2


async def test_items_that_are_named_by_id(serve_api) -> None:
    api = await serve_api("ok", text=QWEN)
    response = await respond(api, input="a")
    reference = {"type": "item_reference", "id": response["output"][0]["id"]}
    await respond(api, input=[reference, {"role": "user", "content": "b"}])
    assert prompt_of(api) == "[assistant]ok[user]b[assistant]"
    answer = await api.post("/v1/responses", {"input": [{"id": "msg_no"}]})
    assert (answer.status, answer.error()["param"]) == (404, "input[0].id")


async def test_input_items(serve_api) -> None:
    api = await serve_api("ok", text=QWEN)
    items = [
        {"role": "user", "content": "a"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "3"},
    ]
    path = f"{(await respond(api, input=items))['id']}/input_items"
    listed = await get(api, path)
    ResponseItemList.model_validate_json(json.dumps(listed), strict=True)
    kinds = [item["type"] for item in listed["data"]]
    assert kinds == ["function_call_output", "function_call", "message"]
    page = await get(api, path, params={"order": "asc", "limit": "2"})
    assert (len(page["data"]), page["has_more"]) == (2, True)
    rest = await get(api, path, params={"order": "asc", "after": page["last_id"]})
    assert [item["type"] for item in rest["data"]] == ["function_call_output"]
    for query in ({"limit": "0"}, {"limit": "x"}, {"order": "up"}, {"after": "x"}):
        answer = await api.get(f"/v1/responses/{path}", params=query)
        assert (answer.status, answer.error()["param"]) == (400, next(iter(query)))


@pytest.mark.parametrize("path", ["/x", "/cancel", "/input_items/x"])
async def test_no_such_part(serve_api, path: str) -> None:
    api = await serve_api("ok", text=QWEN)
    response = await respond(api)
    assert (await api.get(f"/v1/responses/{response['id']}{path}")).status == 404


async def test_a_synchronous_response_cannot_be_cancelled(serve_api) -> None:
    api = await serve_api("ok", text=QWEN)
    answer = await api.post(f"/v1/responses/{(await respond(api))['id']}/cancel")
    assert answer.status == 400
    assert answer.error()["message"] == "Cannot cancel a synchronous response."


async def until_done(api: Any, response: dict[str, Any]) -> dict[str, Any]:
    while response["status"] in ("queued", "in_progress"):
        await asyncio.sleep(0)
        response = checked(await get(api, response["id"]))
    return response


async def test_background(serve_api) -> None:
    api = await serve_api("Hello!", text=QWEN)
    queued = await respond(api, background=True)
    assert (queued["status"], queued["output"], queued["usage"]) == ("queued", [], None)
    done = await until_done(api, queued)
    assert (done["status"], done["background"]) == ("completed", True)
    assert done["output"][0]["content"][0]["text"] == "Hello!"
    assert (await api.post(f"/v1/responses/{done['id']}/cancel")).json() == done


async def test_background_cancelled(serve_api) -> None:
    api = await serve_api("Hello!", text=QWEN)
    api.endpoint.pause_after = 2
    queued = await respond(api, background=True)
    await api.endpoint.paused.wait()
    running = checked(await get(api, queued["id"]))
    assert running["status"] == "in_progress"
    assert running["output"][0]["content"][0]["text"] == "He"
    body = {"input": "x", "previous_response_id": queued["id"]}
    assert (await api.post("/v1/responses", body)).status == 400
    cancelled = checked((await api.post(f"/v1/responses/{queued['id']}/cancel")).json())
    assert cancelled["status"] == "cancelled"
    assert len(api.endpoint.aborted) == 1
    assert await get(api, queued["id"]) == cancelled


async def test_background_failed(serve_api) -> None:
    api = await serve_api("Hello!", text=QWEN)
    api.endpoint.breaks_after = 2
    failed = await until_done(api, await respond(api, background=True))
    assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")


async def test_a_background_stream_goes_on_without_its_client(serve_api) -> None:
    api = await serve_api("Hello!", text=QWEN)
    api.endpoint.pause_after = 2
    body = {"input": "hi", "background": True, "stream": True}
    async with api.session.post(f"{api.url}/v1/responses", json=body) as response:
        first = await response.content.readuntil(b"\n\n")
    response_id = json.loads(first.split(b"data: ")[1])["response"]["id"]
    api.endpoint.go_on.set()
    path = f"/v1/responses/{response_id}"
    events = events_of(await api.get(path, params={"stream": "true"}))
    assert events[0]["response"]["status"] == "queued"
    assert events[1]["type"] == "response.in_progress"
    assert events[-1]["response"] == await get(api, response_id)
    answer = await api.get(path, params={"stream": "true", "starting_after": "3"})
    assert answer.body.count(b"\n\n") == len(events) - 4
    assert b'"sequence_number":4' in answer.body.split(b"\n\n")[0]


async def test_only_background_streams_are_kept_as_events(serve_api) -> None:
    api = await serve_api("ok", text=QWEN)
    path = f"/v1/responses/{(await respond(api, stream=True))['id']}"
    assert (await api.get(path, params={"stream": "true"})).status == 400


async def test_responses_belong_to_a_key(serve_api) -> None:
    api = await serve_api("ok", text=QWEN, api_keys=ApiKeys(["a:=1", "b:=2"]))
    mine, theirs = ({"Authorization": f"Bearer {key}"} for key in "12")
    body = {"input": "secret"}
    response = (await api.post("/v1/responses", body, headers=mine)).json()
    path = f"/v1/responses/{response['id']}"
    assert (await api.get(path, headers=mine)).status == 200
    assert (await api.get(path, headers=theirs)).status == 404
    assert (await api.get(f"{path}/input_items", headers=theirs)).status == 404
    assert (await api.request("DELETE", path, headers=theirs)).status == 404
    for stolen in (
        {"previous_response_id": response["id"]},
        {"input": [{"type": "item_reference", "id": response["output"][0]["id"]}]},
    ):
        answer = await api.post("/v1/responses", {**body, **stolen}, headers=theirs)
        assert answer.status in (400, 404)


async def test_the_oldest_responses_make_room(serve_api) -> None:
    api = await serve_api("ok", text=QWEN, response_store_bytes=24_000)
    ids = [(await respond(api, input="x" * 100))["id"] for _ in range(20)]
    store = api.service.state(ResponseState).responses
    assert 0 < store.num_bytes <= 24_000
    assert 2 <= len(store) < 20
    assert (await api.get(f"/v1/responses/{ids[-1]}")).status == 200
    assert (await api.get(f"/v1/responses/{ids[0]}")).status == 404


async def test_a_store_without_room_keeps_nothing(serve_api) -> None:
    api = await serve_api("ok", text=QWEN, response_store_bytes=0)
    response = await respond(api)
    assert (await api.get(f"/v1/responses/{response['id']}")).status == 404


def test_a_used_response_stays() -> None:
    store = ResponseStore(max_bytes=1200)
    for number in range(10):
        response = {"id": str(number), "output": [], "previous_response_id": None}
        store.put(StoredResponse("", response, []), kept_bytes(response))
        assert store.get("", "0").response_id == "0"
    assert store.num_bytes <= 1200
    assert len(store) < 10


def test_the_types_of_the_client_are_strict() -> None:
    with pytest.raises(ValueError, match="status"):
        Response.model_validate_json('{"id": "x", "status": "wrong"}', strict=True)


async def test_a_key_drops_its_own_responses_and_not_those_of_others(serve_api) -> None:
    keys = ApiKeys(["a:=1", "b:=2"])
    api = await serve_api("ok", text=QWEN, api_keys=keys, response_store_bytes=24_000)
    mine, theirs = ({"Authorization": f"Bearer {key}"} for key in "12")
    for path in ("responses", "conversations"):
        body = {"input": "x"} if path == "responses" else {"metadata": {"a": "b"}}
        kept = (await api.post(f"/v1/{path}", body, headers=mine)).json()["id"]
        large = {"input": "x" * 150} if path == "responses" else {"metadata": {"a": "b" * 500}}
        first, *_ = [
            (await api.post(f"/v1/{path}", large, headers=theirs)).json()["id"] for _ in range(60)
        ]
        assert (await api.get(f"/v1/{path}/{kept}", headers=mine)).status == 200
        assert (await api.get(f"/v1/{path}/{first}", headers=theirs)).status == 404


async def test_a_key_leaves_others_places_for_background_responses(serve_api, monkeypatch) -> None:
    monkeypatch.setattr("pagoda.plugins.responses.store.MAX_RUNNING_RESPONSES", 8)
    api = await serve_api("ok", text=QWEN, api_keys=ApiKeys(["a:=1", "b:=2"]))
    api.endpoint.pause_after = 1
    mine, theirs = ({"Authorization": f"Bearer {key}"} for key in "12")
    body = {"input": "x", "background": True}
    begun = [await api.post("/v1/responses", body, headers=theirs) for _ in range(8)]
    assert [answer.status for answer in begun] == [200] * 4 + [429] * 4
    assert "4 background responses of 4 that run are yours" in begun[-1].error()["message"]
    assert (await api.post("/v1/responses", body, headers=mine)).status == 200
    api.endpoint.go_on.set()
