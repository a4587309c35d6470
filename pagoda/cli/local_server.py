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
from functools import partial

from aiohttp import web

from pagoda.api.app import ApiServer, hosts_for
from pagoda.api.keys import ApiKeys
from pagoda.api.service import ApiConfig, Service
from pagoda.checkpoints.resolve import ModelFiles
from pagoda.cli import output
from pagoda.cli.openai_client import OpenAIClient
from pagoda.cli.options import EngineOptions, ExecutorOptions, ParallelOptions
from pagoda.engine.config import EngineConfig
from pagoda.frontend.fleet import Fleet
from pagoda.frontend.model_text import load_text
from pagoda.frontend.policies import PolicyName
from pagoda.frontend.request_tracker import RequestTracker
from pagoda.frontend.text_generator import start_generator

_HOST = "127.0.0.1"


@dataclass(frozen=True)
class Connection:
    client: OpenAIClient
    model: str


@contextlib.contextmanager
def connect(
    runner: asyncio.Runner,
    model: str | None,
    base_url: str | None,
    api_key: str | None,
    engine: EngineOptions,
    parallel: ParallelOptions,
) -> Iterator[Connection]:
    """A server on `runner`'s loop: the one at `base_url`, or without it one of our own that loads `model`.

    A server of our own does its work while `runner` runs something, so Ctrl-C between two questions
    has nothing to interrupt.

    Raises:
        ConfigError: the server cannot be reached, or the model cannot be loaded.
        ServerError: the server at `base_url` serves no model.
    """
    opened = _remote(base_url, model, api_key) if base_url else _local(model, engine, parallel)
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
async def _local(
    model: str | None, engine: EngineOptions, parallel: ParallelOptions
) -> AsyncIterator[Connection]:
    executor = ExecutorOptions()
    files = executor.resolve(engine, model, parallel)
    config = executor.engine_config(engine, files.model, parallel)
    key = secrets.token_urlsafe()
    async with contextlib.AsyncExitStack() as stack:
        with output.stderr().status(f"loading {files.served_name} ..."):
            service = await _load(files, config, parallel.data_parallel_policy, key, stack)
            url = await _listen(service, stack)
        client = await stack.enter_async_context(OpenAIClient(url, key))
        yield Connection(client, files.served_name)


async def _load(
    files: ModelFiles,
    engine: EngineConfig,
    policy: PolicyName,
    api_key: str,
    stack: contextlib.AsyncExitStack,
) -> Service:
    """The API over engines that end with `stack`, behind a key that nobody else knows."""
    fleet = Fleet.of_engines(engine, policy)
    stack.push_async_callback(fleet.close)
    text = partial(load_text, files, simulated=False, chat_template=None)
    return Service(
        ApiConfig(
            served_model_name=files.served_name,
            api_keys=ApiKeys([api_key]),
            allowed_hosts=hosts_for(_HOST),
        ),
        await start_generator(fleet, text, RequestTracker()),
    )


async def _listen(service: Service, stack: contextlib.AsyncExitStack) -> str:
    """Opens a free port of this machine until `stack` ends; returns the base URL."""
    runner = web.ServerRunner(ApiServer(service), shutdown_timeout=1.0)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, _HOST, 0).start()
    return f"http://{_HOST}:{runner.addresses[0][1]}"
