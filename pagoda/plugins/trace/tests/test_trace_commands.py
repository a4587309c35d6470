# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import gzip
import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
from scripted_server import Life, serve

from pagoda.cli.main import main

HOSTILE = "<script>alert(1)</script>&\"'"
LIVES = [
    Life("one", 0.0, prompt_tokens=64, output_tokens=6),
    Life(HOSTILE, 5.0, prompt_tokens=8, output_tokens=4, preempted_for=30.0),
]


@pytest.fixture
def fragments(tmp_path: Path) -> Path:
    for process in serve(LIVES, worker_dies=True):
        process.write(tmp_path)
    return tmp_path


def test_merge_makes_one_file_and_says_what_is_in_it_and_what_is_not(
    fragments: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", "merge", str(fragments)]) == 0
    path = fragments / "trace.json"
    said = capsys.readouterr()
    assert said.out.startswith(f"{path}: 4 processes, 2 requests followed, 0.154 s, ")
    assert said.err == ""
    packed = fragments / "packed.json.gz"
    assert main(["trace", "merge", str(fragments), "--output", str(packed)]) == 0
    assert json.loads(gzip.decompress(packed.read_bytes())) == json.loads(path.read_bytes())
    (broken,) = fragments.glob("*frontend*")
    broken.write_bytes(broken.read_bytes()[:-20])
    assert main(["trace", "merge", str(fragments)]) == 0
    assert f"{broken.name}: its last line is cut off" in capsys.readouterr().err


def test_report_says_where_the_time_went(
    fragments: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", "report", str(fragments), "--bandwidth", "10", "--flops", "0.1"]) == 0
    said = capsys.readouterr().out
    assert "2 requests" in said
    assert "preempted once: 30 ms until it ran again" in said
    lines = [line.split() for line in said.splitlines()]
    assert ["linear", "16", "ms", "50.0%", "1.5", "15%", "25.1", "25%"] in lines


def test_report_measures_the_limits_of_this_machine(
    fragments: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from pagoda.cli.machine_facts import Bandwidth
    from pagoda.plugins.trace import commands as trace

    measured = Bandwidth(15e9, 16e9, threads=2, passes=1, buffer_bytes=1)
    monkeypatch.setattr(trace, "measure_read_bandwidth", lambda _threads: measured)
    assert main(["trace", "report", str(fragments), "--limits"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["linear", "16", "ms", "50.0%", "1.5", "10%", "25.1"] in lines


class _Page(HTMLParser):
    """Parts of a page, and files that it would load."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.loaded: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.loaded += [f"{name}={value}" for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_needs_nothing_else_and_escapes_what_clients_say(
    fragments: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", "report", str(fragments), "--html", str(fragments / "no" / "x")]) == 2
    assert "--html" in capsys.readouterr().err
    path = fragments / "report.html"
    assert main(["trace", "report", str(fragments), "--html", str(path)]) == 0
    source = path.read_text()
    page = _Page()
    page.feed(source)
    assert page.loaded == []
    assert "script" not in page.tags
    assert {"svg", "table", "meta"} <= page.tags
    assert "url(" not in source
    assert "@import" not in source
    assert HOSTILE in page.text
    assert "preempted once: 30 ms until it ran again" in page.text
