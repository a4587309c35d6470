# SPDX-License-Identifier: Apache-2.0
"""Plugins of other packages are found beside our own, and wrong ones are refused in a sentence."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.request import Request, urlopen

import psutil
import pytest

from pagoda.cli.server_process import server_process
from pagoda.errors import ConfigError
from pagoda.registry import load, load_all, registered

DOCS = Path(__file__).parents[2] / "docs" / "plugins.md"
GROUP = "pagoda.tested"


def install(directory: Path, package: str, points: dict[str, str], group: str = GROUP) -> None:
    """Puts a package with entry points into a directory that is searched for modules."""
    metadata = directory / f"{package}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = [f"{name} = {value}" for name, value in points.items()]
    (metadata / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_objects_are_found_by_name_in_order(directory: Path) -> None:
    install(directory, "one", {"b": "json:loads", "a": "json:dumps"})
    install(directory, "same", {"b": "json:loads"})
    assert list(load_all(GROUP, type(json.dumps))) == ["a", "b"]
    assert load(GROUP, "a", type(json.dumps)) is json.dumps
    assert [point.value for point in registered(GROUP)["b"]] == ["json:loads"]


@pytest.mark.parametrize(
    ("points", "sentence"),
    [
        ({}, "nothing is registered as pagoda.tested, as Pagoda was installed by an older version"),
        (
            {"x": "no_such_module:A"},
            r"x of pagoda.tested, no_such_module:A, cannot be imported \(Mo",
        ),
        (
            {"x": "json:nothing"},
            r"x of pagoda.tested, json:nothing, cannot be imported \(Attribute",
        ),
        ({"x": "json:dumps"}, "x of pagoda.tested, json:dumps, is no Path"),
    ],
)
def test_what_cannot_be_taken_is_named(
    directory: Path, points: dict[str, str], sentence: str
) -> None:
    install(directory, "odd", points)
    with pytest.raises(ConfigError, match=sentence):
        load_all(GROUP, Path)
    with pytest.raises(ConfigError, match=r"y is not registered as pagoda.tested"):
        load(GROUP, "y", Path)


def test_two_objects_of_one_name_are_refused(directory: Path) -> None:
    install(directory, "one", {"x": "json:dumps"})
    install(directory, "two", {"x": "json:loads"})
    with pytest.raises(
        ConfigError, match=r"x of pagoda.tested is json:dumps and json:loads; leave"
    ):
        load_all(GROUP, Path)


def test_the_plugin_of_the_documents_serves_its_route(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = DOCS.read_text(encoding="utf-8")
    [program] = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    [points] = re.findall(r"^```toml\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    [(name, value)] = re.findall(r'^(\w+) = "([\w:]+)"$', points, re.MULTILINE)
    (tmp_path / "pagoda_hello").mkdir()
    (tmp_path / "pagoda_hello" / "__init__.py").write_text(program)
    install(tmp_path, "hello", {name: value}, "pagoda.apis")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    with (
        server_process(["--executor", "sim", "--log-level", "warning"]) as server,
        urlopen(f"{server.base_url}/hello", timeout=60) as answer,
    ):
        assert json.load(answer) == {"hello": "synthetic"}


@pytest.mark.parametrize(
    ("words", "group", "program", "sentence"),
    [
        (
            ["serve", "--port", "0", "--executor", "sim"],
            "pagoda.apis",
            "from pagoda.api.plugin import ApiPlugin as P\nIT = P(routes={'/health': {}})\n",
            "the API odd has the routes /health, which others have.",
        ),
        (
            ["bench"],
            "pagoda.commands",
            "from pagoda.cli.command import Command as C, CommandPlugin as P\n"
            "IT = P({'serve': C('No.', 'json:dumps')})\n",
            "odd has the commands serve, which others have.",
        ),
        (
            ["--help"],
            "pagoda.commands",
            "1 / 0\n",
            "odd of pagoda.commands, odd_plugin:IT, cannot be imported",
        ),
    ],
)
def test_a_plugin_that_takes_what_others_have_is_refused(
    tmp_path: Path, words: list[str], group: str, program: str, sentence: str
) -> None:
    (tmp_path / "odd_plugin.py").write_text(program)
    install(tmp_path, "odd", {"odd": "odd_plugin:IT"}, group)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    }
    ended = subprocess.run(
        [sys.executable, "-m", "pagoda", *words],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2
    assert sentence in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_server_starts_beside_commands_that_are_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "odd_plugin.py").write_text("1 / 0\n")
    install(tmp_path, "odd", {"odd": "odd_plugin:IT"}, "pagoda.commands")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    with (
        server_process(["--executor", "sim", "--log-level", "warning"]) as server,
        urlopen(f"{server.base_url}/health", timeout=60) as answer,
    ):
        assert answer.status == 200


EXECUTOR = """
from pagoda.executor.launcher import LocalLauncher
from pagoda.executor.plugin import ExecutorPlugin

NEAR = ExecutorPlugin(lambda config, clock, open_group: open_group(LocalLauncher(), "tcp://127.0.0.1"))
"""


def test_an_executor_of_another_package_runs_the_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "near.py").write_text(EXECUTOR)
    install(tmp_path, "near", {"near": "near:NEAR"}, "pagoda.executors")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    with server_process(["--executor", "near", "--log-level", "warning"]) as server:
        body = json.dumps({"prompt": "17 + 25 =", "max_tokens": 4}).encode()
        asked = Request(
            f"{server.base_url}/v1/completions", body, {"Content-Type": "application/json"}
        )
        with urlopen(asked, timeout=60) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] > 0


BAD_END = """
from pagoda.api.plugin import ApiPlugin

class State:
    def __init__(self, service, plugins): ...
    def start(self): ...
    async def stop(self): raise RuntimeError("cannot stop")
    async def close(self): raise RuntimeError("cannot close")

IT = ApiPlugin(state=State)
"""


def test_a_plugin_that_ends_badly_keeps_nothing_else_from_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bad_end.py").write_text(BAD_END)
    install(tmp_path, "bad-end", {"bad-end": "bad_end:IT"}, "pagoda.apis")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    with open(tmp_path / "log", "w+", encoding="utf-8") as log:
        with server_process(["--executor", "sim"], stderr=log.fileno()) as server:
            pid = server.pid
        log.seek(0)
        lines = log.read()
    assert not psutil.pid_exists(pid)
    assert lines.count("a plugin did not end well") == 3, lines  # `stop` is called twice
    assert "RuntimeError: cannot close" in lines
