# SPDX-License-Identifier: Apache-2.0
"""A light client of the OpenAI API, for chat, batches, benchmarks and the demo.

The client decodes each network read as a whole, and only the fields that it needs: one process follows tens of
thousands of events a second, so that the load it measures is the server's, not its own.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import AsyncIterator, Mapping

import aiohttp
import msgspec

from pagoda.errors import ConfigError, PagodaError

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}

_READ_BUFFER_BYTES = 2**18
_MAX_EVENT_BYTES = 2**24


class ServerError(PagodaError):
    """The server refused a request or broke off its answer; the text says what it said."""


class ToolFunction(msgspec.Struct, frozen=True):
    name: str | None = None
    arguments: str | None = None


class ClientToolCall(msgspec.Struct, frozen=True):
    function: ToolFunction
    index: int = 0


class ClientMessage(msgspec.Struct, frozen=True):
    """A whole message of the assistant, or what a stream event adds to it."""

    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ClientToolCall] | None = None

    def has_output(self) -> bool:
        return bool(self.content or self.reasoning_content or self.tool_calls)


class ClientChoice(msgspec.Struct, frozen=True):
    index: int = 0
    text: str | None = None
    delta: ClientMessage | None = None
    message: ClientMessage | None = None
    finish_reason: str | None = None

    def has_output(self) -> bool:
        """True if this stream event stands for at least one token."""
        return bool(self.text) or (self.delta is not None and self.delta.has_output())


class ClientUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class ClientAnswer(msgspec.Struct, frozen=True):
    """A completion, or one event of its stream."""

    choices: list[ClientChoice] = []
    usage: ClientUsage | None = None
    error: object = None


class _ListedModel(msgspec.Struct, frozen=True):
    id: str


class _Models(msgspec.Struct, frozen=True):
    data: list[_ListedModel]


class _ErrorBody(msgspec.Struct, frozen=True):
    message: str


class _ErrorReply(msgspec.Struct, frozen=True):
    error: _ErrorBody


_encode = msgspec.json.Encoder().encode
_decode_answer = msgspec.json.Decoder(ClientAnswer).decode


class OpenAIClient:
    """Requests to one server. Used as an async context manager.

    `base_url` is the server's address, with or without `/v1`; `tls` is for https with other authorities than
    those of the machine.
    """

    def __init__(
        self, base_url: str, api_key: str | None = None, tls: ssl.SSLContext | None = None
    ) -> None:
        self._base_url = base_url.rstrip("/").removesuffix("/v1")
        if not self._base_url.startswith(("http://", "https://")):
            raise ConfigError(f"--base-url must begin with http:// or https://, got {base_url}.")
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._tls = tls
        self._session: aiohttp.ClientSession
        """Opened by the context."""

    async def __aenter__(self) -> OpenAIClient:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=True if self._tls is None else self._tls),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
            headers=self._headers,
            read_bufsize=_READ_BUFFER_BYTES,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def first_model(self) -> str:
        try:
            models = msgspec.json.decode(await self._call("GET", "/v1/models"), type=_Models).data
        except msgspec.DecodeError as error:
            raise ServerError(f"{self._base_url}/v1/models is not a list of models.") from error
        if not models:
            raise ServerError(f"{self._base_url} serves no model.")
        return models[0].id

    async def post(self, path: str, body: Mapping[str, object]) -> ClientAnswer:
        """The whole answer to one request.

        Raises ServerError if the server refuses the request, breaks off or answers in another format, ConfigError
        if it cannot be reached.
        """
        return self._decode(await self._call("POST", path, body))

    async def post_raw(
        self, path: str, body: Mapping[str, object] | None, method: str = "POST"
    ) -> tuple[int, bytes]:
        """Status and body of the reply, whatever they are."""
        try:
            async with self._request(method, path, body) as response:
                return response.status, await response.read()
        except aiohttp.ClientError as error:
            raise self._unreachable(error) from error

    async def stream(
        self, path: str, body: Mapping[str, object]
    ) -> AsyncIterator[tuple[float, list[ClientAnswer]]]:
        """The events of one streamed answer, by network read, each with its time by `time.perf_counter`.

        The body must ask for a stream.

        Raises ServerError if the server refuses the request, reports an error or hangs up early, ConfigError if it
        cannot be reached.
        """
        try:
            async with self._request("POST", path, body) as response:
                if response.status != 200:
                    raise ServerError(_explain(response.status, await response.read()))
                async for events in self._events(response.content):
                    yield events
        except aiohttp.ClientPayloadError as error:
            raise ServerError("The server hung up in the middle of an answer.") from error
        except aiohttp.ClientError as error:
            raise self._unreachable(error) from error

    async def _events(
        self, content: aiohttp.StreamReader
    ) -> AsyncIterator[tuple[float, list[ClientAnswer]]]:
        tail = b""
        while chunk := await content.readany():
            now = time.perf_counter()
            lines = (tail + chunk).split(b"\n")
            tail = lines.pop()
            if len(tail) > _MAX_EVENT_BYTES:
                raise ServerError("The server sent an event without end.")
            answers: list[ClientAnswer] = []
            for line in lines:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    yield now, answers
                    return
                answers.append(self._decode(data))
            if answers:
                yield now, answers
        raise ServerError("The server ended the stream without [DONE].")

    async def _call(
        self, method: str, path: str, body: Mapping[str, object] | None = None
    ) -> bytes:
        status, data = await self.post_raw(path, body, method)
        if status != 200:
            raise ServerError(_explain(status, data))
        return data

    def _request(
        self, method: str, path: str, body: Mapping[str, object] | None
    ) -> aiohttp.client._RequestContextManager:
        data = None if body is None else _encode(body)
        return self._session.request(method, self._base_url + path, data=data)

    def _decode(self, data: bytes) -> ClientAnswer:
        try:
            answer = _decode_answer(data)
        except msgspec.DecodeError as error:
            raise ServerError("The server's answer is not in the OpenAI format.") from error
        if answer.error is not None:
            raise ServerError(_explain(200, data))
        return answer

    def _unreachable(self, error: aiohttp.ClientError) -> PagodaError:
        if isinstance(error, aiohttp.InvalidURL):
            return ConfigError(f"--base-url is not a URL: {self._base_url}.")
        if isinstance(error, aiohttp.ClientConnectorCertificateError):
            return ConfigError(
                f"The certificate of {self._base_url} is not trusted; --ssl-ca-certs names its authorities."
            )
        if isinstance(error, aiohttp.ClientConnectorError):
            reason = error.os_error.strerror or str(error.os_error)
            return ConfigError(f"Cannot reach a server at {self._base_url}: {reason}.")
        return ServerError(f"{self._base_url} broke off: {str(error) or type(error).__name__}.")


def _explain(status: int, data: bytes) -> str:
    try:
        said = msgspec.json.decode(data, type=_ErrorReply).error.message
    except msgspec.DecodeError:
        said = data[:200].decode(errors="replace").strip() or "(nothing)"
    return f"The server answered with status {status}: {said}"
