# SPDX-License-Identifier: Apache-2.0
"""A server over a scripted endpoint, and a client for it."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import reduce
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from scripted_endpoint import TEXT, ScriptedEndpoint

from pagoda.api.http.app import ApiServer
from pagoda.api.service import ApiConfig, Service
from pagoda.messages.worker_config import Role
from pagoda.text.model_text import ModelText
from pagoda.text.text_generator import TextGenerator


@dataclass
class Answer:
    status: int
    headers: Any
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    def error(self) -> dict[str, Any]:
        """The error object, checked for its form."""
        [(name, error)] = self.json().items()
        assert name == "error"
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["message"].endswith((".", "?", "!"))
        return error

    def events(self) -> list[Any]:
        """The data of each event of a complete stream, and its end mark."""
        assert self.headers["Content-Type"].startswith("text/event-stream")
        *events, last, rest = self.body.decode().split("\n\n")
        assert (last, rest) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]

    def choices(self) -> list[dict[str, Any]]:
        """All choices; those of a stream are put together from the events."""
        if not self.headers["Content-Type"].startswith("text/event-stream"):
            return self.json()["choices"]
        choices = reduce(joined, [event["choices"] for event in self.events()])
        for choice in choices:
            if "delta" in choice:
                choice["message"] = choice.pop("delta")
        return sorted(choices, key=lambda choice: choice["index"])


def joined(old: Any, new: Any) -> Any:
    """Two pieces of JSON as one; items of lists that have an index are joined by it."""
    if old is None or new is None:
        return new if old is None else old
    if isinstance(new, dict):
        return {name: joined(old.get(name), new.get(name)) for name in {**old, **new}}
    if isinstance(new, list) and new and isinstance(new[0], dict) and "index" in new[0]:
        items = {item["index"]: item for item in old}
        for item in new:
            items[item["index"]] = joined(items.get(item["index"]), item)
        return list(items.values())
    return old + new if isinstance(new, str | list) else new


class Api:
    """A running server and a session with it."""

    def __init__(self, endpoint: ScriptedEndpoint, service: Service) -> None:
        self.endpoint = endpoint
        self.service = service
        self.port = 0
        self.session: aiohttp.ClientSession

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def request(self, method: str, path: str, **options: Any) -> Answer:
        async with self.session.request(method, self.url + path, **options) as response:
            return Answer(response.status, response.headers, await response.read())

    async def raw(self, request: bytes) -> tuple[int, bytes]:
        """The status and the body of the answer to bytes as they are."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(request)
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
        length = re.search(rb"content-length: *(\d+)", head, re.IGNORECASE)
        body = reader.read() if length is None else reader.readexactly(int(length[1]))
        try:
            return int(head.split()[1]), await asyncio.wait_for(body, 30)
        finally:
            writer.close()

    async def get(self, path: str, **options: Any) -> Answer:
        return await self.request("GET", path, **options)

    async def post(self, path: str, body: Any = None, **options: Any) -> Answer:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.request("POST", path, data=data, **options)

    async def complete(self, **body: Any) -> Answer:
        return await self.post("/v1/completions", {"prompt": "hi", **body})

    async def chat(self, **body: Any) -> Answer:
        messages = [{"role": "user", "content": "hi"}]
        return await self.post("/v1/chat/completions", {"messages": messages, **body})


class ApiFactory:
    """Starts servers; all of them end with the test."""

    def __init__(self) -> None:
        self._runners: list[web.ServerRunner] = []
        self._sessions: list[aiohttp.ClientSession] = []

    async def __call__(
        self,
        answer: Any = "ok",
        *,
        text: ModelText = TEXT,
        loading: bool = False,
        max_model_len: int = 256,
        role: Role = Role.NONE,
        **config: Any,
    ) -> Api:
        endpoint = ScriptedEndpoint(answer, max_model_len=max_model_len, role=role)
        service = Service(ApiConfig(served_model_name="tiny", **config))
        if not loading:
            service.generator = TextGenerator(endpoint, text, service.tracker)
        runner = web.ServerRunner(ApiServer(service), shutdown_timeout=1.0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        api = Api(endpoint, service)
        api.port = runner.addresses[0][1]
        api.session = aiohttp.ClientSession()
        self._runners.append(runner)
        self._sessions.append(api.session)
        return api

    async def close(self) -> None:
        for session in self._sessions:
            await session.close()
        for runner in self._runners:
            await runner.cleanup()


@pytest.fixture
async def serve_api() -> AsyncIterator[ApiFactory]:
    factory = ApiFactory()
    yield factory
    await factory.close()


@pytest.fixture
async def api(serve_api: ApiFactory) -> Api:
    return await serve_api()
