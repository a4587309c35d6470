"""Files and batches."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from pagoda.api.batches import uploads
from pagoda.api.batches.files import FileStore
from pagoda.api.batches.lines import check_file, finished_ids, read_lines
from pagoda.api.batches.runner import CONCURRENCY, PRIORITY, BatchRunner
from pagoda.api.errors import ApiError
from pagoda.api.key_limits import KeyLimits
from pagoda.api.keys import EVERY_ROUTE, ApiKey, ApiKeys, Scope, digest_of
from pagoda.errors import ConfigError, OverloadedError

URL = "/v1/completions"


def request(custom_id: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": URL, "body": {"prompt": "hi", **body}}


def jsonl(*requests: Any) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in requests)


async def upload(api: Any, data: bytes, purpose: str = "batch", **options: Any) -> Any:
    form = aiohttp.FormData()
    form.add_field("purpose", purpose)
    form.add_field("file", data, filename="in.jsonl")
    return await api.request("POST", "/v1/files", data=form, **options)


async def create(api: Any, file_id: str, **fields: Any) -> Any:
    body = {"input_file_id": file_id, "endpoint": URL, "completion_window": "24h", **fields}
    return await api.post("/v1/batches", body)


async def until_finished(api: Any, batch_id: str) -> dict[str, Any]:
    while True:
        batch: dict[str, Any] = (await api.get(f"/v1/batches/{batch_id}")).json()
        if batch["status"] not in ("validating", "in_progress", "finalizing", "cancelling"):
            return batch
        await asyncio.sleep(0)


async def results(api: Any, file_id: str) -> list[Any]:
    answer = await api.get(f"/v1/files/{file_id}/content")
    assert answer.status == 200
    return [json.loads(line) for line in answer.body.splitlines()]


@contextlib.asynccontextmanager
async def half_upload(api: Any, data: str = "x") -> AsyncIterator[Any]:
    """A connection with an upload that goes on after `data`, once the server has that."""
    head = 'Content-Disposition: form-data; name="file"; filename="a"'
    fields = f"Host: 127.0.0.1:{api.port}\r\nContent-Type: multipart/form-data; boundary=x\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", api.port)
    start = f"POST /v1/files HTTP/1.1\r\n{fields}Content-Length: 999999999\r\n\r\n"
    writer.write(f"{start}--x\r\n{head}\r\n\r\n{data}".encode())
    try:
        yield reader, writer
    finally:
        writer.close()


Attach = Callable[[Any], Awaitable[BatchRunner]]


@pytest.fixture
async def attach(tmp_path: Path) -> AsyncIterator[Attach]:
    """Gives a server the directory of the test, and begins to answer its batches."""
    runners: list[BatchRunner] = []

    async def attach(api: Any) -> BatchRunner:
        for runner in runners:
            await runner.close()
        if api.service.files is not None:
            api.service.files.close()
        api.service.files = FileStore(tmp_path / "files")
        api.service.batches = BatchRunner(api.service, api.service.files)
        api.service.batches.start()
        runners.append(api.service.batches)
        return runners[-1]

    yield attach
    for runner in runners:
        await runner.close()


# ---- files


async def test_files_live_and_die(api, attach: Attach) -> None:
    await attach(api)
    made = (await upload(api, b"data")).json()
    assert (made["bytes"], made["filename"], made["purpose"]) == (4, "in.jsonl", "batch")
    path = f"/v1/files/{made['id']}"
    assert (await api.get(path)).json() == made
    assert (await api.get(f"{path}/content")).body == b"data"
    assert [one["id"] for one in (await api.get("/v1/files")).json()["data"]] == [made["id"]]
    await attach(api)
    assert (await api.get(path)).json() == made
    assert (await api.request("DELETE", path)).json()["deleted"] is True
    for gone in (path, f"{path}/content"):
        assert (await api.get(gone)).status == 404
    assert [p.name for p in api.service.files.directory.iterdir()] == ["files.lock"]


async def test_an_upload_whose_client_goes_away_leaves_nothing(api, attach: Attach) -> None:
    await attach(api)
    directory = api.service.files.directory
    async with half_upload(api, "data" * 500_000):
        while not any(path.stat().st_size for path in directory.glob("*.upload")):
            await asyncio.sleep(0)
    while [path.name for path in directory.iterdir()] != ["files.lock"]:
        await asyncio.sleep(0)


async def test_what_a_killed_server_left_unfinished_is_removed(serve_api, attach: Attach) -> None:
    """Results of a batch that goes on are kept, though they have no description yet."""
    api = await serve_api()
    runner = await attach(api)
    made = (await upload(api, jsonl(*(request(str(i)) for i in range(40))))).json()
    created = (await create(api, made["id"])).json()
    files, batch = api.service.files, runner.batches[created["id"]]
    while not batch.counts.completed:
        await asyncio.sleep(0)
    await runner.close()
    orphans = [files.data_path("file-orphan"), files.directory / "file-orphan.part"]
    orphans.append(files.directory / "file-orphan.upload")
    for path in orphans:
        path.write_bytes(b"data")
    kept = {*files.directory.iterdir()}.difference(orphans)
    assert files.data_path(batch.output_id) in kept
    files.close()
    again = FileStore(files.directory)
    BatchRunner(api.service, again)
    assert {*files.directory.iterdir()} == kept
    again.close()


async def test_an_upload_that_is_too_slow_is_cut_off(
    serve_api, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It brings something all the time, so it never exceeds the time-out of one wait."""
    monkeypatch.setattr(uploads, "MIN_BYTES_PER_S", 10**12)
    api = await serve_api(body_timeout_s=0.5)
    await attach(api)
    async with asyncio.timeout(60), half_upload(api) as (reader, writer):
        answer = asyncio.create_task(reader.readline())
        while not answer.done():
            writer.write(b"x")
            await asyncio.wait([answer], timeout=0.001)
        assert b" 408 " in await answer
    assert [path.name for path in api.service.files.directory.iterdir()] == ["files.lock"]
    assert api.service.files.uploads.num_running == 0


