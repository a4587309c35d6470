"""Whether a server traces: the one place that starts and stops all of its processes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

from pagoda.engine.messages import StartTrace
from pagoda.errors import ConfigError, PagodaError
from pagoda.frontend.request_book import RequestBook
from pagoda.frontend.request_tracing import AnswerRows
from pagoda.telemetry.fragments import clear_fragments
from pagoda.telemetry.tracer import TraceLevel, Tracer, TraceSession


class TraceStateError(PagodaError):
    """Tracing cannot be started because it is on, or stopped because it is off."""


class Traced(Protocol):
    """Processes that trace when this one does."""

    def start_trace(self, order: StartTrace) -> None:
        """They trace from now on, and so do those that are started in their place."""
        ...

    async def stop_trace(self) -> list[str]:
        """Returns when their fragments are closed, or some seconds later, with what went wrong: sentences."""
        ...

    async def trace_ended(self) -> None:
        """Returns when all of them have stopped by themselves, after `StartTrace.num_steps`."""
        ...


class TraceControl:
    """Belongs to one event loop."""

    def __init__(self, tracer: Tracer, book: RequestBook, directory: Path, run: str) -> None:
        """`run` tells the fragments of this server from those of others in `directory`; the next trace of the same
        name removes them."""
        self.directory = directory
        self.run = run
        self._tracer = tracer
        self._book = book
        self._traced: Traced | None = None
        self._order: StartTrace | None = None
        self._rows: AnswerRows | None = None
        self._waiting: asyncio.Task[None] | None = None
        """For when tracing ends without being told to."""
        self._ending: asyncio.Task[list[str]] | None = None

    @property
    def session(self) -> TraceSession | None:
        """What is being traced; None while tracing is off."""
        return None if self._order is None else self._order.session

    def join(self, traced: Traced) -> None:
        """These trace whenever this process does, from now on."""
        self._traced = traced
        if self._order is not None:
            traced.start_trace(self._order)

    def start(
        self, level: TraceLevel, *, num_steps: int | None = None, seconds: float | None = None
    ) -> TraceSession:
        """Until `stop`, or until each engine has done `num_steps`, or for so many `seconds`.

        Raises:
            TraceStateError: tracing is on.
            ConfigError: the directory cannot be written.
        """
        if self._order is not None:
            raise TraceStateError("Tracing is on already.")
        directory = self.directory.absolute()
        try:
            directory.mkdir(parents=True, exist_ok=True)
            clear_fragments(directory, self.run)
        except OSError as error:
            raise ConfigError(
                f"--profile-dir {directory} cannot be written ({error.strerror or error})."
            ) from None
        session = TraceSession(level=level, directory=str(directory), run=self.run)
        order = self._order = StartTrace(session, num_steps)
        self._tracer.start(session)
        self._rows = AnswerRows(self._tracer, self._book)
        if self._traced is not None:
            self._traced.start_trace(order)
        if seconds is not None:
            self._stop_after(lambda: asyncio.sleep(seconds))
        elif num_steps is not None and self._traced is not None:
            self._stop_after(self._traced.trace_ended)
        return session

    def _stop_after(self, wait: Callable[[], Awaitable[None]]) -> None:
        async def wait_and_stop() -> None:
            await wait()
            self._waiting = None  # it is not to cancel itself
            await self.stop()

        self._waiting = asyncio.create_task(wait_and_stop())

    async def stop(self) -> list[str]:
        """Returns when all fragments are closed, or some seconds later; says why some lack something: sentences.

        Raises:
            TraceStateError: tracing is off.
        """
        if self._order is None:
            raise TraceStateError("Tracing is off.")
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None
        if self._ending is None:
            self._ending = asyncio.create_task(self._end())
        return await asyncio.shield(self._ending)

    async def _end(self) -> list[str]:
        try:
            problems = [] if self._traced is None else await self._traced.stop_trace()
            if self._rows is not None:
                self._rows.close()
            await asyncio.to_thread(self._tracer.stop)
            return [*self._tracer.problems, *problems]
        finally:
            self._order = self._rows = self._ending = None
