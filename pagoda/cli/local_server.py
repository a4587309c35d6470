"""A server to ask: one that runs already, or one in this process for as long as a command lasts.

Commands that need a model speak HTTP to it either way, so there is one path through the system and one
meaning of every request field.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

from aiohttp import web

from pagoda.api.app import hosts_for, make_server
from pagoda.api.service import ApiConfig, Service
from pagoda.cli import output
from pagoda.cli.openai_client import OpenAIClient
from pagoda.cli.options import EngineOptions
from pagoda.engine.config import EngineConfig
from pagoda.frontend.engine_client import EngineClient
from pagoda.frontend.model_text import ModelText, load_model_text, synthetic_model_text
from pagoda.frontend.text_generator import TextGenerator
from pagoda.models.resolve import ModelFiles, resolve_model

_HOST = "127.0.0.1"


@dataclass(frozen=True)
class Connection:
    """A server and the model to ask there."""

    client: OpenAIClient
    model: str


@contextlib.contextmanager
def connect(
    runner: asyncio.Runner,
    model: str | None,
    base_url: str | None,
    api_key: str | None,
    engine: EngineOptions,
) -> Iterator[Connection]:
    """A server on `runner`'s loop: the one at `base_url`, or without it one of our own that loads `model`.

    A server of our own does its work while `runner` runs something, so Ctrl-C between two questions
    has nothing to interrupt.

    Raises:
        ConfigError: the server cannot be reached, or the model cannot be loaded.
        ServerError: the server at `base_url` serves no model.
    """
    opened = _remote(base_url, model, api_key) if base_url else _local(model, engine)
    connection = runner.run(opened.__aenter__())
    try:
        yield connection
    finally:
        runner.run(opened.__aexit__(None, None, None))


@contextlib.asynccontextmanager
async def _remote(
    base_url: str, model: str | None, api_key: str | None
) -> AsyncIterator[Connection]:
    async with OpenAIClient(base_url, api_key) as client:
        yield Connection(client, model or await client.first_model())


@contextlib.asynccontextmanager
async def _local(model: str | None, engine: EngineOptions) -> AsyncIterator[Connection]:
    files = resolve_model(model, load_format=engine.load_format)
    key = secrets.token_urlsafe()
    with output.stderr().status(f"loading {files.served_name} ..."):
        server = _Server(files, engine.engine_config(files.model), key)
        url = await server.start()
    try:
        async with OpenAIClient(url, key) as client:
            yield Connection(client, files.served_name)
    finally:
        await server.close()


class _Server:
    """The API on a free port of this machine, behind a key that nobody else knows."""

    def __init__(self, files: ModelFiles, engine: EngineConfig, api_key: str) -> None:
        self._files = files
        self._engine = EngineClient(engine)
        self._service = Service(
            ApiConfig(
                served_model_name=files.served_name,
                api_key=api_key,
                allowed_hosts=hosts_for(_HOST),
            )
        )
        self._runner: web.ServerRunner | None = None

    async def start(self) -> str:
        """Returns the base URL when the model is loaded; leaves nothing behind when that fails."""
        try:
            _, text = await asyncio.gather(
                self._engine.start(), asyncio.to_thread(_load_text, self._files)
            )
            self._service.generator = TextGenerator(self._engine, text)
            self._runner = web.ServerRunner(make_server(self._service), shutdown_timeout=1.0)
            await self._runner.setup()
            await web.TCPSite(self._runner, _HOST, 0).start()
        except BaseException:
            await self.close()
            raise
        return f"http://{_HOST}:{self._runner.addresses[0][1]}"

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        await self._engine.close()


def _load_text(files: ModelFiles) -> ModelText:
    return synthetic_model_text() if files.directory is None else load_model_text(files.directory)
