# SPDX-License-Identifier: Apache-2.0
"""The lines of OpenAI's batch files.

in   {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
out  {"id": "...", "custom_id": "a", "response": {"status_code": 200, "request_id": "...", "body": {...}},
      "error": null}
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

MAX_REQUESTS = 50_000
"""Most requests of a batch, as OpenAI has it."""
MAX_ERRORS = 100
"""Most faults of an input file that are listed."""
_MAX_ID_CHARS = 512


class BatchLine(msgspec.Struct, frozen=True):
    """A request."""

    custom_id: Annotated[str, Meta(min_length=1, max_length=_MAX_ID_CHARS)]
    url: str
    body: msgspec.Raw
    method: Literal["POST"] = "POST"


class BatchFault(msgspec.Struct, frozen=True):
    """A fault of an input file."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Result(msgspec.Struct, frozen=True):
    """The head of a line of results, to know it again."""

    custom_id: str


_decoder = msgspec.json.Decoder(BatchLine)


def read_lines(path: Path, max_line_bytes: int) -> Iterator[tuple[int, bytes | None]]:
    """The lines that are not empty with their numbers, from 1; None stands for one that is too long, of which no
    more than `max_line_bytes` are held."""
    with path.open("rb") as file:
        number = 0
        while text := file.readline(max_line_bytes + 1):
            number += 1
            is_whole = text.endswith(b"\n") or len(text) <= max_line_bytes
            rest = text
            while rest and not rest.endswith(b"\n"):
                rest = file.readline(max_line_bytes + 1)
            if not is_whole:
                yield number, None
            elif text.strip():
                yield number, text


def check_file(path: Path, endpoint: str, max_line_bytes: int) -> tuple[int, list[BatchFault]]:
    """The number of requests of an input file, and its faults. Memory: a digest for each request."""
    faults: list[BatchFault] = []
    seen: set[bytes] = set()
    count = 0
    for number, text in read_lines(path, max_line_bytes):
        count += 1
        if count > MAX_REQUESTS:
            message = f"The file has more than {MAX_REQUESTS} requests."
            return count, [BatchFault("max_requests_exceeded", message)]
        fault = _fault(text, endpoint, max_line_bytes, seen)
        if fault is not None:
            faults.append(BatchFault(fault[0], fault[1], number, fault[2]))
            if len(faults) >= MAX_ERRORS:
                break
    if not count:
        faults.append(BatchFault("empty_file", "The input file has no requests."))
    return count, faults


def _fault(
    text: bytes | None, endpoint: str, max_line_bytes: int, seen: set[bytes]
) -> tuple[str, str, str | None] | None:
    """Code, sentence and field of the fault of a line; None if it has none."""
    if text is None:
        return "line_too_long", f"The line is longer than {max_line_bytes} bytes.", None
    try:
        line = _decoder.decode(text)
    except msgspec.ValidationError as error:
        reason, _, place = str(error).partition(" - at `$.")
        return "invalid_request", f"{reason.replace('`', '')}.", place.rstrip("`") or None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "invalid_json_line", "The line is not valid JSON.", None
    if line.url != endpoint:
        message = f"The url must be that of the batch, {endpoint}."
        return "mismatched_url", message, "url"
    digest = hashlib.blake2b(line.custom_id.encode("utf-8", "replace"), digest_size=16).digest()
    if digest in seen:
        return "duplicate_custom_id", "The custom_id was used before.", "custom_id"
    seen.add(digest)
    return None


def decode_line(text: bytes) -> BatchLine:
    """A line that `check_file` has found good."""
    return _decoder.decode(text)


def result_line(
    custom_id: str, result_id: str, request_id: str, status: int, body: object
) -> bytes:
    """The line of an answer, or of an error that the API answered with."""
    response = {"status_code": status, "request_id": request_id, "body": body}
    fields = {"id": result_id, "custom_id": custom_id, "response": response, "error": None}
    return msgspec.json.encode(fields) + b"\n"


def unanswered_line(custom_id: str, result_id: str, code: str, message: str) -> bytes:
    """The line of a request that was not answered."""
    error = {"code": code, "message": message}
    fields = {"id": result_id, "custom_id": custom_id, "response": None, "error": error}
    return msgspec.json.encode(fields) + b"\n"


def finished_ids(path: Path) -> set[str]:
    """The requests whose results are in a file; a line that was cut off by a crash is removed from it."""
    if not path.exists():
        return set()
    found: set[str] = set()
    whole = 0
    with path.open("r+b") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            try:
                found.add(msgspec.json.decode(line, type=Result).custom_id)
            except msgspec.MsgspecError:
                break
            whole += len(line)
        file.truncate(whole)
    return found
