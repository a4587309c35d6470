# SPDX-License-Identifier: Apache-2.0
"""Each plugin is one folder: without it everything else works as before."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

import pagoda
from pagoda.cli.server_process import server_process

PACKAGE = Path(pagoda.__file__).parent
PLUGINS = sorted(
    path.name for path in (PACKAGE / "plugins").iterdir() if (path / "__init__.py").exists()
)
QUICK_PLUGINS = [
    "anthropic",
    "llamacpp",
    "ollama",
    "responses",
    "scoring",
    "sglang",
    "trace",
    "transcription",
    "vllm",
]
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


@pytest.mark.parametrize("house", ["disk_tier"], indirect=True)
@pytest.mark.parametrize("words", [["kv", "ls", "."], ["serve", "--kv-disk-path", "kv"]])
@pytest.mark.usefixtures("house")
def test_commands_and_flags_go_with_their_plugin(words: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pagoda", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert f"Unknown {'command' if words[0] == 'kv' else 'option'}" in done.stderr
    assert done.stderr.count("\n") == 1


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


@pytest.mark.parametrize("house", sorted({*PLUGINS} - {"sim"}), indirect=True)
def test_neighbours_pass_their_tests_without_a_plugin(house: str, tmp_path: Path) -> None:
    """Some of the core, and the plugin behind it in the alphabet, of those with tests that are quick.

    Most tests compute with the plugin `sim`.
    """
    for name in ("tests", "benchmarks", "tools", "docs", "conftest.py", "pyproject.toml"):
        (tmp_path / name).symlink_to(PACKAGE.parent / name)
    neighbour = next((name for name in QUICK_PLUGINS if name > house), QUICK_PLUGINS[0])
    tests = [
        f"pagoda/plugins/{neighbour}/tests",
        "tests/api/test_app.py",
        "tests/kv/test_manager.py",
    ]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tier", "quick", *tests]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.parametrize("house", ["router"], indirect=True)
@pytest.mark.usefixtures("house")
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("route", "route"),
        ("serve --executor sim --join 127.0.0.1:5600", "--join"),
        ("serve --executor sim --advertise :5601", "--advertise with a port needs the plugin"),
    ],
)
def test_several_hosts_are_refused_without_the_router(words: str, sentence: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "pagoda", *words.split()],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2
    assert sentence in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("house", ["disaggregation"], indirect=True)
@pytest.mark.usefixtures("house")
@pytest.mark.parametrize(
    ("command", "flag"),
    [
        ("serve", "--role prefill"),
        ("serve", "--kv-transports shm"),
        ("serve", "--kv-port 5700"),
        ("serve", "--bootstrap-hosts 10.0.0.2"),
        ("route", "--bootstrap-hosts 10.0.0.2"),
    ],
)
def test_roles_are_refused_without_disaggregation(command: str, flag: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "pagoda", command, *flag.split()],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2
    assert f"Unknown option: {flag.split()[0]}." in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("house", ["disaggregation"], indirect=True)
@pytest.mark.usefixtures("house")
def test_bodies_that_ask_for_a_handoff_are_refused_without_disaggregation() -> None:
    with server_process(["--executor", "sim", "--log-level", "warning"]) as server:
        for fields in ({"kv_transfer_params": {"do_remote_decode": True}}, {"bootstrap_room": 7}):
            body = json.dumps({"prompt": "hi", "max_tokens": 1} | fields).encode()
            headers = {"Content-Type": "application/json"}
            asked = Request(f"{server.base_url}/v1/completions", body, headers)
            with pytest.raises(HTTPError) as refused:
                urlopen(asked, timeout=60)
            assert refused.value.code == 400
            assert "needs a server with the plugin disaggregation" in refused.value.read().decode()
