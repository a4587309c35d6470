# SPDX-License-Identifier: Apache-2.0
"""Progress of weights that load."""

from __future__ import annotations

import io
import logging

import pytest

from pagoda.parallel.config import RankPlace
from pagoda.worker.progress import loading_weights

FIRST = RankPlace()


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class _Gone(_Terminal):
    def write(self, text: str) -> int:  # noqa: ARG002
        raise OSError("Input/output error")


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    caplog.set_level(logging.INFO)


def _load(stream: io.StringIO, total: int, times: list[float], place: RankPlace = FIRST) -> str:
    """What is drawn while all is loaded in as many parts as there is a time for, between begin and end."""
    ticks, parts = iter(times), max(len(times) - 3, 1)
    with loading_weights(place, total, stream=stream, clock=lambda: next(ticks)) as advance:
        for _ in range(parts):
            advance(total // parts)
    return stream.getvalue()


def test_a_terminal_shows_a_line_that_goes_away(caplog: pytest.LogCaptureFixture) -> None:
    drawn = _load(_Terminal(), 1 << 30, [0, 0, 0.2, 0.5, 0.55, 1.0, 2.0]).split("\r\x1b[K")
    assert drawn == [
        "",
        "loading weights [########--------] 512 MiB of 1.00 GiB\r",
        "loading weights [################] 1.00 GiB of 1.00 GiB\r",
        "",
    ]
    assert caplog.messages == ["loaded 1.00 GiB of weights in 2.0 s, 512 MiB/s"]


def test_a_failure_leaves_no_bar_behind(caplog: pytest.LogCaptureFixture) -> None:
    stream, ticks = _Terminal(), iter([0, 0, 1])

    def load() -> None:
        with loading_weights(FIRST, 100, stream=stream, clock=lambda: next(ticks)) as advance:
            advance(50)
            raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        load()
    assert stream.getvalue().endswith("\r\x1b[K")
    assert not caplog.messages


def test_a_terminal_that_has_gone_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    _load(_Gone(), 100, [0, 0, 1, 1])
    assert caplog.messages == ["loaded 100 B of weights in 1.0 s, 100 B/s"]


def test_what_loads_at_once_shows_nothing() -> None:
    assert _load(_Terminal(), 100, [0, 0, 0.1, 0.1]) == ""


@pytest.mark.parametrize(
    ("stream", "place", "environment"),
    [
        (io.StringIO(), FIRST, {}),
        (_Terminal(), RankPlace(tp=1), {}),
        (_Terminal(), RankPlace(dp=1), {}),
        (_Terminal(), FIRST, {"TERM": "dumb"}),
        (_Terminal(), FIRST, {"COLUMNS": "59"}),
    ],
)
def test_elsewhere_there_is_one_line_in_the_log(
    stream: io.StringIO,
    place: RankPlace,
    environment: dict[str, str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert _load(stream, 3 << 20, [0, 4], place) == ""
    assert caplog.messages == ["loaded 3.00 MiB of weights in 4.0 s, 768 KiB/s"]
