# SPDX-License-Identifier: Apache-2.0
"""Answers to the lines of batches, one batch of a key after the other, behind all other requests.

Results are appended as they come. After a restart a batch goes on with the lines that have no result yet.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from pagoda.api.auth.key_shares import KeyShares
from pagoda.api.bodies.body import parse_beside
from pagoda.api.bodies.ignored_fields import Ignored
from pagoda.api.errors import ApiError, as_api_error
from pagoda.api.http.request_context import Caller, take_timeout
from pagoda.api.openai.bodies import ChatRequest, CompletionRequest
from pagoda.api.openai.chat import begin_chat
from pagoda.api.openai.completions import begin_completion
from pagoda.api.plugin import LineForm
from pagoda.api.service import Service
from pagoda.concurrency.async_utils import cancel_all
from pagoda.errors import OverloadedError, refuse
from pagoda.files import open_private
from pagoda.plugins.batches.files import FileStore, new_id, sync_file
from pagoda.plugins.batches.lines import (
    BatchFault,
    BatchLine,
    check_file,
    decode_line,
    finished_ids,
    read_lines,
    result_line,
    unanswered_line,
)
from pagoda.plugins.batches.records import (
    BatchRecord,
    Status,
    read_batches,
    remove_batch,
    write_batch,
)
from pagoda.telemetry.request_tracker import ClientRequest

MAX_BATCHES = 10_000
"""Most batches at a time; their descriptions are in memory."""
CONCURRENCY = 16
"""Lines under way at once, of all batches."""
PRIORITY = 2**30
"""Priority of the requests of batches; lower comes first, and 0 is that of other requests."""
_READ_LINES = 256
"""Lines that are read from the disk at a time."""
RETRY_S = 1.0
"""Seconds before a request that found the server full is asked again, and between looks at a key's tokens."""

_log = logging.getLogger("pagoda.api")

T = TypeVar("T")


async def _parsed(caller: Caller, body: bytes, kind: type[T]) -> T:
    """The body of a line, behind all requests that are not of batches.
    Raises InvalidRequestError: the body does not fit `kind`, or asks for a stream; names the field."""
    service = caller.service
    caller.client_request.num_body_bytes = len(body)
    parsed: Any = await parse_beside(
        body,
        kind,
        service.body_threads,
        caller.ignored,
        tenant=caller.client_request.key_name,
    )
    take_timeout(caller.client_request, parsed)
    for name in ("stream", "background"):
        if getattr(parsed, name, None):
            refuse(name, "is not possible in a batch")
    caller.client_request.check_priority(parsed.priority or 0)
    priority = min(PRIORITY + (parsed.priority or 0), 2**31 - 1)
    behind: T = msgspec.structs.replace(parsed, priority=priority)
    return behind


async def _answer_chat(caller: Caller, body: ChatRequest) -> dict[str, Any]:
    generation, shape = await begin_chat(caller, body)
    return await generation.run(shape)


async def _answer_completion(caller: Caller, body: CompletionRequest) -> dict[str, Any]:
    generation, shape = await begin_completion(caller, body)
    return await generation.run(shape)


_CORE_FORMS: Mapping[str, LineForm] = {
    "/v1/chat/completions": LineForm(ChatRequest, _answer_chat),
    "/v1/completions": LineForm(CompletionRequest, _answer_completion),
}


