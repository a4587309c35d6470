# SPDX-License-Identifier: Apache-2.0
"""Files and batches of tests: what is asked, and complete and half uploads."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp

from pagoda.plugins.batches.runner import BatchRunner

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
