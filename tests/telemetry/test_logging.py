# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
from datetime import datetime, timedelta
from typing import Any

import pytest

from pagoda.errors import ConfigError
from pagoda.telemetry.logging import LOG_FORMAT_ENV, LOG_LEVEL_ENV, configure_logging


def logging_to(level: str | None = "info", **options: Any) -> io.StringIO:
    stream = io.StringIO()
    configure_logging(level, stream=stream, **options)
    return stream


def json_lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_says_when_who_and_for_which_request() -> None:
    stream = logging_to()
    logging.getLogger("pagoda.api").info("aborted", extra={"request_id": "req-7"})
    logging.getLogger("pagoda.api").warning("odd")
    first, second = stream.getvalue().splitlines()
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} INFO    pagoda\.api \d+ \[req-7\] aborted", first
    )
    assert second.endswith("[-] odd")


def test_a_line_says_which_of_several_processes() -> None:
    stream = logging_to(place="dp0 pp1 tp0")
    logging.getLogger("pagoda.worker").info("ready")
    assert re.search(r" pagoda\.worker \d+ dp0 pp1 tp0 \[-\] ready\n$", stream.getvalue())


def test_levels_hold_for_pagoda_and_libraries_are_quiet() -> None:
    stream = logging_to("debug")
    logging.getLogger("pagoda.engine").debug("ours")
    logging.getLogger("aiohttp.access").info("theirs")
    configure_logging("error", stream=stream)
    logging.getLogger("pagoda.engine").warning("too quiet")
    assert [line.rsplit(" ", 1)[-1] for line in stream.getvalue().splitlines()] == ["ours"]


def test_the_environment_gives_level_and_format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOG_LEVEL_ENV, "error")
    monkeypatch.setenv(LOG_FORMAT_ENV, "json")
    stream = logging_to(level=None)
    logging.getLogger("pagoda").warning("too quiet")
    logging.getLogger("pagoda").error("x")
    [line] = json_lines(stream)
    assert line["message"] == "x"


def test_lines_for_machines_are_objects() -> None:
    stream = logging_to(log_format="json", place="dp1")
    log = logging.getLogger("pagoda.api")
    log.info("ended %s\nearly", "too", extra={"request_id": "req-7", "fields": {"n": 3, "m": None}})
    log.warning("odd")
    first, second = json_lines(stream)
    at = datetime.fromisoformat(first.pop("time"))
    assert at.utcoffset() == timedelta(0)
    assert first == {
        "level": "info",
        "logger": "pagoda.api",
        "process": os.getpid(),
        "place": "dp1",
        "request_id": "req-7",
        "message": "ended too\nearly",
        "n": 3,
    }
    assert "request_id" not in second


def test_the_time_of_a_line_is_rfc_3339_in_utc() -> None:
    stream = logging_to(log_format="json")
    record = logging.LogRecord("pagoda", logging.INFO, "", 0, "x", None, None)
    record.created = 1_000_000_000.5
    logging.getLogger("pagoda").handle(record)
    assert json_lines(stream)[0]["time"] == "2001-09-09T01:46:40.500Z"


def test_an_exception_is_part_of_its_line() -> None:
    stream = logging_to(log_format="json")
    try:
        raise ValueError("wrong \ud800")
    except ValueError:
        logging.getLogger("pagoda").exception("failed")
    [line] = json_lines(stream)
    assert line["message"] == "failed"
    assert line["exception"].startswith("Traceback")
    assert "ValueError" in line["exception"]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"level": "loud"}, "--log-level must be one of debug, info"),
        ({"log_format": "xml"}, "--log-format must be one of text, json, got xml"),
    ],
)
def test_unknown_values_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        configure_logging(**options)


def test_fields_replace_nothing_that_every_line_has() -> None:
    stream = logging_to(log_format="json")
    fields = {"message": "no", "level": "no", "request_id": "mine", "place": "here", "n": 1}
    logging.getLogger("pagoda").info("x", extra={"fields": fields})
    [line] = json_lines(stream)
    assert (line["message"], line["level"], line["n"]) == ("x", "info", 1)
    assert not {"request_id", "place"} & line.keys()


def test_numbers_that_json_does_not_have_are_null() -> None:
    stream = logging_to(log_format="json")
    fields = {"a": float("nan"), "b": [1.0, float("inf")], "c": {"d": float("-inf")}}
    logging.getLogger("pagoda").info("x", extra={"fields": fields})

    def refuse(name: str) -> None:
        raise AssertionError(name)

    line = json.loads(stream.getvalue(), parse_constant=refuse)
    assert "a" not in line
    assert (line["b"], line["c"]) == ([1.0, None], {"d": None})


def test_a_message_is_one_line_of_what_can_be_seen() -> None:
    stream = logging_to()
    log = logging.getLogger("pagoda")
    log.info("a\n2031-05-04 forged\r\x1b[31m\u2028 ä\tb", extra={"request_id": "r\n7"})
    [line] = stream.getvalue().splitlines()
    assert line.endswith(r"[r\n7] a\n2031-05-04 forged\r\x1b[31m\u2028 ä" + "\tb")
    try:
        raise ValueError
    except ValueError:
        log.exception("failed")
    assert "failed\nTraceback" in stream.getvalue()


def test_a_process_that_ends_by_a_fault_of_memory_says_where() -> None:
    program = (
        "import os, signal\n"
        "from pagoda.telemetry.logging import configure_logging\n"
        "configure_logging()\n"
        "def touch_nothing(): os.kill(os.getpid(), signal.SIGSEGV)\n"
        "touch_nothing()\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == -signal.SIGSEGV
    assert "in touch_nothing" in ended.stderr


def test_logging_begins_where_standard_error_is_closed() -> None:
    program = "import pagoda.telemetry.logging as it; it.configure_logging()"
    ended = subprocess.run(["sh", "-c", 'exec "$0" -c "$1" 2>&-', sys.executable, program])
    assert ended.returncode == 0
