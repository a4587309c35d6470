# SPDX-License-Identifier: Apache-2.0
"""A server to ask: one that runs already, or one in this process for as long as a command lasts.

Commands that need a model speak HTTP to it either way, so there is one path through the system and one
meaning of every request field.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from functools import partial

from aiohttp import web

from pagoda.api.auth.keys import ApiKeys
from pagoda.api.http.allowed_hosts import hosts_for
from pagoda.api.http.app import ApiServer
from pagoda.api.service import ApiConfig, Service
from pagoda.cli import output
from pagoda.cli.openai_client import OpenAIClient
from pagoda.cli.options import ProfileOptions, TrustOptions
from pagoda.concurrency.loop_thread import LoopThread
from pagoda.fleet.fleet import Fleet
from pagoda.fleet.trace_control import TraceControl, start_offline, stop_into_file
from pagoda.llm.engine_options import EngineOptions, ExecutorOptions, ParallelOptions
from pagoda.telemetry.request_tracker import RequestTracker
from pagoda.telemetry.tracer import Tracer
from pagoda.text.model_text import load_text
from pagoda.text.text_generator import start_generator

_HOST = "127.0.0.1"


@dataclass(frozen=True)
class Connection:
    client: OpenAIClient
    model: str


@contextlib.contextmanager
def connect(
    model: str | None,
    base_url: str | None,
    api_key: str | None,
    engine: EngineOptions,
    parallel: ParallelOptions,
    trust: TrustOptions = TrustOptions(),
    profile: ProfileOptions = ProfileOptions(),
) -> Iterator[tuple[LoopThread, Connection]]:
    """A connection to the server at `base_url`, or without it to one of our own that loads `model`.

    A server of our own goes on in its thread between two questions, so an answer that was left behind ends.

    Raises ConfigError if the server cannot be reached or the model cannot be loaded, ServerError if the server at
    `base_url` serves no model.
    """
    opened = (
        _remote(base_url, model, api_key, trust)
        if base_url
        else _local(model, engine, parallel, profile)
    )
    thread = LoopThread("server")
    try:
        connection = thread.run(opened.__aenter__())
        try:
            yield thread, connection
        finally:
            thread.run(opened.__aexit__(None, None, None))
    finally:
        thread.stop()


@contextlib.asynccontextmanager
async def _remote(
    base_url: str, model: str | None, api_key: str | None, trust: TrustOptions
) -> AsyncIterator[Connection]:
    async with OpenAIClient(base_url, api_key, trust.context) as client:
        yield Connection(client, model or await client.first_model())


@contextlib.asynccontextmanager
async def _local(
    model: str | None, engine: EngineOptions, parallel: ParallelOptions, profile: ProfileOptions
) -> AsyncIterator[Connection]:
    """The API on a free port of this machine, behind a key that nobody else knows.

    The connection's model is the last adapter, if there is one.
    """
    executor = ExecutorOptions()
    files = executor.resolve(engine, model, parallel)
    config = executor.engine_config(engine, files.model, parallel)
    key = secrets.token_urlsafe()
    api = ApiConfig(
        served_model_name=files.served_name,
        api_keys=ApiKeys([key]),
        allowed_hosts=hosts_for(_HOST),
    )
    async with contextlib.AsyncExitStack() as stack:
        with output.stderr().status(f"loading {files.served_name} ..."):
            tracer = Tracer("frontend")
            fleet = Fleet.of_engines(config, parallel.data_parallel_policy, tracer=tracer)
            stack.push_async_callback(fleet.close)
            tracker = RequestTracker(tracer.clock_ns)
            text = partial(load_text, files, simulated=False, chat_template=None)
            service = Service(api, await start_generator(fleet, text, tracker), tracker=tracker)
            server = web.ServerRunner(ApiServer(service), shutdown_timeout=1.0)
            await server.setup()
            stack.push_async_callback(server.cleanup)
            await web.TCPSite(server, _HOST, 0).start()
        url = f"http://{_HOST}:{server.addresses[0][1]}"
        client = await stack.enter_async_context(OpenAIClient(url, key))
        traced = profile.config()
        if traced.level is not None:
            started = await start_offline(fleet, tracer, tracker, traced.level, traced.directory)
            stack.push_async_callback(_end_trace, started)
        name = config.worker.adapters[-1].name if config.worker.adapters else files.served_name
        yield Connection(client, name)


async def _end_trace(control: TraceControl) -> None:
    output.stderr().print(f"The trace is in {await stop_into_file(control)}.", soft_wrap=True)