async def test_uploads_under_way_are_bounded(
    api, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    await attach(api)
    monkeypatch.setattr(uploads, "MAX_UPLOADS", 2)
    files = api.service.files
    async with half_upload(api), half_upload(api):
        while files.uploads.num_running < 2:
            await asyncio.sleep(0)
        refused = await upload(api, b"data")
        assert (refused.status, refused.headers["Retry-After"]) == (429, "1")
        assert refused.error()["code"] == "rate_limit_exceeded"
    while files.uploads.num_running:
        await asyncio.sleep(0)
    assert (await upload(api, b"data")).status == 200


def test_one_key_leaves_room_for_uploads_of_others() -> None:
    running = uploads.Uploads()
    with contextlib.ExitStack() as stack:
        for _ in range(uploads.MAX_UPLOADS_OF_KEY):
            stack.enter_context(running.admit("heavy"))
        with pytest.raises(ApiError, match="The API key heavy may send 16 uploads"):
            stack.enter_context(running.admit("heavy"))
        stack.enter_context(running.admit("light"))
        for _ in range(uploads.MAX_UPLOADS - running.num_running):
            stack.enter_context(running.admit(""))
        with pytest.raises(ApiError, match="The server takes 64 uploads"):
            stack.enter_context(running.admit("other"))
    assert running.num_running == 0


async def test_uploads_under_way_count_as_files(
    api, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    await attach(api)
    monkeypatch.setattr("pagoda.api.batches.files.MAX_FILES", 1)
    async with half_upload(api):
        while not api.service.files.uploads.num_running:
            await asyncio.sleep(0)
        assert (await upload(api, b"data")).error()["param"] == "file"


async def test_files_are_listed_by_pages(api, attach: Attach) -> None:
    await attach(api)
    ids = {(await upload(api, b"x")).json()["id"] for _ in range(3)}
    first = (await api.get("/v1/files?limit=2")).json()
    assert (len(first["data"]), first["has_more"]) == (2, True)
    rest = (await api.get(f"/v1/files?limit=2&after={first['last_id']}")).json()
    assert (len(rest["data"]), rest["has_more"]) == (1, False)
    assert {one["id"] for one in first["data"] + rest["data"]} == ids
    assert (await api.get("/v1/files?purpose=evals")).json()["data"] == []
    newest = [one["id"] for one in (await api.get("/v1/files")).json()["data"]]
    oldest = [one["id"] for one in (await api.get("/v1/files?order=asc")).json()["data"]]
    assert oldest == newest[::-1]
    for query in ("limit=x", "order=up"):
        answer = await api.get(f"/v1/files?{query}")
        assert (answer.status, answer.error()["param"]) == (400, query.partition("=")[0])


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ([("purpose", "batch")], "file"),
        ([("file", "x")], "purpose"),
        ([("file", "x"), ("purpose", "fun")], "purpose"),
        ([("file", "x"), ("purpose", "batch"), ("more", "y")], "more"),
        ([("file", "x"), ("file", "x"), ("purpose", "batch")], "file"),
    ],
)
async def test_uploads_are_checked(api, attach: Attach, fields: Any, word: str) -> None:
    await attach(api)
    form = aiohttp.FormData(default_to_multipart=True)
    for name, value in fields:
        form.add_field(name, value, filename="f" if name == "file" else None)
    answer = await api.request("POST", "/v1/files", data=form)
    assert (answer.status, answer.error()["param"]) == (400, word)
    assert [p.name for p in api.service.files.directory.iterdir()] == ["files.lock"]


