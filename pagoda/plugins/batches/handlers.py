# SPDX-License-Identifier: Apache-2.0
"""`/v1/files` and `/v1/batches`."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast, get_args

import msgspec
from aiohttp import web

from pagoda.api.bodies.fields import Metadata
from pagoda.api.errors import ApiError
from pagoda.api.http.forms import FormReader, open_form
from pagoda.api.http.pace import Pace
from pagoda.api.http.request_context import RequestContext
from pagoda.errors import InvalidRequestError, refuse
from pagoda.plugins.batches.files import FileRecord, FileStore, Purpose, new_id
from pagoda.plugins.batches.records import WINDOW_S, BatchRecord
from pagoda.plugins.batches.runner import BatchRunner
from pagoda.plugins.batches.state import BatchState

MAX_FILE_BYTES = 512 * 2**20
_MAX_FIELD_BYTES = 1024
_MAX_NAME_CHARS = 255
_UPLOAD_PURPOSES = tuple(name for name in get_args(Purpose) if name != "batch_output")
_NO_BYTES = re.compile(r"bytes=-0+", re.IGNORECASE)
"""A range that nothing satisfies (RFC 9110, 14.1.2)."""


class CreateBatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/batches`."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: Metadata | None = None
    output_expires_after: None = None
    """Time after which results are deleted, which is never."""


def _files(context: RequestContext) -> FileStore:
    files = context.service.state(BatchState).files
    if files is None:
        raise ApiError(404, "Files are off; the operator turns them on with --files-dir DIRECTORY.")
    return files


def _batches(context: RequestContext) -> BatchRunner:
    _files(context)
    batches = context.service.state(BatchState).batches
    if batches is None:
        raise ApiError(
            404, "Batches are off; the operator turns them on with --files-dir DIRECTORY."
        )
    return batches


# ---- files


async def upload_file(context: RequestContext) -> web.StreamResponse:
    """Writes an upload to the disk as it comes."""
    files = _files(context)
    with files.uploads.admit(context.key_name):
        record = await _take_upload(context, files)
    return context.json(record.shown())


async def _take_upload(context: RequestContext, files: FileStore) -> FileRecord:
    purpose: str | None = None
    upload: tuple[str, int, str] | None = None
    pace = Pace(context.service.config.body_timeout_s)
    form = open_form(context.http, pace.wait, context.service.body_threads, context.key_name)
    try:
        while (part := await form.next_part()) is not None:
            if part.name == "file" and upload is None:
                name = (part.filename or "upload")[:_MAX_NAME_CHARS]
                upload = (
                    *await files.write(_chunks(form, pace), MAX_FILE_BYTES, context.key_name),
                    name,
                )
            elif part.name == "purpose" and purpose is None:
                value = await form.field(part.name, _MAX_FIELD_BYTES)
                purpose = value.decode("utf-8", "replace")
            else:
                refuse(part.name[:64], "is not a known field, or is given twice", "unknown_field")
        if upload is None:
            raise InvalidRequestError("file is missing.", param="file", kind="missing_field")
        if purpose not in _UPLOAD_PURPOSES:
            refuse("purpose", f"must be one of {', '.join(_UPLOAD_PURPOSES)}")
    except BaseException:  # the client that went away, too
        if upload is not None:
            await files.drop_upload(upload[0], upload[1], context.key_name)
        raise
    file_id, num_bytes, filename = upload
    kind = cast(Purpose, purpose)
    adding = files.add_upload(file_id, filename, kind, num_bytes, context.key_name)
    # To the end, also for a client that goes away: bytes without a description would stay for ever.
    return await asyncio.shield(asyncio.ensure_future(adding))


async def _chunks(form: FormReader, pace: Pace) -> AsyncIterator[bytes]:
    async for chunk in form.chunks():
        pace.num_bytes += len(chunk)
        yield chunk


async def list_files(context: RequestContext) -> web.StreamResponse:
    records = _files(context).all_of(context.key_name)
    purpose = context.http.query.get("purpose")
    chosen = [record for record in records if purpose is None or record.purpose == purpose]
    return context.json(_page(context, chosen, 10_000))


async def get_file(context: RequestContext) -> web.StreamResponse:
    """The description of a file; behind `/content` its bytes."""
    files = _files(context)
    if not context.path_argument.endswith("/content"):
        return context.json(_file(context, context.path_argument).shown())
    record = _file(context, context.path_argument.removesuffix("/content"))
    if _NO_BYTES.fullmatch(context.http.headers.get("Range", "")):
        raise ApiError(
            416,
            "Range asks for the last 0 bytes; ask for one at least.",
            headers={"Content-Range": f"bytes */{record.bytes}"},
        )
    headers = {
        "Content-Type": "application/octet-stream",
        "X-Content-Type-Options": "nosniff",
        "X-Request-Id": context.request_id,
    }
    return web.FileResponse(files.data_path(record.id), headers=headers)


async def delete_file(context: RequestContext) -> web.StreamResponse:
    record = _file(context, context.path_argument)
    used = (
        record.id in (batch.input_file_id, batch.output_id, batch.error_id)
        for batch in _batches(context).batches.values()
        if not batch.is_finished
    )
    if any(used):
        raise ApiError(409, "A batch that is not finished uses the file.", "file_id")
    await _files(context).delete(record)
    return context.json({"id": record.id, "object": "file", "deleted": True})


def _file(context: RequestContext, file_id: str) -> FileRecord:
    record = _files(context).find(file_id, context.key_name)
    if record is None:
        raise ApiError(404, f"There is no file {file_id[:200]!r}.", "file_id")
    return record


# ---- batches


async def create_batch(context: RequestContext) -> web.StreamResponse:
    batches = _batches(context)
    body = await context.parse(CreateBatch)
    if body.endpoint not in batches.endpoints:
        refuse("endpoint", f"must be one of {', '.join(batches.endpoints)}")
    if body.completion_window != "24h":
        refuse("completion_window", "must be 24h")
    file = _files(context).find(body.input_file_id, context.key_name)
    if file is None or file.purpose != "batch":
        refuse("input_file_id", "must be the id of a file with the purpose batch")
    _files(context).check_room("input_file_id", context.key_name)
    now = int(time.time())
    record = BatchRecord(
        id=new_id("batch"),
        endpoint=body.endpoint,
        input_file_id=body.input_file_id,
        created_at=now,
        expires_at=now + WINDOW_S,
        metadata=body.metadata,
        output_id=new_id("file"),
        error_id=new_id("file"),
        key_name=context.key_name,
    )
    await batches.add(record)
    return context.json(record.shown())


async def list_batches(context: RequestContext) -> web.StreamResponse:
    records = [
        record
        for record in _batches(context).batches.values()
        if record.key_name == (context.key_name)
    ]
    records.sort(key=lambda record: (record.created_at, record.id), reverse=True)
    return context.json(_page(context, records, 20))


async def get_batch(context: RequestContext) -> web.StreamResponse:
    return context.json(_batch(context, context.path_argument).shown())


async def cancel_batch(context: RequestContext) -> web.StreamResponse:
    """Ends a batch that is not finished; its results so far are kept."""
    name, mark, rest = context.path_argument.rpartition("/")
    if (mark, rest) != ("/", "cancel"):
        raise ApiError(404, "POST /v1/batches/{id}/cancel is the only change of a batch.")
    record = _batch(context, name)
    if record.is_finished:
        raise ApiError(409, f"The batch is {record.status} and cannot be cancelled.", "batch_id")
    await _batches(context).cancel(record)
    return context.json(record.shown())


def _batch(context: RequestContext, batch_id: str) -> BatchRecord:
    record = _batches(context).batches.get(batch_id)
    if record is None or record.key_name != (context.key_name):
        raise ApiError(404, f"There is no batch {batch_id[:200]!r}.", "batch_id")
    return record


def _page(
    context: RequestContext, records: Sequence[FileRecord | BatchRecord], limit: int
) -> dict[str, Any]:
    """The records behind `after`, at most `limit` of them, as OpenAI lists them; `records` begin with the newest.
    Raises InvalidRequestError: the query's `limit` is not a number from 1 on, or its `order` is no order."""
    query = context.http.query
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        refuse("order", "must be asc or desc")
    if order == "asc":
        records = records[::-1]
    asked = query.get("limit", str(limit))
    if not (asked.isascii() and asked.isdigit() and 1 <= int(asked[:9]) <= 10_000):
        refuse("limit", "must be a number from 1 to 10000")
    after = query.get("after")
    places = [i for i, record in enumerate(records) if record.id == after]
    rest = records[places[0] + 1 :] if places else [] if after else records
    shown = rest[: int(asked)]
    return {
        "object": "list",
        "data": [record.shown() for record in shown],
        "first_id": shown[0].id if shown else None,
        "last_id": shown[-1].id if shown else None,
        "has_more": len(rest) > len(shown),
    }
