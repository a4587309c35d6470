"""Progress of weights that load."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

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


def _clock(*times: float) -> Iterator[float]:
    yield from times
    raise AssertionError("the time was asked for too often")


def test_a_terminal_shows_a_line_that_goes_away(caplog: pytest.LogCaptureFixture) -> None:
    stream, ticks = _Terminal(), _clock(0, 0, 0.2, 0.5, 0.55, 1.0, 2.0)
    with loading_weights(FIRST, 1 << 30, stream=stream, clock=lambda: next(ticks)) as advance:
        for _ in range(4):
            advance(1 << 28)
    drawn = stream.getvalue().split("\r\x1b[K")
    assert drawn == [
        "",
        "loading weights [########--------] 512 MiB of 1.00 GiB\r",
        "loading weights [################] 1.00 GiB of 1.00 GiB\r",
        "",
    ]
    assert caplog.messages == ["loaded 1.00 GiB of weights in 2.0 s, 512 MiB/s"]


def test_a_failure_leaves_no_bar_behind(caplog: pytest.LogCaptureFixture) -> None:
    stream, ticks = _Terminal(), _clock(0, 0, 1)

    def load() -> None:
        with loading_weights(FIRST, 100, stream=stream, clock=lambda: next(ticks)) as advance:
            advance(50)
            raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        load()
    assert stream.getvalue().endswith("\r\x1b[K")
    assert not caplog.messages


def test_a_terminal_that_has_gone_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    stream, ticks = _Gone(), _clock(0, 0, 1, 1)
    with loading_weights(FIRST, 100, stream=stream, clock=lambda: next(ticks)) as advance:
        advance(100)
    assert caplog.messages == ["loaded 100 B of weights in 1.0 s, 100 B/s"]


def test_what_loads_at_once_shows_nothing() -> None:
    stream, ticks = _Terminal(), _clock(0, 0, 0.1, 0.1)
    with loading_weights(FIRST, 100, stream=stream, clock=lambda: next(ticks)) as advance:
        advance(100)
    assert stream.getvalue() == ""


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
    ticks = _clock(0, 4)
    with loading_weights(place, 3 << 20, stream=stream, clock=lambda: next(ticks)) as advance:
        advance(3 << 20)
    assert stream.getvalue() == ""
    assert caplog.messages == ["loaded 3.00 MiB of weights in 4.0 s, 768 KiB/s"]
