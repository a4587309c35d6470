"""Files in OpenAI's batch format: one request a line in, one response a line out.

in   {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
out  {"id": "...", "custom_id": "a", "response": {"status_code": 200, "request_id": "...", "body": {...}},
      "error": null}
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from pagoda.cli import output
from pagoda.cli.files import read_jsonl
from pagoda.cli.local_server import Connection
from pagoda.errors import ConfigError


class BatchRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of the input."""

    custom_id: str
    url: Literal["/v1/chat/completions", "/v1/completions"]
    body: dict[str, object]
    method: Literal["POST"] = "POST"


def read_batch(path: Path) -> list[BatchRequest]:
    """All requests of a batch file.

    Raises:
        ConfigError: the file cannot be read, or a line is not a request; the error says which.
    """
    requests: dict[str, BatchRequest] = {}
    for place, request in read_jsonl(path, BatchRequest, "--input"):
        if request.body.get("stream"):
            raise ConfigError(f"{place}: a batch request cannot be a stream.")
        if request.custom_id in requests:
            raise ConfigError(f"{place}: custom_id {request.custom_id} is used twice.")
        requests[request.custom_id] = request
    if not requests:
        raise ConfigError(f"--input: {path} holds no request.")
    return list(requests.values())


async def answer_batch(
    connection: Connection, requests: Sequence[BatchRequest], concurrency: int
) -> AsyncGenerator[tuple[int, dict[str, object]], None]:
    """Statuses and output lines in the order of the requests, `concurrency` under way at a time.

    Requests that name no model are sent to the connection's.
    """
    room = asyncio.Semaphore(concurrency)

    async def answer(request: BatchRequest) -> tuple[int, dict[str, object]]:
        body = {"model": connection.model, **request.body}
        async with room:
            status, data = await connection.client.post_raw(request.url, body)
        advance()
        response = {
            "status_code": status,
            "request_id": f"req_{uuid.uuid4().hex}",
            "body": msgspec.Raw(data),
        }
        return status, {
            "id": f"batch_req_{uuid.uuid4().hex}",
            "custom_id": request.custom_id,
            "response": response,
            "error": None,
        }

    with output.progress("requests", len(requests)) as advance:
        tasks = [asyncio.create_task(answer(request)) for request in requests]
        try:
            for task in tasks:
                yield await task
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
