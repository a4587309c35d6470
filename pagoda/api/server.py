# SPDX-License-Identifier: Apache-2.0
"""One server process: listening, loading, serving, draining."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from pagoda.api.auth.file_watch import FileWatch, WatchedFiles
from pagoda.api.catalogue import Catalogue, ServedModel
from pagoda.api.http.app import ApiServer
from pagoda.api.http.listener import Listener
from pagoda.api.monitoring.service_manager import ServiceManager
from pagoda.api.service import ApiConfig, Service
from pagoda.concurrency.async_utils import cancel_all
from pagoda.errors import ConfigError
from pagoda.fleet.fleet import Fleet
from pagoda.fleet.trace_control import TraceControl
from pagoda.ipc.tls import ServerTls
from pagoda.messages.frontend import EngineReady
from pagoda.telemetry.request_spans import RequestSpans
from pagoda.telemetry.request_tracker import RequestTracker
from pagoda.telemetry.trace_ending import EXIT_S
from pagoda.telemetry.tracer import ProfileConfig, Tracer
from pagoda.text.model_text import ModelText
from pagoda.text.text_generator import TextGenerator, start_generator

_log = logging.getLogger("pagoda.api")

_CLOSING_TIMEOUT_S = 5.0
"""Seconds for handlers to write the end of an aborted answer."""
_HURRY_S = 0.5
"""Seconds for the end of a trace after a second signal."""


@dataclass(frozen=True)
class ServerConfig:
    """The address of a server, its end, and its API."""

    api: ApiConfig
    host: str = "127.0.0.1"
    port: int = 8000
    drain_timeout_s: float = 30.0
    """Seconds that running requests may take to finish after SIGTERM."""
    watched: Sequence[WatchedFiles] = ()
    """Files that are read again when they change."""
    tls: ServerTls | None = None
    """Certificates of HTTPS; None listens for plain HTTP."""


async def serve(
    server: ServerConfig,
    make_fleet: Callable[[], Fleet],
    load_text: Callable[[], ModelText],
    *,
    on_ready: Callable[[str, EngineReady], None],
    profile: ProfileConfig,
    tracer: Tracer,
    spans: RequestSpans | None = None,
    further_trackers: Sequence[RequestTracker] = (),
) -> None:
    """Serves until SIGTERM or SIGINT, and then until all answers are complete; `on_ready` gets the base URL
    and what the engines can do. `spans` are made of the answers, and closed at the end. Traces show answers in
    `further_trackers` as well.

    Listens at once and answers 503 while the model loads. The first signal drains, a second one ends at once.
    `tracer` is that of this process; what `make_fleet` makes has it too.

    Raises ConfigError: the port is in use, or the model cannot be loaded; EngineDeadError: all engines were given
    up.
    """
    service = Service(server.api, tracker=RequestTracker(tracer.clock_ns))
    # A server that is started again has the same name of traces, and replaces those before it.
    address = f"{server.host}-{server.port}" if server.port else tracer.process.uid
    run = f"{tracer.role}-{tracer.process.host}-{address}"
    trackers = [service.tracker, *further_trackers]
    tracing = service.tracing = TraceControl(tracer, trackers, profile.directory, run)
    if spans is not None:
        spans.follow(service.tracker)
    signals = _Signals()
    watch = FileWatch(server.watched)
    runner = web.ServerRunner(ApiServer(service), shutdown_timeout=_CLOSING_TIMEOUT_S)
    await runner.setup()
    try:
        # Before a trace begins: a server that has the port already may be tracing under the same name.
        url = await _listen(runner, server)
        if profile.level is not None:
            await tracing.start(profile.level)
        fleet = make_fleet()
    except BaseException:
        tracer.stop(EXIT_S)
        await runner.cleanup()
        raise
    service.fleet = fleet
    tracing.join(fleet)
    watch.start()
    manager = ServiceManager(os.environ)
    telling = asyncio.create_task(manager.tell_of_loading())
    try:
        loading = asyncio.ensure_future(start_generator(fleet, load_text, service.tracker))
        if not await signals.before(loading):
            return
        await cancel_all([telling])
        if server.api.models:
            named = asyncio.ensure_future(_load_models(service, fleet, loading.result().text))
            if not await signals.before(named):
                return
        else:
            service.generator = loading.result()
        service.has_settled.set()
        for state in service.states.values():
            state.start()
        on_ready(url, service.ready_generator().endpoint.limits)
        manager.tell_ready(url)
        telling = asyncio.create_task(manager.feed_watchdog(fleet.health))
        failed = asyncio.ensure_future(fleet.dispatcher.wait_failed())
        if await signals.before(failed):
            raise failed.result()
        manager.tell_stopping(server.drain_timeout_s)
        await fleet.leave()
        service.draining = True
        await _stop(service)
        _log.info("draining for up to %.0f s; a second signal ends at once", server.drain_timeout_s)
        draining = asyncio.ensure_future(fleet.drain(server.drain_timeout_s))
        if not await signals.before(draining, last=True):
            await fleet.drain(0.0)
    finally:
        service.draining = True
        service.has_settled.set()
        await _stop(service)
        for state in service.states.values():
            await _ended(state.close())
        await watch.close()
        await runner.cleanup()
        if tracing.session is not None:
            await signals.hurried(tracing.stop())
        await fleet.close()
        await cancel_all([telling])
        if spans is not None:
            await asyncio.to_thread(spans.close)
        signals.restore()


async def _load_models(service: Service, fleet: Fleet, default: ModelText) -> None:
    """Loads the models of a server of several, of which the default one's text side is loaded. Until all are, none
    is served: a name would count as unknown.
    Raises ConfigError: the text side of one cannot be loaded."""
    tracker, served = service.tracker, list[ServedModel]()
    for model, dispatcher in zip(service.config.models, fleet.pools.values(), strict=True):
        text = default if not served else await asyncio.to_thread(model.load_text)
        generator = TextGenerator(
            dispatcher, text, tracker, model.adapters, fleet.faults, model.name
        )
        served.append(ServedModel(model, generator, dispatcher))
    service.generator = served[0].generator
    service.catalogue = Catalogue(served, service.config.splits)


async def _stop(service: Service) -> None:
    for state in service.states.values():
        await _ended(state.stop())


async def _ended(end: Coroutine[Any, Any, None]) -> None:
    """Waits for the end of what a plugin keeps; what goes wrong there keeps nothing else from its end."""
    try:
        await end
    except Exception:
        _log.exception("a plugin did not end well")


async def _listen(runner: web.ServerRunner, server: ServerConfig) -> str:
    tls = None if server.tls is None else server.tls.context
    site = Listener(runner, server.host.strip("[]"), server.port, tls)
    try:
        await site.start()
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(
            f"cannot listen on {server.host}:{server.port} ({reason}); choose another --host or --port."
        ) from None
    except OverflowError:
        raise ConfigError(f"--port must be from 0 to 65535, got {server.port}.") from None
    return site.name


class _Signals:
    _NUMBERS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self._first = asyncio.Event()
        self._second = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        for number in self._NUMBERS:
            self._loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        (self._second if self._first.is_set() else self._first).set()

    def restore(self) -> None:
        for number in self._NUMBERS:
            self._loop.remove_signal_handler(number)

    async def before(self, work: asyncio.Future[Any], *, last: bool = False) -> bool:
        """Waits for `work` and raises its error. Returns False if a signal (`last`: a second one) cancelled it."""
        interrupt = asyncio.ensure_future((self._second if last else self._first).wait())
        try:
            await asyncio.wait((work, interrupt), return_when=asyncio.FIRST_COMPLETED)
        finally:
            interrupt.cancel()
        if not work.done():
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            return False
        work.result()
        return True

    async def hurried(self, work: Coroutine[Any, Any, object]) -> None:
        """Waits for `work`, after a second signal for `_HURRY_S` only."""
        task = asyncio.ensure_future(work)
        if not await self.before(asyncio.shield(task), last=True):
            await asyncio.wait((task,), timeout=_HURRY_S)
            task.cancel()
