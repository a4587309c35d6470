# SPDX-License-Identifier: Apache-2.0
"""Tracing of a server: traces are started and stopped in all its processes, and each answer has a row."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from pagoda.concurrency.async_utils import beside
from pagoda.errors import ConfigError, PagodaError
from pagoda.fleet.fleet import Fleet
from pagoda.messages.tracing import StartTrace
from pagoda.registry import TRACE_MERGERS, load, registered
from pagoda.telemetry.fragments import CLOSING_S, clear_fragments, run_prefix
from pagoda.telemetry.plugin import TraceMerger
from pagoda.telemetry.request_tracker import RequestStatistics, RequestTracker
from pagoda.telemetry.tracer import TraceLevel, Tracer, TraceSession

_PREPARE_S = 10.0

_log = logging.getLogger(__name__)


class TraceStateError(PagodaError):
    """Tracing cannot be started because it is on, or stopped because it is off."""


class EndedTrace(msgspec.Struct, frozen=True):
    session: TraceSession
    problems: list[str]


class TraceControl:
    """Belongs to one event loop."""

    def __init__(
        self, tracer: Tracer, trackers: Sequence[RequestTracker], directory: Path, run: str
    ) -> None:
        """Answers in all `trackers` have rows. `run` tells the fragments of this server from those of others in
        `directory`; the next trace of the same name removes them."""
        self.directory = directory
        self.run = run
        self._tracer = tracer
        self._trackers = trackers
        self._fleet: Fleet | None = None
        self._is_starting = False
        self._order: StartTrace | None = None
        self._rows: list[AnswerRows] = []
        self._waiting: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[EndedTrace] | None = None
        self._ended: EndedTrace | None = None
        """The last trace, if nobody was told of its end."""

    @property
    def session(self) -> TraceSession | None:
        return None if self._order is None else self._order.session

    def join(self, fleet: Fleet) -> None:
        """The engines or hosts of `fleet` trace whenever this process does, from now on, and routers above it may
        begin traces here."""
        self._fleet = fleet
        fleet.tracing = self
        if self._order is not None:
            fleet.start_trace(self._order)

    async def start(
        self, level: TraceLevel, *, num_steps: int | None = None, seconds: float | None = None
    ) -> TraceSession:
        """Traces until `stop`, until each engine has done `num_steps`, or for `seconds`.
        Raises TraceStateError: tracing is on; ConfigError: the directory cannot be written."""
        if self._order is not None or self._is_starting:
            raise TraceStateError("Tracing is on already.")
        directory = self.directory.absolute()
        self._is_starting = True
        try:
            async with asyncio.timeout(_PREPARE_S):
                await beside(partial(_prepare, directory, self.run))
        except OSError as error:
            reason = error.strerror or str(error)
            if isinstance(error, TimeoutError):
                reason = f"it does not answer within {_PREPARE_S:g} s"
            raise ConfigError(f"--profile-dir {directory} cannot be written ({reason}).") from None
        finally:
            self._is_starting = False
        session = TraceSession(level=level, directory=str(directory), run=self.run)
        order = self._order = StartTrace(session, num_steps)
        self._ended = None
        self._tracer.start(session)
        self._rows = [AnswerRows(self._tracer, tracker) for tracker in self._trackers]
        if self._fleet is not None:
            self._fleet.start_trace(order)
        if seconds is not None:
            self._stop_after(lambda: asyncio.sleep(seconds))
        elif num_steps is not None and self._fleet is not None:
            self._stop_after(self._fleet.trace_ended)
        return session

    def _stop_after(self, wait: Callable[[], Awaitable[None]]) -> None:
        async def wait_and_stop() -> None:
            try:
                await wait()
                self._waiting = None  # it is not to cancel itself
                await self._stop()
            except Exception:
                _log.exception("a trace could not be ended")

        self._waiting = asyncio.create_task(wait_and_stop())

    async def stop(self) -> EndedTrace:
        """Returns when all fragments are closed, or some seconds later. Tells once of one that ended by itself.
        Raises TraceStateError: tracing is off."""
        if self._order is not None:
            ended = await self._stop()
        elif self._ended is not None:
            ended = self._ended
        else:
            raise TraceStateError("Tracing is off.")
        self._ended = None
        return ended

    async def _stop(self) -> EndedTrace:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None
        if self._ending is None:
            self._ending = asyncio.create_task(self._end())
        return await asyncio.shield(self._ending)

    async def _end(self) -> EndedTrace:
        if self._order is None:
            raise RuntimeError("Tracing is off.")
        try:
            problems = [] if self._fleet is None else await self._fleet.stop_trace()
            for rows in self._rows:
                rows.close()
            problems = [*await beside(partial(self._tracer.end(), CLOSING_S)), *problems]
            for problem in problems:
                _log.warning("a trace lacks something: %s", problem)
            self._ended = EndedTrace(self._order.session, problems)
            return self._ended
        finally:
            self._order = self._ending = None
            self._rows = []


async def start_offline(
    fleet: Fleet, tracer: Tracer, tracker: RequestTracker, level: TraceLevel, directory: Path
) -> TraceControl:
    """Traces a fleet that no server has, until `stop_into_file`.
    Raises TraceStateError: `tracer` traces already; ConfigError: the directory cannot be written."""
    if tracer.session is not None:
        raise TraceStateError("Tracing is on already.")
    control = TraceControl(tracer, [tracker], directory, f"offline-{tracer.process.host}")
    control.join(fleet)
    await control.start(level)
    return control


async def stop_into_file(control: TraceControl) -> Path:
    """Ends the trace, and writes it as one file into its directory; returns its path, or the directory, with the
    fragments of the processes, where no plugin merges them.
    Raises TraceStateError: tracing is off; ConfigError: the file cannot be written."""
    await control.stop()
    if "trace" not in registered(TRACE_MERGERS):
        return control.directory
    merger = load(TRACE_MERGERS, "trace", TraceMerger)
    return await beside(partial(merger.merge, control.directory, control.run))


def _prepare(directory: Path, run: str) -> None:
    """Removes the last trace of this name. Raises OSError: the directory cannot be written."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    probe = directory / f"{run_prefix(run)}{secrets.token_hex(8)}.probe"
    probe.touch(exist_ok=False)
    probe.unlink()
    clear_fragments(directory, run)


