# SPDX-License-Identifier: Apache-2.0
"""Each plugin is one folder: without it everything else works as before."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

import pagoda
from pagoda.cli.server_process import server_process

PACKAGE = Path(pagoda.__file__).parent
PLUGINS = sorted(
    path.name for path in (PACKAGE / "plugins").iterdir() if (path / "__init__.py").exists()
)
NO_FINDER = (
    "import sys\n"
    "sys.meta_path[:] = [it for it in sys.meta_path if 'Redirecting' not in type(it).__name__]\n"
)
"""Lets an editable installation not be found before `PYTHONPATH`."""
ROUTES = (
    "import json, pagoda.cli.plugin_flags; from pagoda.api.routes import ROUTES; "
    "from pagoda.cli.main import build_app; build_app(); print(json.dumps(sorted(ROUTES)))"
)


def _lines_without(plugin: str) -> Iterator[str]:
    """The entry points of this installation but those of one plugin."""
    group = ""
    text = importlib.metadata.distribution("pagoda-llm").read_text("entry_points.txt") or ""
    for line in text.splitlines():
        group = line if line.startswith("[") else group
        if f"pagoda.plugins.{plugin}:" not in line and f"pagoda.plugins.{plugin}." not in line:
            yield line


@pytest.fixture
def house(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a plugin that programs of this test do not find."""
    plugin: str = request.param
    own = tmp_path / "pagoda"
    (own / "plugins").mkdir(parents=True)
    for source, target in ((PACKAGE, own), (PACKAGE / "plugins", own / "plugins")):
        for path in source.iterdir():
            if path.name not in ("plugins", plugin, "__pycache__"):
                (target / path.name).symlink_to(path)
    metadata = tmp_path / "pagoda_llm-0.1.0.dist-info"
    metadata.mkdir()
    told = importlib.metadata.distribution("pagoda-llm").read_text("METADATA") or ""
    (metadata / "METADATA").write_text(told, encoding="utf-8")
    (metadata / "entry_points.txt").write_text("\n".join(_lines_without(plugin)) + "\n")
    (tmp_path / "sitecustomize.py").write_text(NO_FINDER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return plugin


def _routes() -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", ROUTES], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


def test_plugins_are_those_of_the_entry_points() -> None:
    values = {
        point.value.split(":")[0].split(".")[2]
        for point in importlib.metadata.distribution("pagoda-llm").entry_points
        if point.value.startswith("pagoda.plugins.")
    }
    assert values == set(PLUGINS)


@pytest.mark.parametrize("house", PLUGINS, indirect=True)
def test_a_server_without_a_plugin_has_all_other_routes_and_answers(house: str) -> None:
    from pagoda.api.routes import PLUGINS as APIS
    from pagoda.api.routes import ROUTES as ALL

    gone = set(APIS[house].routes) if house in APIS else set()
    assert _routes() == ALL.keys() - gone
    workers = [] if house == "sim" else ["--executor", "sim"]
    with server_process([*workers, "--log-level", "warning"]) as server:
        body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4})
        asked = Request(
            f"{server.base_url}/v1/chat/completions",
            body.encode(),
            {"Content-Type": "application/json"},
        )
        with urlopen(asked, timeout=60) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 4
