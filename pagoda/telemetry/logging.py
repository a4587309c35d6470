"""One log format for every process.

    2031-05-04 12:00:00.123 INFO  pagoda.api 4711 [req-1] 400 prompt is longer than the context

Lines that concern a request carry its id: `logger.info("aborted", extra={"request_id": id})`.
Prompts and answers are never logged; what a line says of them are counts and ids.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Literal, TextIO

from pagoda.errors import ConfigError

LOG_LEVEL_ENV = "PAGODA_LOG_LEVEL"
"""The spelling of `--log-level` in the environment, which is how child processes learn it."""

LogLevel = Literal["debug", "info", "warning", "error"]
LOG_LEVELS: tuple[LogLevel, ...] = ("debug", "info", "warning", "error")

_ORIGIN = "%(asctime)s.%(msecs)03d %(levelname)-7s %(name)s %(process)d"
_TEXT = "[%(request_id)s] %(message)s"


def configure_logging(
    level: str | None = None, *, stream: TextIO | None = None, place: str | None = None
) -> None:
    """Sends the log lines of this process to `stream` (standard error) in Pagoda's format.

    `level` is one of `LOG_LEVELS`; None takes `PAGODA_LOG_LEVEL` from the environment, else `info`. `place` tells
    processes of one kind apart. Libraries log from `warning` up. May be called again; the last call counts.

    Raises:
        ConfigError: no such level.
    """
    name = (level or os.environ.get(LOG_LEVEL_ENV, "info")).lower()
    if name not in LOG_LEVELS:
        raise ConfigError(f"--log-level must be one of {', '.join(LOG_LEVELS)}, got {name}.")
    handler = logging.StreamHandler(stream or sys.stderr)
    line = f"{_ORIGIN} {_TEXT}" if place is None else f"{_ORIGIN} {place} {_TEXT}"
    handler.setFormatter(logging.Formatter(line, "%Y-%m-%d %H:%M:%S", defaults={"request_id": "-"}))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("pagoda").setLevel(name.upper())