@dataclass(slots=True)
class _TracedRow:
    number: int
    first_token_ns: int | None = None
    """Time at which the first token had been written to the client."""
    detokenize_ns: int = 0
    write_ns: int = 0


class AnswerRows:
    """Writes a row for each answer of a tracker while tracing is on, also for answers that run already."""

    def __init__(self, tracer: Tracer, tracker: RequestTracker) -> None:
        self._tracer = tracer
        self._tracker = tracker
        self._rows: dict[str, _TracedRow] = {}
        for record in tracker.running.values():
            self._start(record)
            if record.first_token_ns is not None:
                self._end_first_token(record, self._rows[record.request_id], record.first_token_ns)
        self._unsubscribe = tracker.subscribe(
            on_start=self._start, on_finish=self._finish, on_delivery=self._deliver
        )

    def close(self) -> None:
        self._unsubscribe()
        for record in self._tracker.running.values():
            self._close_row(record, self._tracker.clock_ns())

    def _start(self, record: RequestStatistics) -> None:
        row = self._tracer.open_row(f"request {record.request_id}")
        self._rows[record.request_id] = _TracedRow(row)
        arrived = record.client_request.arrived_ns
        self._tracer.span("prepare", arrived, row=row, ended=record.started_ns)

    def _finish(self, record: RequestStatistics) -> None:
        self._close_row(record, record.ended_ns or self._tracker.clock_ns())

    def _deliver(
        self, record: RequestStatistics, received_ns: int, decoded_ns: int, written_ns: int
    ) -> None:
        row = self._rows.get(record.request_id)
        if row is None:
            return
        row.detokenize_ns += decoded_ns - received_ns
        row.write_ns += written_ns - decoded_ns
        if row.first_token_ns is None and record.first_token_ns is not None:
            self._end_first_token(record, row, written_ns)
        elif self._tracer.verbose():
            self._tracer.span("token", received_ns, row=row.number, ended=written_ns)

    def _end_first_token(self, record: RequestStatistics, row: _TracedRow, ended: int) -> None:
        row.first_token_ns = ended
        self._tracer.span("first token", record.started_ns, row=row.number, ended=ended)

    def _close_row(self, record: RequestStatistics, ended: int) -> None:
        row = self._rows.pop(record.request_id, None)
        if row is None:
            return
        if row.first_token_ns is None and record.first_token_ns is not None:
            self._end_first_token(record, row, ended)
        if row.first_token_ns is None:
            self._tracer.span("waiting", record.started_ns, row=row.number, ended=ended)
        else:
            self._tracer.span("stream", row.first_token_ns, row=row.number, ended=ended)
        args: dict[str, Any] = {
            "request": record.request_id,
            "prompt_tokens": record.num_prompt_tokens,
            "cached_tokens": record.num_cached_tokens,
            "output_tokens": record.num_output_tokens,
            "finish_reason": record.finish_reason,
            "detokenize_ms": row.detokenize_ns / 1e6,
            "write_ms": row.write_ns / 1e6,
        }
        if record.queue_time_s is not None:
            args["queue_ms"] = record.queue_time_s * 1e3
        arrived = record.client_request.arrived_ns
        self._tracer.span("request", arrived, args, row=row.number, ended=ended)
        self._tracer.close_row(row.number)
