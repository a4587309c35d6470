# SPDX-License-Identifier: Apache-2.0
"""Files and uploads."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from batch_files import (
    URL,
    Attach,
    create,
    half_upload,
    jsonl,
    request,
    results,
    until_finished,
    upload,
)

from pagoda.api.auth.key_limits import KeyLimits
from pagoda.api.auth.keys import EVERY_ROUTE, ApiKey, ApiKeys, Scope, digest_of
from pagoda.api.errors import ApiError
from pagoda.api.http import pace
from pagoda.api.http.under_way import UnderWay
from pagoda.errors import ConfigError
from pagoda.plugins.batches import files
from pagoda.plugins.batches.files import FileStore
from pagoda.plugins.batches.runner import CONCURRENCY, BatchRunner
from pagoda.plugins.batches.state import BatchState


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
    assert [p.name for p in api.service.state(BatchState).files.directory.iterdir()] == [
        "files.lock"
    ]


async def test_an_upload_that_waits_to_be_asked_for_is_asked_at_once(api, attach: Attach) -> None:
    await attach(api)
    form = (
        b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\nx\r\n--b--\r\n'
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", api.port)
    writer.write(
        b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\n"
        b"Content-Type: multipart/form-data; boundary=b\r\nContent-Length: %d\r\n\r\n" % len(form)
    )
    assert (
        await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
        == b"HTTP/1.1 100 Continue\r\n\r\n"
    )
    writer.write(form)
    assert (await asyncio.wait_for(reader.readline(), 60)).split()[1] == b"200"
    writer.close()


async def test_an_upload_whose_client_goes_away_leaves_nothing(api, attach: Attach) -> None:
    await attach(api)
    directory = api.service.state(BatchState).files.directory
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
    files, batch = api.service.state(BatchState).files, runner.batches[created["id"]]
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
    BatchRunner(api.service, again, {})
    assert {*files.directory.iterdir()} == kept
    again.close()


async def test_results_that_are_made_a_file_again_count_once(tmp_path: Path) -> None:
    """A server may be killed between the description of the results and that of their batch."""
    files = FileStore(tmp_path)
    for num_bytes in (10, 10, 15):
        await files.add_results("file-a", "a.jsonl", num_bytes, "k")
        assert files.num_bytes == num_bytes
    [record] = files.all_of("k")
    await files.delete(record)
    assert files.num_bytes == 0
    files.close()


async def test_an_upload_that_is_too_slow_is_cut_off(
    serve_api, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It brings something all the time, so it never exceeds the time-out of one wait."""
    monkeypatch.setattr(pace, "MIN_BYTES_PER_S", 10**12)
    api = await serve_api(body_timeout_s=0.5)
    await attach(api)
    async with asyncio.timeout(60), half_upload(api) as (reader, writer):
        answer = asyncio.create_task(reader.readline())
        while not answer.done():
            writer.write(b"x")
            await asyncio.wait([answer], timeout=0.001)
        assert b" 408 " in await answer
    assert [path.name for path in api.service.state(BatchState).files.directory.iterdir()] == [
        "files.lock"
    ]
    assert api.service.state(BatchState).files.uploads.num_running == 0


