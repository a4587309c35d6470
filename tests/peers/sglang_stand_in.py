# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin that stands in for SGLang in its own server tests: their helpers start Pagoda.

The tests import the package, whose helpers are in this module. What several of them share (`sglang.test.kits`) is
read from the checkout; any other name of SGLang is an `Absent`, which skips whatever test calls it.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
import types
import unittest
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import requests
from absent import Absent, not_applicable
from launcher import LOGS, NOT_APPLICABLE
from vllm_stand_in import START_S, SUITE, free_port, tiny

_LAUNCHER = Path(__file__).with_name("launcher.py")
_KITS = "sglang.test.kits."


def popen_launch_server(
    model: str,
    base_url: str,
    timeout: float = START_S,  # noqa: ARG001
    api_key: str | None = None,
    other_args: Sequence[Any] = (),
    env: dict[str, str] | None = None,
    **_: Any,
) -> subprocess.Popen[bytes]:
    """Pagoda's server, by the interface of SGLang's function of this name; returns when it is ready."""
    place = urlsplit(base_url)
    arguments = ["--model-path", model, "--host", "127.0.0.1", "--port", str(place.port)]
    arguments += ["--api-key", api_key] if api_key else []
    process = subprocess.Popen(
        [sys.executable, str(_LAUNCHER), "sglang", *arguments, *map(str, other_args)],
        env={**os.environ, **(env or {})},
        start_new_session=True,
    )
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        code = process.poll()
        if code == NOT_APPLICABLE:
            notes = sorted(Path(os.environ[LOGS]).glob("not_applicable.*"), key=os.path.getmtime)
            not_applicable(notes[-1].read_text(encoding="utf-8"))
        if code is not None:
            raise RuntimeError(f"Pagoda ended with the exit code {code}")
        try:
            if requests.get(f"{base_url}/health", timeout=5).status_code == 200:
                return process
        except requests.ConnectionError:
            pass
        time.sleep(0.1)
    process.kill()
    raise RuntimeError("Pagoda did not start")


class _Helpers(types.ModuleType):
    """`sglang.test.test_utils`: helpers, and names of models, of which any serves."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "DEFAULT_URL_FOR_TEST":
            self.DEFAULT_URL_FOR_TEST = f"http://127.0.0.1:{free_port()}"
            return self.DEFAULT_URL_FOR_TEST
        if name.startswith("DEFAULT_") and "MODEL" in name:
            return name.lower().replace("_", "-")
        if name.startswith("is_"):
            return lambda *_: False
        return _HELPERS.get(name, Absent(f"{self.__name__}.{name}"))


def _end(process: subprocess.Popen[bytes], *_: Any, **__: Any) -> None:
    process.kill()
    process.wait()


_HELPERS: dict[str, Any] = {
    "terminate_and_kill_process_tree": _end,
    "CustomTestCase": unittest.TestCase,
    "DEFAULT_TIMEOUT_FOR_SERVER_LAUNCH": START_S,
    "popen_launch_server": popen_launch_server,
}


class _Module(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name.startswith("is_"):
            return lambda *_: False
        if name.startswith("register_"):
            return lambda *_, **__: None
        return _KNOWN.get(name, Absent(f"{self.__name__}.{name}"))


def _kill_process_tree(pid: int, *_: Any, **__: Any) -> None:
    os.kill(pid, 9)
    os.waitpid(pid, 0)


def _get_tokenizer(*_: Any, **__: Any) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny())


_KNOWN: dict[str, Any] = {
    "kill_process_tree": _kill_process_tree,
    "get_tokenizer": _get_tokenizer,
}


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:  # noqa: ARG002
        if name.startswith(_KITS):
            file = Path(os.environ[SUITE], "python", *name.split(".")).with_suffix(".py")
            if file.is_file():
                return importlib.util.spec_from_file_location(name, file)
        if name.split(".")[0] == "sglang":
            return ModuleSpec(name, self, is_package=name != "sglang.test.test_utils")
        return None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        is_helpers = spec.name == "sglang.test.test_utils"
        return _Helpers(spec.name) if is_helpers else _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def pytest_configure() -> None:
    sys.meta_path.insert(0, _Finder())