async def test_uploads_must_be_of_parts(api, attach: Attach) -> None:
    await attach(api)
    assert (await api.post("/v1/files", {"file": 1})).status == 415
    for kind in ("multipart/form-data", "multipart/form-data; boundary=x"):
        headers = {"Content-Type": kind}
        assert (await api.post("/v1/files", b"nonsense", headers=headers)).status == 400


async def test_a_directory_has_one_server(api, attach: Attach, tmp_path: Path) -> None:
    await attach(api)
    with pytest.raises(ConfigError, match="another server"):
        FileStore(tmp_path / "files")


async def test_without_a_directory_the_flag_is_named(api) -> None:
    for path in ("/v1/files", "/v1/batches", "/v1/files/x", "/v1/batches/x"):
        answer = await api.get(path)
        assert (answer.status, "--files-dir" in answer.error()["message"]) == (404, True)


async def test_other_keys_see_nothing(serve_api, attach: Attach) -> None:
    api = await serve_api(api_keys=ApiKeys(["a:=one", "b:=two"]))
    await attach(api)
    mine, other = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
    made = (await upload(api, jsonl(request("a")), headers=mine)).json()
    body = {"input_file_id": made["id"], "endpoint": URL, "completion_window": "24h"}
    assert (await api.post("/v1/batches", body, headers=other)).status == 400
    batch = (await api.post("/v1/batches", body, headers=mine)).json()
    for path in (f"/v1/files/{made['id']}", f"/v1/batches/{batch['id']}"):
        assert (await api.get(path, headers=other)).status == 404
        assert (await api.get(path, headers=mine)).status == 200
    assert (await api.get("/v1/files", headers=other)).json()["data"] == []


async def test_a_batch_of_a_revoked_key_is_not_answered(serve_api, attach: Attach) -> None:
    key = ApiKey(name="a", sha256=digest_of("a"), scopes=EVERY_ROUTE)
    keys = ApiKeys(in_file=[key])
    api = await serve_api(api_keys=keys)
    await attach(api)
    api.session.headers["Authorization"] = "Bearer a"
    api.endpoint.pause_after = 1
    made = (await upload(api, jsonl(request("x"), request("y")))).json()
    batch = (await create(api, made["id"])).json()
    await api.endpoint.paused.wait()
    keys.replace_file([])
    assert (await api.get("/v1/files")).status == 401
    runner = await attach(api)  # the same batch after a restart
    while not runner.batches[batch["id"]].is_finished:
        await asyncio.sleep(0)
    keys.replace_file([key])
    ended = (await api.get(f"/v1/batches/{batch['id']}")).json()
    assert ended["request_counts"] == {"total": 2, "completed": 0, "failed": 2}
    [first, _] = await results(api, ended["error_file_id"])
    assert first["response"]["status_code"] == 401


async def test_lines_wait_for_half_of_the_tokens_of_their_key_and_for_no_other_key(
    serve_api, attach: Attach, monkeypatch
) -> None:
    monkeypatch.setattr("pagoda.api.batches.runner.RETRY_S", 0.0)
    most, line_tokens, now = 600, 4, [0.0]
    names = "slow", "free"
    limits: list[dict[str, int]] = [{"tokens_per_minute": most}, {}]
    keys = [
        ApiKey(name=name, sha256=digest_of(name), scopes=EVERY_ROUTE, **limit)
        for name, limit in zip(names, limits, strict=True)
    ]
    slow, free = ({"headers": {"Authorization": f"Bearer {name}"}} for name in names)
    api = await serve_api(api_keys=ApiKeys(in_file=keys))
    api.service.key_limits = KeyLimits(api.service.tracker, lambda: now[0])
    runner = await attach(api)
    fields = {"endpoint": URL, "completion_window": "24h"}
    batches: dict[str, str] = {}
    for name, sent, count in (("slow", slow, 400), ("free", free, 100)):
        file = jsonl(*(request(f"{i}", max_tokens=2) for i in range(count)))
        made = (await upload(api, file, **sent)).json()
        body = {"input_file_id": made["id"], **fields}
        batches[name] = (await api.post("/v1/batches", body, **sent)).json()["id"]
    lowest = float(most)
    while not all(runner.batches[one].is_finished for one in batches.values()):
        await asyncio.sleep(0)
        left = api.service.key_limits.headers(keys[0])["x-ratelimit-remaining-tokens"]
        lowest = min(lowest, float(left))
        if runner.batches[batches["free"]].is_finished:
            if not now[0]:
                assert not runner.batches[batches["slow"]].is_finished
                answer = await api.post("/v1/completions", {"prompt": "hi"}, **slow)
                assert answer.status == 200
            now[0] += 0.01
    assert lowest >= most / 2 - (CONCURRENCY + 5) * line_tokens
    assert now[0] > 60  # 1,600 tokens of which 300 were there
    for one, count in zip(batches.values(), (400, 100), strict=True):
        assert runner.batches[one].counts.completed == count