class BatchRunner:
    """The batches of a directory, and the tasks that answer them.

    Batches of one key are answered one after the other; those of several at the same time, so that a key which has
    to wait for tokens of its own holds no other up.
    """

    def __init__(self, service: Service, files: FileStore, forms: Mapping[str, LineForm]) -> None:
        """`forms` are those of lines besides chats and completions, by URL.
        Raises ConfigError: a batch of the directory cannot be read."""
        self._forms = {**_CORE_FORMS, **forms}
        self._service = service
        self._files = files
        self.batches = read_batches(files.directory)
        unfinished = [one for one in self.batches.values() if not one.is_finished]
        files.remove_orphans({id_ for one in unfinished for id_ in (one.output_id, one.error_id)})
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._stops: dict[str, asyncio.Event] = {}
        """Events that end the batches under way, by the ids of these."""
        self._lines = asyncio.Semaphore(CONCURRENCY)
        self._writing = asyncio.Lock()

    @property
    def endpoints(self) -> tuple[str, ...]:
        """URLs that lines may name."""
        return tuple(self._forms)

    def start(self) -> None:
        """Begins to answer. The model must be loaded."""
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stops; unfinished batches go on when the server is started again."""
        if self._task is not None:
            await cancel_all([self._task])
        async with self._writing:  # to the end of what is being written
            pass

    async def add(self, record: BatchRecord) -> None:
        """Keeps a batch, which is answered behind those before it; the oldest finished one of the key that has
        most of these makes room. Raises OverloadedError: too many wait, of all clients or of the key."""
        finished, waiting = KeyShares(), KeyShares()
        for one in self.batches.values():
            (finished if one.is_finished else waiting).change(one.key_name, 1)
        if not waiting.has_room(record.key_name, MAX_BATCHES):
            raise OverloadedError(
                f"{waiting.of(record.key_name)} batches of {waiting.total} that wait are yours, of at most "
                f"{MAX_BATCHES}; a key may have as many as it leaves free. Try again when one is finished."
            )
        if len(self.batches) >= MAX_BATCHES:
            key_name = finished.greatest()
            theirs = [one for one in self.batches.values() if one.key_name == key_name]
            oldest = min(
                (one for one in theirs if one.is_finished),
                key=lambda one: (one.created_at, one.id),
            )
            del self.batches[oldest.id]
            await self._write(lambda: remove_batch(self._files.directory, oldest))
        await self._save(record)
        self.batches[record.id] = record
        self._wake.set()

    async def cancel(self, record: BatchRecord) -> None:
        """Ends a batch; what runs of it is aborted, and its results so far are kept."""
        if record.is_finished or record.status == "cancelling":
            return
        self._enter(record, "cancelling")
        await self._save(record)
        if record.id in self._stops:
            self._stops[record.id].set()
        self._wake.set()

    def _enter(self, record: BatchRecord, status: Status) -> None:
        record.status = status
        record.times = {**record.times, status: int(time.time())}

    async def _save(self, record: BatchRecord) -> None:
        await self._write(
            lambda: write_batch(self._files.directory, msgspec.structs.replace(record))
        )

    async def _append(self, file_id: str, text: bytes) -> None:
        await self._write(lambda: _append(self._files.data_path(file_id), text))

    async def _write(self, work: Callable[[], None]) -> None:
        """Writes in a thread, one thing at a time, and to the end even if the caller is cancelled."""

        async def write() -> None:
            async with self._writing:
                await asyncio.to_thread(work)

        await asyncio.shield(asyncio.ensure_future(write()))

    async def _run(self) -> None:
        """Begins the oldest batch of each key that has none under way."""
        working: dict[str, asyncio.Task[None]] = {}
        try:
            while True:
                self._wake.clear()
                for name in [name for name, task in working.items() if task.done()]:
                    working.pop(name).result()
                waiting = [record for record in self.batches.values() if not record.is_finished]
                for record in sorted(waiting, key=lambda one: (one.created_at, one.id)):
                    if record.key_name not in working:
                        working[record.key_name] = asyncio.create_task(self._work(record))
                        working[record.key_name].add_done_callback(lambda _: self._wake.set())
                await self._wake.wait()
        finally:
            await cancel_all(list(working.values()))

    async def _work(self, record: BatchRecord) -> None:
        """Answers a batch. What goes wrong is its end."""
        self._stops[record.id] = asyncio.Event()
        try:
            await self._answer(record)
        except OSError as error:
            await self._fail(record, f"The files of the batch cannot be used: {error.strerror}.")
        except Exception:
            _log.exception("batch %s failed", record.id)
            await self._fail(record, "The server made an error; its log says more.")
        finally:
            del self._stops[record.id]

    async def _fail(self, record: BatchRecord, reason: str) -> None:
        _log.error("batch %s: %s", record.id, reason)
        record.faults = [BatchFault("server_error", reason)]
        self._enter(record, "failed")
        with contextlib.suppress(OSError):
            await self._save(record)

    async def _answer(self, record: BatchRecord) -> None:
        """Brings a batch from the state that it is in to its end."""
        if record.status == "validating" and not await self._validate(record):
            return
        if record.status == "in_progress":
            is_expired = await self._answer_lines(record)
            if is_expired:
                await self._finish(record, "expired")
                return
            if record.status == "in_progress":
                self._enter(record, "finalizing")
                await self._save(record)
        await self._finish(record, "cancelled" if record.status == "cancelling" else "completed")

    async def _validate(self, record: BatchRecord) -> bool:
        path = self._files.data_path(record.input_file_id)
        limit = self._service.config.max_body_bytes
        total, faults = await asyncio.to_thread(check_file, path, record.endpoint, limit)
        record.faults = faults
        record.counts.total = 0 if faults else total
        if record.status == "validating":  # not cancelled meanwhile
            self._enter(record, "failed" if faults else "in_progress")
        await self._save(record)
        return not record.is_finished

    async def _answer_lines(self, record: BatchRecord) -> bool:
        """Answers the lines that have no result. Returns True if the batch's time was over before the last."""
        done = await asyncio.to_thread(self._finished, record)
        running: set[asyncio.Task[None]] = set()
        path = self._files.data_path(record.input_file_id)
        lines = read_lines(path, self._service.config.max_body_bytes)
        stopping = asyncio.create_task(self._stops[record.id].wait())
        is_expired = False
        try:
            while texts := await asyncio.to_thread(_next_lines, lines):
                for line in map(decode_line, texts):
                    if line.custom_id in done:
                        continue
                    await _until_below(CONCURRENCY, running, stopping)
                    await self._until_tokens(record, stopping)
                    if stopping.done():
                        return False
                    if time.time() >= record.expires_at:
                        is_expired = True
                        await self._expire(record, line)
                    else:
                        running.add(asyncio.create_task(self._answer_line(record, line)))
            await _until_below(1, running, stopping)
            return is_expired
        finally:
            await cancel_all([stopping, *running])

    async def _until_tokens(self, record: BatchRecord, stopping: asyncio.Task[Any]) -> None:
        """Waits until the batch's key has tokens for lines, the batch's time is over, or `stopping` is done."""
        while not stopping.done() and time.time() < record.expires_at:
            key = self._service.config.api_keys.named(record.key_name)
            wait_s = 0.0 if key is None else self._service.key_limits.until_half_s(key)
            if wait_s <= 0:
                return
            await asyncio.wait([stopping], timeout=min(wait_s, RETRY_S))

    def _finished(self, record: BatchRecord) -> set[str]:
        """The lines that have results; counts them."""
        good = finished_ids(self._files.data_path(record.output_id))
        bad = finished_ids(self._files.data_path(record.error_id))
        record.counts.completed, record.counts.failed = len(good), len(bad - good)
        return good | bad

    async def _expire(self, record: BatchRecord, line: BatchLine) -> None:
        """Says of a line that it came too late."""
        message = "This request could not be executed before the completion window expired."
        text = unanswered_line(line.custom_id, new_id("batch_req"), "batch_expired", message)
        await self._append(record.error_id, text)
        record.counts.failed += 1

    async def _answer_line(self, record: BatchRecord, line: BatchLine) -> None:
        request_id = new_id("req")
        while True:
            async with self._lines:
                status, body = await self._ask(record, line, request_id)
            if status not in (429, 503) or time.time() >= record.expires_at:
                break
            await asyncio.sleep(RETRY_S)  # full or stuck: everybody else comes first
        text = result_line(line.custom_id, new_id("batch_req"), request_id, status, body)
        is_good = status == 200
        await self._append(record.output_id if is_good else record.error_id, text)
        if is_good:
            record.counts.completed += 1
        else:
            record.counts.failed += 1

    async def _ask(self, record: BatchRecord, line: BatchLine, request_id: str) -> tuple[int, Any]:
        """Status and body of the answer to a line."""
        key = self._service.config.api_keys.named(record.key_name)
        client = ClientRequest(
            id=f"{record.id}-{request_id}",
            arrived_ns=self._service.tracker.clock_ns(),
            key_name=record.key_name,
            weight=1.0 if key is None else key.weight,
            least_priority=self._service.config.api_keys.least_priority(key),
            route=record.endpoint,
        )
        try:
            if key is None:
                raise ApiError(
                    401, "The API key of this batch was revoked.", code="invalid_api_key"
                )
            ignored = Ignored(self._service.config.ignored_names)
            caller = Caller(self._service, client, key, ignored=ignored)
            form = self._forms.get(record.endpoint)
            if form is None:
                raise ApiError(404, f"There is no route {record.endpoint!r}.")
            body = await _parsed(caller, bytes(line.body), form.body)
            return 200, await form.answer(caller, body)
        except Exception as error:
            refused = as_api_error(error, client.id)
            return refused.status, refused.body()

    async def _finish(self, record: BatchRecord, status: Status) -> None:
        """Makes the results files that clients can get, and ends the batch."""
        async with self._writing:  # the last results are written
            await asyncio.to_thread(self._finished, record)
        for file_id, kind in ((record.output_id, "output"), (record.error_id, "error")):
            path = self._files.data_path(file_id)
            if not await asyncio.to_thread(path.exists):
                continue
            size = await asyncio.to_thread(sync_file, path)
            name = f"{record.id}_{kind}.jsonl"
            await self._files.add_results(file_id, name, size, record.key_name)
            if kind == "output":
                record.has_output = True
            else:
                record.has_errors = True
        if record.status == "cancelling":  # also if that came while the files were made
            status = "cancelled"
        self._enter(record, status)
        await self._save(record)


async def _until_below(
    limit: int, running: set[asyncio.Task[None]], stopping: asyncio.Task[Any]
) -> None:
    """Waits until fewer than `limit` tasks run, or until `stopping` is done. Raises what a task raised."""
    while len(running) >= limit and not stopping.done():
        finished, _ = await asyncio.wait({*running, stopping}, return_when=asyncio.FIRST_COMPLETED)
        for task in finished - {stopping}:
            running.discard(task)
            task.result()


def _next_lines(lines: Iterator[tuple[int, bytes | None]]) -> list[bytes]:
    return [text for _, text in islice(lines, _READ_LINES) if text is not None]


def _append(path: Path, text: bytes) -> None:
    """Adds a line in one write, so that lines of several threads do not mix."""
    with open(path, "ab", buffering=0, opener=open_private) as file:
        file.write(text)
