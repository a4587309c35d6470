"""The one log format."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Iterator

import pytest

from pagoda.errors import ConfigError
from pagoda.telemetry.logging import LOG_LEVEL_ENV, configure_logging


@pytest.fixture(autouse=True)
def _restored_logging() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("pagoda")
    before = (root.handlers[:], root.level, ours.level)
    yield
    root.handlers[:], level, our_level = before
    root.setLevel(level)
    ours.setLevel(our_level)


def test_a_line_says_when_who_and_for_which_request() -> None:
    stream = io.StringIO()
    configure_logging("info", stream=stream)
    logging.getLogger("pagoda.api").info("aborted", extra={"request_id": "req-7"})
    logging.getLogger("pagoda.api").warning("odd")
    first, second = stream.getvalue().splitlines()
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} INFO    pagoda\.api \d+ \[req-7\] aborted", first
    )
    assert second.endswith("[-] odd")


def test_a_line_says_which_of_several_processes() -> None:
    stream = io.StringIO()
    configure_logging("info", stream=stream, place="dp0 pp1 tp0")
    logging.getLogger("pagoda.worker").info("ready")
    assert re.search(r" pagoda\.worker \d+ dp0 pp1 tp0 \[-\] ready\n$", stream.getvalue())


def test_levels_hold_for_pagoda_and_libraries_are_quiet() -> None:
    stream = io.StringIO()
    configure_logging("debug", stream=stream)
    logging.getLogger("pagoda.engine").debug("ours")
    logging.getLogger("aiohttp.access").info("theirs")
    configure_logging("error", stream=stream)
    logging.getLogger("pagoda.engine").warning("too quiet")
    assert [line.rsplit(" ", 1)[-1] for line in stream.getvalue().splitlines()] == ["ours"]


def test_the_environment_gives_the_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOG_LEVEL_ENV, "error")
    configure_logging(stream=io.StringIO())
    assert logging.getLogger("pagoda").level == logging.ERROR


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ConfigError, match="--log-level must be one of debug, info"):
        configure_logging("loud")