async def test_lines_go_before_those_of_other_keys_with_the_scope_only(
    serve_api, attach: Attach
) -> None:
    keys = [
        ApiKey(name="a", sha256=digest_of("a"), scopes=EVERY_ROUTE),
        ApiKey(name="b", sha256=digest_of("b"), scopes=EVERY_ROUTE | {Scope.URGENT}),
    ]
    api = await serve_api(api_keys=ApiKeys(in_file=keys))
    await attach(api)
    for name, failed in (("a", 1), ("b", 0)):
        api.session.headers["Authorization"] = f"Bearer {name}"
        lines = jsonl(request("x", priority=-1), request("y", priority=1))
        made = (await upload(api, lines)).json()
        batch = await until_finished(api, (await create(api, made["id"])).json()["id"])
        assert batch["request_counts"] == {"total": 2, "completed": 2 - failed, "failed": failed}


async def test_files_are_private_also_in_a_directory_for_all(
    api, attach: Attach, tmp_path: Path
) -> None:
    (tmp_path / "files").mkdir(mode=0o755)
    runner = await attach(api)
    made = (await upload(api, jsonl(request("a"), request("b", temperature=-1)))).json()
    batch = (await create(api, made["id"])).json()
    while not runner.batches[batch["id"]].is_finished:
        await asyncio.sleep(0)
    files = [path for path in (tmp_path / "files").iterdir() if path.name != "files.lock"]
    assert len(files) >= 6
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}


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
    monkeypatch.setattr("pagoda.api.batches.handlers.WINDOW_S", -1)
    await attach(api)
    made = (await upload(api, jsonl(request("a"), request("b")))).json()
    batch = await until_finished(api, (await create(api, made["id"])).json()["id"])
    assert (batch["status"], batch["request_counts"]["failed"]) == ("expired", 2)
    late = await results(api, batch["error_file_id"])
    assert {line["custom_id"] for line in late} == {"a", "b"}
    assert {line["error"]["code"] for line in late} == {"batch_expired"}
    assert not api.endpoint.requests


async def test_a_full_server_is_asked_again(api, attach: Attach, monkeypatch) -> None:
    monkeypatch.setattr("pagoda.api.batches.runner.RETRY_S", 0.0)
    await attach(api)
    made = (await upload(api, jsonl(request("a")))).json()
    api.endpoint.raises = OverloadedError("full")
    created = (await create(api, made["id"])).json()
    while not api.service.request_metrics.by_key[""].finished["refused"]:
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
    api.service.files.data_path(made["id"]).unlink()
    batch = await until_finished(api, (await create(api, made["id"])).json()["id"])
    assert batch["status"] == "failed"
    assert "No such file" in batch["errors"]["data"][0]["message"]


async def test_finished_batches_make_room(serve_api, attach: Attach, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("pagoda.api.batches.runner.MAX_BATCHES", 1)
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
    output = api.service.files.data_path(runner.batches[created["id"]].output_id)
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
        api.service.files = FileStore(tmp_path / "files", max_bytes=100)
        api.service.batches = BatchRunner(api.service, api.service.files)

    async def sizes() -> list[int]:
        return [one["bytes"] for one in (await api.get("/v1/files")).json()["data"]]

    open_store()
    first = (await upload(api, jsonl(request("a")).ljust(100))).json()
    assert first["bytes"] == 100
    for _ in range(2):
        for answer in (await upload(api, b"x"), await create(api, first["id"])):
            assert answer.status == 400
            assert "100 bytes (--files-max-bytes); delete some first" in answer.error()["message"]
        api.service.files.close()
        open_store()
    await api.request("DELETE", f"/v1/files/{first['id']}")
    for data in (b"x" * 101, b"x" * 60, b"x" * 41, b"y" * 40, b""):
        await upload(api, data)
        await upload(api, b"z" * 30, "nonsense")  # gives its bytes back
    assert sorted(await sizes()) == [0, 40, 60]
    api.service.files.close()
