# SPDX-License-Identifier: Apache-2.0
"""One log format for every process: lines for people, or one JSON object a line for machines.

    2031-05-04 12:00:00.123 INFO  pagoda.api 4711 [req-1] 400 prompt is longer than the context
    {"time":"2031-05-04T10:00:00.123Z","level":"info","logger":"pagoda.api","process":4711,"request_id":"req-1",
     "message":"400 prompt is longer than the context"}

Lines that concern a request carry its id: `logger.info("aborted", extra={"request_id": id})`. What a line says in
figures may be given to machines as such, too: `extra={"fields": {"output_tokens": 7}}`.
Prompts and answers are never logged; what a line says of them are counts and ids.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import math
import os
import re
import sys
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

from pagoda.errors import ConfigError

LOG_LEVEL_ENV = "PAGODA_LOG_LEVEL"
"""The spelling of `--log-level` in the environment, which is how child processes learn it."""

LOG_FORMAT_ENV = "PAGODA_LOG_FORMAT"
"""The same for `--log-format`."""

LogFormat = Literal["text", "json"]
LOG_FORMATS: tuple[LogFormat, ...] = ("text", "json")
LogLevel = Literal["debug", "info", "warning", "error"]
LOG_LEVELS: tuple[LogLevel, ...] = ("debug", "info", "warning", "error")

_ORIGIN = "%(asctime)s.%(msecs)03d %(levelname)-7s %(name)s %(process)d"
_TEXT = "[%(request_id)s] %(message)s"
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
"""All but the tab."""


def configure_logging(
    level: str | None = None,
    *,
    log_format: str | None = None,
    stream: TextIO | None = None,
    place: str | None = None,
) -> None:
    """Sends the log lines of this process to `stream` (standard error) in Pagoda's format.

    `level` is one of `LOG_LEVELS`; None takes `PAGODA_LOG_LEVEL` from the environment, else `info`. `log_format`
    is one of `LOG_FORMATS`; None takes `PAGODA_LOG_FORMAT`, else `text`. `place` tells processes of one kind
    apart. Libraries log from `warning` up. May be called again; the last call counts.

    From now on a process that ends by a fatal signal, such as SIGSEGV, writes the stacks of its threads to
    standard error.

    Raises ConfigError if there is no such level or format.
    """
    name = (level or os.environ.get(LOG_LEVEL_ENV, "info")).lower()
    if name not in LOG_LEVELS:
        raise ConfigError(f"--log-level must be one of {', '.join(LOG_LEVELS)}, got {name}.")
    form = (log_format or os.environ.get(LOG_FORMAT_ENV, "text")).lower()
    if form not in LOG_FORMATS:
        raise ConfigError(f"--log-format must be one of {', '.join(LOG_FORMATS)}, got {form}.")
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_JsonLines(place) if form == "json" else _TextLines(place))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("pagoda").setLevel(name.upper())
    # No line tells of these, and looking them up costs more than the line ("Optimization" in Python's HOWTO).
    logging.logThreads = logging.logMultiprocessing = False
    logging._srcfile = None
    if not faulthandler.is_enabled():
        # Standard error may be closed, or no file.
        with contextlib.suppress(OSError, RuntimeError, ValueError):
            faulthandler.enable()


class WithheldError(Exception):
    """Stands in a log for an exception whose text may quote a client."""


def withheld(error: BaseException) -> WithheldError:
    """The frames and types of an exception and of those that led to it, without their texts."""
    stand_in = WithheldError(f"{type(error).__name__}; its text may quote a client").with_traceback(
        error.__traceback__
    )
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    stand_in.__cause__ = None if before is None else withheld(before)
    return stand_in


class _TextLines(logging.Formatter):
    """One line each, but for tracebacks: what others have written cannot look like a line of its own."""

    def __init__(self, place: str | None) -> None:
        line = f"{_ORIGIN} {_TEXT}" if place is None else f"{_ORIGIN} {place} {_TEXT}"
        super().__init__(line, "%Y-%m-%d %H:%M:%S", defaults={"request_id": "-"})

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        return _CONTROL.sub(_escaped, super().formatMessage(record))


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()


class _JsonLines(logging.Formatter):
    """One object a line; what a line does not have is left out."""

    def __init__(self, place: str | None) -> None:
        super().__init__()
        self._place = place

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {
            "time": at.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": record.process,
            "place": self._place,
            "request_id": getattr(record, "request_id", None),
            "message": record.getMessage(),
            "exception": self.formatException(record.exc_info) if record.exc_info else None,
        }
        line = getattr(record, "fields", {}) | line  # what every line has, no field replaces
        said = {name: _valid(value) for name, value in line.items()}
        said = {name: value for name, value in said.items() if value is not None}
        return json.dumps(said, default=str, allow_nan=False, separators=(",", ":"))


def _valid(value: Any) -> Any:
    """JSON has no number for infinity, nor for what is none."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {name: _valid(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_valid(item) for item in value]
    return value