async def test_uploads_under_way_are_bounded(
    api, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    await attach(api)
    files = api.service.state(BatchState).files
    monkeypatch.setattr(files.uploads, "most", 2)
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
    running = UnderWay("uploads", files.MAX_UPLOADS, files.MAX_UPLOADS_OF_KEY)
    with contextlib.ExitStack() as stack:
        for _ in range(files.MAX_UPLOADS_OF_KEY):
            stack.enter_context(running.admit("heavy"))
        with pytest.raises(ApiError, match="The API key heavy may send 16 uploads"):
            stack.enter_context(running.admit("heavy"))
        stack.enter_context(running.admit("light"))
        for _ in range(files.MAX_UPLOADS - running.num_running):
            stack.enter_context(running.admit(""))
        with pytest.raises(ApiError, match="The server takes 64 uploads"):
            stack.enter_context(running.admit("other"))
    assert running.num_running == 0


async def test_uploads_under_way_count_as_files(
    api, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    await attach(api)
    monkeypatch.setattr("pagoda.plugins.batches.files.MAX_FILES", 1)
    async with half_upload(api):
        while not api.service.state(BatchState).files.uploads.num_running:
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
    assert [p.name for p in api.service.state(BatchState).files.directory.iterdir()] == [
        "files.lock"
    ]


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
    monkeypatch.setattr("pagoda.plugins.batches.runner.RETRY_S", 0.0)
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


async def test_a_key_leaves_others_room_for_files_and_batches(
    serve_api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagoda.plugins.batches.files.MAX_FILES", 4)
    monkeypatch.setattr("pagoda.plugins.batches.runner.MAX_BATCHES", 4)
    api = await serve_api(api_keys=ApiKeys(["a:=one", "b:=two"]))
    api.service.state(BatchState).open(tmp_path / "files", max_bytes=1000)
    mine, other = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
    assert (await upload(api, b"x" * 501, headers=mine)).status == 400
    made = [await upload(api, jsonl(request("a")), headers=mine) for _ in range(4)]
    assert [answer.status for answer in made] == [200, 200, 400, 400]
    assert "one more of your key than it leaves to others" in made[2].error()["message"]
    theirs = await upload(api, jsonl(request("a")), headers=other)
    assert theirs.status == 200
    statuses = []
    for headers, file in [(mine, made[0])] * 4 + [(other, theirs)] * 2:
        body = {"input_file_id": file.json()["id"], "endpoint": URL, "completion_window": "24h"}
        statuses.append((await api.post("/v1/batches", body, headers=headers)).status)
    assert statuses == [200, 200, 429, 429, 200, 429]


# ---- forms


def form(*parts: bytes, before: bytes = b"", behind: bytes = b"--b--\r\n") -> bytes:
    return before + b"".join(b"--b\r\n%b\r\n" % part for part in parts) + behind


def part(name: bytes, value: bytes, more: bytes = b"") -> bytes:
    return b'Content-Disposition: form-data; name="%b"%b\r\n\r\n%b' % (name, more, value)


PURPOSE = part(b"purpose", b"batch")
FILE = part(b"file", b"x\r\n--\r\n-", b'; filename="a"')
FORM = {"Content-Type": "multipart/form-data; boundary=b"}


async def test_forms_of_any_shape_are_read(api, attach: Attach) -> None:
    await attach(api)
    odd = b'content-disposition:form-data; name="file"; filename="\xc3\xa9 \\"1\\""\r\nX: y\r\n\r\n'
    for body, name, data in (
        (form(PURPOSE, FILE), "a", b"x\r\n--\r\n-"),
        (form(FILE, PURPOSE, before=b"hello\r\n", behind=b"--b--"), "a", b"x\r\n--\r\n-"),
        (form(PURPOSE, odd + b"1" * 200_000), 'é "1"', b"1" * 200_000),
        (form(PURPOSE, part(b"file", b"")), "upload", b""),
        (form(PURPOSE, part(b"file", b"\r\n\r\n--\r\n")), "upload", b"\r\n\r\n--\r\n"),
    ):
        zipped = {**FORM, "Content-Encoding": "gzip"}
        ways = ((body, FORM), (gzip.compress(body), zipped), (in_pieces(body), FORM))
        for sent, headers in ways:
            made = await api.request("POST", "/v1/files", data=sent, headers=headers)
            assert (made.status, made.json().get("filename")) == (200, name), made.json()
            content = await api.get(f"/v1/files/{made.json()['id']}/content")
            assert content.body == data


async def in_pieces(body: bytes) -> AsyncIterator[bytes]:
    """A body that comes three bytes at a time at first."""
    for start in range(0, 600, 3):
        yield body[start : min(start + 3, 600)]
    yield body[600:]


async def test_malformed_forms_are_refused_in_a_sentence_and_leave_nothing(
    api, attach: Attach, tmp_path: Path
) -> None:
    await attach(api)
    long = b"x" * 9000
    for body, reason in (
        (form(PURPOSE, FILE, before=b"\n" * 4_000_000), "no boundary within its first 1024 bytes"),
        (form(PURPOSE, FILE, before=b"\r\n" * 1000), "no boundary within its first 1024 bytes"),
        (form(PURPOSE, b"X-Long: %b\r\n%b" % (long, FILE)), "head of a part is longer than 8192"),
        (form(PURPOSE, b"X: y\r\n" * 5000 + FILE), "head of a part is longer than 8192"),
        (form(FILE, part(b"_charset_", b"x" * 100)), "_charset_ is not a known field"),
        (form(PURPOSE, part(b"file", b"x", b'; filename="a\xff"')), "a name in UTF-8"),
        (form(PURPOSE, part(b"file", b"x", b"; filename*=utf-7''%2B2AA-")), "a name in UTF-8"),
        (form(PURPOSE, part(b"file", b"x", b"; filename*=undefined''%41")), "a name in UTF-8"),
        (form(FILE, PURPOSE, b"\r\nx"), "must be a part with a name"),
        (form(FILE, part(b"purpose", long)), "purpose is longer than 1024 bytes"),
        (form(PURPOSE, FILE)[:-8], "it ends early"),
        (form(PURPOSE, FILE, behind=b"--b"), "it ends early"),
        (form(PURPOSE, FILE) + long, "goes on for more than 1024 bytes"),
        (form(PURPOSE), "file is missing"),
        (b"", "it ends early"),
    ):
        answer = await api.request("POST", "/v1/files", data=body, headers=FORM)
        assert (answer.status, reason in answer.error()["message"]) == (400, True), (
            reason,
            answer.json(),
        )
    for kind in ("multipart/form-data", f"multipart/form-data; boundary={'b' * 71}"):
        answer = await api.request(
            "POST", "/v1/files", data=form(PURPOSE, FILE), headers={"Content-Type": kind}
        )
        assert (answer.status, "boundary" in answer.error()["message"]) == (400, True)
    assert [path.name for path in (tmp_path / "files").iterdir()] == ["files.lock"]
    assert api.service.state(BatchState).files.num_bytes == 0


async def test_a_file_counts_as_it_is_inflated(api, attach: Attach, monkeypatch) -> None:
    await attach(api)
    monkeypatch.setattr("pagoda.plugins.batches.handlers.MAX_FILE_BYTES", 3 << 20)
    for size, status in ((3 << 20, 200), ((3 << 20) + 1, 400)):
        body = gzip.compress(form(PURPOSE, part(b"file", bytes(size))))
        headers = {**FORM, "Content-Encoding": "gzip"}
        made = await api.request("POST", "/v1/files", data=body, headers=headers)
        assert made.status == status
    assert api.service.state(BatchState).files.num_bytes == 3 << 20


@pytest.mark.parametrize("stage", ["the bytes", "the last bytes", "the description"])
async def test_a_full_disk_is_told_and_nothing_stays(
    api, attach: Attach, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    await attach(api)
    kept = await upload(api, b"before")
    opened = files.open_private

    def full(path: str, flags: int) -> int:
        """Opens a file of a disk that has no room."""
        if path.endswith(".part" if stage == "the description" else ".upload"):
            os.close(opened(path, flags))
            path = "/dev/full"
        return opened(path, flags)

    monkeypatch.setattr(files, "open_private", full)
    refused = await upload(api, b"x" * (3 << 20 if stage == "the bytes" else 10))
    assert (refused.status, refused.error()["message"]) == (
        507,
        "The server's disk for files is full.",
    )
    monkeypatch.undo()
    name = kept.json()["id"]
    there = {path.name for path in (tmp_path / "files").iterdir()}
    assert there == {"files.lock", f"{name}.data", f"{name}.json"}
    assert api.service.state(BatchState).files.num_bytes == 6
    assert (await upload(api, b"behind")).status == 200


async def test_the_last_zero_bytes_of_a_file_are_no_range(api, attach: Attach) -> None:
    await attach(api)
    file_id = (await upload(api, b"data")).json()["id"]
    for asked, status, body in (
        ("bytes=-0", 416, None),
        ("bytes=-00", 416, None),
        ("bytes=4-", 416, None),
        ("bytes=-1", 206, b"a"),
        ("bytes=-10", 206, b"data"),
        ("bytes=0-0", 206, b"d"),
    ):
        answer = await api.get(f"/v1/files/{file_id}/content", headers={"Range": asked})
        assert (answer.status, body in (None, answer.body)) == (status, True)
        if status == 416:
            assert answer.headers["Content-Range"] == "bytes */4"
