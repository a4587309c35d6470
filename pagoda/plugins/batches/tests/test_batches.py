# SPDX-License-Identifier: Apache-2.0
"""Batches."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from batch_files import (
    URL,
    Attach,
    create,
    jsonl,
    request,
    results,
    until_finished,
    upload,
)

from pagoda.errors import OverloadedError
from pagoda.plugins.batches.lines import check_file, finished_ids, read_lines
from pagoda.plugins.batches.runner import PRIORITY
from pagoda.plugins.batches.state import BatchState

# ---- batches


async def test_a_batch_is_answered(api, attach: Attach) -> None:
    await attach(api)
    lines = [request("a"), request("b", temperature=-1), request("c", max_tokens=1)]
    made = (await upload(api, jsonl(*lines))).json()
    created = (await create(api, made["id"], metadata={"k": "v"})).json()
    assert (created["object"], created["metadata"]) == ("batch", {"k": "v"})
    batch = await until_finished(api, created["id"])
    assert batch["status"] == "completed"
    assert batch["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
    assert all(batch[f"{name}_at"] for name in ("in_progress", "finalizing", "completed"))
    good = {
        line["custom_id"]: line["response"] for line in await results(api, batch["output_file_id"])
    }
    assert good["a"]["body"]["choices"][0]["text"] == "ok"
    assert (good["c"]["status_code"], good["c"]["body"]["choices"][0]["text"]) == (200, "o")
    [bad] = await results(api, batch["error_file_id"])
    assert (bad["custom_id"], bad["response"]["status_code"]) == ("b", 400)
    assert bad["response"]["body"]["error"]["param"] == "temperature"
    assert {r.priority for r in api.endpoint.requests} == {PRIORITY}
    assert [one["id"] for one in (await api.get("/v1/batches")).json()["data"]] == [created["id"]]


async def test_chats_are_answered_too(api, attach: Attach) -> None:
    await attach(api)
    body = {"messages": [{"role": "user", "content": "hi"}]}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    made = (await upload(api, jsonl(line))).json()
    created = (await create(api, made["id"], endpoint="/v1/chat/completions")).json()
    batch = await until_finished(api, created["id"])
    [result] = await results(api, batch["output_file_id"])
    assert result["response"]["body"]["choices"][0]["message"]["content"] == "ok"


@pytest.mark.parametrize(
    ("data", "code", "line"),
    [
        (b"", "empty_file", None),
        (b"\n\n", "empty_file", None),
        (jsonl(request("a")) + b"{", "invalid_json_line", 2),
        (jsonl(request("a"), request("a")), "duplicate_custom_id", 2),
        (jsonl({**request("a"), "url": "/v1/other"}), "mismatched_url", 1),
        (jsonl({"custom_id": "a", "url": URL}), "invalid_request", 1),
        (jsonl({**request("a"), "method": "GET"}), "invalid_request", 1),
        (jsonl(request("a")) + b'"' + b"x" * 3000 + b'"\n', "line_too_long", 2),
    ],
)
async def test_bad_files_fail(serve_api, attach: Attach, data: bytes, code: str, line: Any) -> None:
    api = await serve_api(max_body_bytes=2000)
    await attach(api)
    created = (await create(api, (await upload(api, data)).json()["id"])).json()
    batch = await until_finished(api, created["id"])
    assert batch["status"] == "failed"
    [fault] = batch["errors"]["data"]
    assert (fault["code"], fault["line"]) == (code, line)
    assert fault["message"].endswith(".")
    assert batch["output_file_id"] is None
    assert not api.endpoint.requests


async def test_bodies_of_batches_are_checked(api, attach: Attach) -> None:
    await attach(api)
    made = (await upload(api, jsonl(request("a")))).json()
    other = (await upload(api, b"x", "evals")).json()
    for fields, word in (
        ({"endpoint": "/v1/other"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"input_file_id": other["id"]}, "input_file_id"),
        ({"metadata": {"a": "x" * 600}}, "metadata[...]"),
    ):
        answer = await create(api, made["id"], **fields)
        assert (answer.status, answer.error()["param"]) == (400, word)
    assert (await api.get("/v1/batches/batch-x")).status == 404
    assert (await api.post("/v1/batches/batch-x/cancel")).status == 404
    assert (await api.post("/v1/batches/batch-x", {})).status == 404


async def test_a_batch_is_cancelled(serve_api, attach: Attach) -> None:
    api = await serve_api("abc")
    api.endpoint.pause_after = 1
    await attach(api)
    made = (await upload(api, jsonl(*(request(str(i)) for i in range(40))))).json()
    created = (await create(api, made["id"])).json()
    await api.endpoint.paused.wait()
    assert (await api.request("DELETE", f"/v1/files/{made['id']}")).status == 409
    answer = await api.post(f"/v1/batches/{created['id']}/cancel")
    assert answer.json()["status"] == "cancelling"
    batch = await until_finished(api, created["id"])
    assert (batch["status"], batch["output_file_id"]) == ("cancelled", None)
    assert batch["request_counts"]["completed"] == 0
    assert not api.service.tracker.running
    assert (await api.post(f"/v1/batches/{created['id']}/cancel")).status == 409


async def test_what_comes_too_late_is_expired(api, attach: Attach, monkeypatch) -> None:
    monkeypatch.setattr("pagoda.plugins.batches.handlers.WINDOW_S", -1)
    await attach(api)
    made = (await upload(api, jsonl(request("a"), request("b")))).json()
    batch = await until_finished(api, (await create(api, made["id"])).json()["id"])
    assert (batch["status"], batch["request_counts"]["failed"]) == ("expired", 2)
    late = await results(api, batch["error_file_id"])
    assert {line["custom_id"] for line in late} == {"a", "b"}
    assert {line["error"]["code"] for line in late} == {"batch_expired"}
    assert not api.endpoint.requests


async def test_a_full_server_is_asked_again(api, attach: Attach, monkeypatch) -> None:
    monkeypatch.setattr("pagoda.plugins.batches.runner.RETRY_S", 0.0)
    await attach(api)
    made = (await upload(api, jsonl(request("a")))).json()
    api.endpoint.raises = OverloadedError("full")
    created = (await create(api, made["id"])).json()
    while not api.service.request_metrics.by_client["", ""].finished["refused"]:
        await asyncio.sleep(0)
    api.endpoint.raises = None
    batch = await until_finished(api, created["id"])
    assert batch["request_counts"] == {"total": 1, "completed": 1, "failed": 0}


async def test_lines_of_a_full_server_end_with_their_batch(
    api, attach: Attach, monkeypatch
) -> None:
    runner = await attach(api)
    made = (await upload(api, jsonl(request("a")))).json()

    def answer(_: Any) -> Any:
        runner.batches[created["id"]].expires_at = 0
        raise OverloadedError("full")

    monkeypatch.setattr(api.endpoint, "generate", answer)
    created = (await create(api, made["id"])).json()
    batch = await until_finished(api, created["id"])
    [line] = await results(api, batch["error_file_id"])
    assert line["response"]["status_code"] == 429


async def test_a_batch_whose_file_is_gone_says_so(api, attach: Attach) -> None:
    await attach(api)
    made = (await upload(api, jsonl(request("a")))).json()
    api.service.state(BatchState).files.data_path(made["id"]).unlink()
    batch = await until_finished(api, (await create(api, made["id"])).json()["id"])
    assert batch["status"] == "failed"
    assert "No such file" in batch["errors"]["data"][0]["message"]


async def test_finished_batches_make_room(serve_api, attach: Attach, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("pagoda.plugins.batches.runner.MAX_BATCHES", 1)
    api = await serve_api("abc")
    await attach(api)
    made = (await upload(api, jsonl(request("a")))).json()
    first = (await create(api, made["id"])).json()
    await until_finished(api, first["id"])
    api.endpoint.pause_after = 1
    second = (await create(api, made["id"])).json()
    assert (await api.get(f"/v1/batches/{first['id']}")).status == 404
    assert [path.stem for path in (tmp_path / "files").glob("batch-*.json")] == [second["id"]]
    await api.endpoint.paused.wait()
    assert (await create(api, made["id"])).status == 429


@pytest.mark.parametrize("stop_after", [0, 1, 5, 17, 30])
async def test_a_batch_goes_on_where_it_was(serve_api, attach: Attach, stop_after: int) -> None:
    api = await serve_api()
    runner = await attach(api)
    made = (await upload(api, jsonl(*(request(str(i)) for i in range(40))))).json()
    created = (await create(api, made["id"])).json()
    while runner.batches[created["id"]].counts.completed < stop_after:
        await asyncio.sleep(0)
    await runner.close()
    output = api.service.state(BatchState).files.data_path(runner.batches[created["id"]].output_id)
    if output.exists():  # a crash cuts the last line off
        output.write_bytes(output.read_bytes() + b'{"id": "batch_req", "custom_id": "39", "resp')
    await attach(api)
    batch = await until_finished(api, created["id"])
    assert batch["request_counts"] == {"total": 40, "completed": 40, "failed": 0}
    ids = [line["custom_id"] for line in await results(api, batch["output_file_id"])]
    assert sorted(ids, key=int) == [str(i) for i in range(40)]


# ---- lines


def test_long_lines_are_not_held(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(b"a\n" + b"x" * 5000 + b"\n\nb\n" + b"y" * 5000)
    assert list(read_lines(path, 100)) == [(1, b"a\n"), (2, None), (4, b"b\n"), (5, None)]


def test_faults_are_listed_up_to_a_bound(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(b"{\n" * 100_000)
    _, faults = check_file(path, URL, 100)
    assert [fault.line for fault in faults] == list(range(1, 101))
    path.write_bytes(jsonl(*({**request(str(i)), "body": {}} for i in range(50_001))))
    [fault] = check_file(path, URL, 1000)[1]
    assert fault.code == "max_requests_exceeded"


def test_a_torn_line_is_no_result(tmp_path: Path) -> None:
    path = tmp_path / "out"
    assert finished_ids(path) == set()
    path.write_bytes(b'{"custom_id": "a"}\n{"custom_id": "b"')
    assert finished_ids(path) == {"a"}
    assert path.read_bytes() == b'{"custom_id": "a"}\n'


async def test_vectors_come_behind_all_other_requests(api, attach: Attach) -> None:
    await attach(api)
    url = {"url": "/v1/embeddings"}
    good = {**request("a"), **url, "body": {"input": ["abc", "d"], "priority": 3}}
    bad = {**request("b"), **url, "body": {"input": []}}
    file_id = (await upload(api, jsonl(good, bad))).json()["id"]
    batch = (await create(api, file_id, endpoint="/v1/embeddings")).json()
    done = await until_finished(api, batch["id"])
    assert (done["request_counts"]["completed"], done["request_counts"]["failed"]) == (1, 1)
    [line] = await results(api, done["output_file_id"])
    asked = (await api.post("/v1/embeddings", {"input": ["abc", "d"]})).json()
    assert line["response"]["body"]["data"] == asked["data"]
    [line] = await results(api, done["error_file_id"])
    assert line["response"]["body"]["error"]["param"] == "input"
    assert [one.priority for one in api.endpoint.requests[:2]] == [PRIORITY + 3] * 2


async def test_responses_are_answered_and_kept(api, attach: Attach) -> None:
    await attach(api)
    url = "/v1/responses"
    bodies = {
        "good": {"input": "hi", "priority": 3},
        "stream": {"input": "hi", "stream": True},
        "background": {"input": "hi", "background": True},
        "input": {"instructions": "x"},
    }
    lines = [{"custom_id": name, "url": url, "body": body} for name, body in bodies.items()]
    file_id = (await upload(api, jsonl(*lines))).json()["id"]
    batch = (await create(api, file_id, endpoint=url)).json()
    done = await until_finished(api, batch["id"])
    [line] = await results(api, done["output_file_id"])
    response = line["response"]["body"]
    assert (line["custom_id"], response["status"]) == ("good", "completed")
    assert response["output"][0]["content"][0]["text"] == "ok"
    assert (await api.get(f"{url}/{response['id']}")).json() == response
    refused = await results(api, done["error_file_id"])
    params = {one["custom_id"]: one["response"]["body"]["error"]["param"] for one in refused}
    assert params == {name: name for name in ("stream", "background", "input")}
    assert [one.priority for one in api.endpoint.requests] == [PRIORITY + 3]


async def test_all_files_together_are_bounded(api, tmp_path: Path) -> None:
    def open_store() -> None:
        api.service.state(BatchState).open(tmp_path / "files", max_bytes=100)

    async def sizes() -> list[int]:
        return [one["bytes"] for one in (await api.get("/v1/files")).json()["data"]]

    open_store()
    first = (await upload(api, jsonl(request("a")).ljust(100))).json()
    assert first["bytes"] == 100
    for _ in range(2):
        for answer in (await upload(api, b"x"), await create(api, first["id"])):
            assert answer.status == 400
            assert "100 bytes (--files-max-bytes); delete some first" in answer.error()["message"]
        api.service.state(BatchState).files.close()
        open_store()
    await api.request("DELETE", f"/v1/files/{first['id']}")
    for data in (b"x" * 101, b"x" * 60, b"x" * 41, b"y" * 40, b""):
        await upload(api, data)
        await upload(api, b"z" * 30, "nonsense")  # gives its bytes back
    assert sorted(await sizes()) == [0, 40, 60]
    api.service.state(BatchState).files.close()
