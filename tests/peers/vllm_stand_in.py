# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin that stands in for vLLM in its own tests: its helpers start Pagoda, its internals are absent.

vLLM's tests import the package and `tests.utils`. Neither is loaded: `tests.utils` is this module's
`Utilities`, and a name of vLLM is an `Absent`, which skips whatever test calls it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import requests
from absent import Absent, not_applicable
from launcher import LOGS, MODEL, NOT_APPLICABLE

SUITE = "PAGODA_PEERS_SUITE"
START_S = 60.0
_LAUNCHER = Path(__file__).with_name("launcher.py")
_REPLACED = ("tests.utils", "tests.conftest")
"""Modules of the suite itself that need vLLM and its dependencies."""


def tiny() -> str:
    """The directory of the model that serves, the embedded one unless another was named."""
    import pagoda.checkpoints

    return os.environ.get(MODEL) or str(Path(pagoda.checkpoints.__file__).parent / "pagoda_tiny")


class _Platform:
    """A platform that has what tests ask for, but for other vendors' devices."""

    device_type = "cuda"

    def __getattr__(self, name: str) -> Callable[..., bool]:
        return lambda *_, **__: name in ("is_cuda", "is_cuda_alike")


_DEFAULTS = {"VLLM_MAX_N_SEQUENCES": 128}
"""Settings of vLLM whose values tests go beyond, as Pagoda has them."""


class _Module(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if self.__name__ == "vllm.envs":
            return os.environ.get(name, _DEFAULTS.get(name))
        return Absent(f"{self.__name__}.{name}")


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:  # noqa: ARG002
        if name in _REPLACED or name.split(".")[0] == "vllm":
            return ModuleSpec(name, self, is_package=name not in _REPLACED)
        return None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        is_conftest = spec.name == "tests.conftest"
        module = types.ModuleType(spec.name) if is_conftest else _Module(spec.name)
        if spec.name in _REPLACED:  # pytest compares the place of a conftest
            module.__file__ = os.path.join(os.environ[SUITE], *spec.name.split(".")) + ".py"
        for name, value in _KNOWN.get(spec.name, {}).items():
            setattr(module, name, value)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RemoteOpenAIServer:
    """Pagoda's server, by the interface of vLLM's class of this name."""

    DUMMY_API_KEY = "token-abc123"

    def __init__(
        self,
        model: str,
        vllm_serve_args: Sequence[str],
        *_: Any,
        env_dict: dict[str, str] | None = None,
        auto_port: bool = True,
        override_hf_configs: dict[str, Any] | None = None,  # noqa: ARG002
        **__: Any,
    ) -> None:
        arguments = [str(argument) for argument in vllm_serve_args]
        if auto_port:
            self.port = free_port()
            arguments += ["--port", str(self.port)]
        else:
            self.port = int(arguments[arguments.index("--port") + 1])
        self.host = "127.0.0.1"
        self.uds = None
        self.show_hidden_metrics = False
        key = (env_dict or {}).get("VLLM_API_KEY")
        if key:
            arguments += ["--api-key", key]
        if (env_dict or {}).get("VLLM_ALLOW_RUNTIME_LORA_UPDATING"):
            arguments += ["--allow-lora-loading", tempfile.gettempdir()]
        self.proc = subprocess.Popen(
            [sys.executable, str(_LAUNCHER), "vllm", model, *arguments],
            env={**os.environ, **(env_dict or {})},
            start_new_session=True,
        )
        self._stack = ExitStack()
        self._stack.callback(self._stop)
        try:
            self._wait()
        except BaseException:
            self._stack.close()
            raise

    def _wait(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            code = self.proc.poll()
            if code == NOT_APPLICABLE:
                notes = sorted(
                    Path(os.environ[LOGS]).glob("not_applicable.*"), key=os.path.getmtime
                )
                not_applicable(notes[-1].read_text(encoding="utf-8"))
            if code is not None:
                raise RuntimeError(f"Pagoda ended with the exit code {code}")
            try:
                if requests.get(self.url_for("health"), timeout=5).status_code == 200:
                    return
            except requests.ConnectionError:
                pass
            time.sleep(0.1)
        raise RuntimeError("Pagoda did not start")

    def _stop(self) -> None:
        self.proc.kill()
        self.proc.wait()

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *_: Any) -> None:
        self._stack.close()

    @property
    def url_root(self) -> str:
        return f"http://{self.host}:{self.port}"

    def url_for(self, *parts: str) -> str:
        return "/".join((self.url_root, *parts))

    def _client(self, kind: Any, base_url: str, options: dict[str, Any]) -> Any:
        return kind(
            base_url=base_url,
            api_key=self.DUMMY_API_KEY,
            max_retries=0,
            **{"timeout": 60, **options},
        )

    def get_client(self, **options: Any) -> Any:
        import openai

        return self._client(openai.OpenAI, self.url_for("v1"), options)

    def get_async_client(self, **options: Any) -> Any:
        import openai

        return self._client(openai.AsyncOpenAI, self.url_for("v1"), options)

    def get_client_anthropic(self, **options: Any) -> Any:
        import anthropic

        return self._client(anthropic.Anthropic, self.url_root, options)

    def get_async_client_anthropic(self, **options: Any) -> Any:
        import anthropic

        return self._client(anthropic.AsyncAnthropic, self.url_root, options)


def _as_it_is(function: Any = None, **_: Any) -> Any:
    """A decorator, with or without arguments, that changes nothing."""
    return function if callable(function) else _as_it_is


def _skips(what: str) -> Callable[..., Any]:
    """A decorator with any arguments, with which a test is skipped."""

    def decorate(*_: Any, **__: Any) -> Any:
        return pytest.mark.skip(reason=f"{what} is part of the other server")

    return decorate


def _version() -> str:
    from pagoda.version import __version__

    return __version__


class _ModelConfig:
    """The size of the vocabulary is all that tests ask vLLM's configuration for."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.hf_text_config = self.hf_config = self
        self.vocab_size = self.get_vocab_size()

    def get_vocab_size(self) -> int:
        config = json.loads((Path(tiny()) / "config.json").read_text(encoding="utf-8"))
        return int(config["vocab_size"])


def _get_tokenizer(*_: Any, **__: Any) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny())


_ADAPTERS = ("lora", "self_cognition")
"""Parts of names of repositories that hold adapters."""


def _snapshot_download(repo_id: str, *_: Any, **__: Any) -> str:
    """The directory of the embedded model, or of an adapter for it that changes answers a little."""
    if not any(part in repo_id.lower() for part in _ADAPTERS):
        return tiny()
    from pagoda.checkpoints.resolve import load_model_config

    file = Path(__file__).parents[1] / "adapter_files.py"
    spec = importlib.util.spec_from_file_location("adapter_files", file)
    adapter_files = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(adapter_files)
    directory = Path(os.environ[LOGS]).parent / "adapter"
    config = load_model_config(tiny(), "auto")
    return str(adapter_files.save_adapter_of(config, directory, size=0.01))


def _getattr_iter(of: object, names: Sequence[str], default: Any) -> Any:
    """The first attribute of `names` that is there."""
    return next((getattr(of, name) for name in names if hasattr(of, name)), default)


def _check_stop_strings(
    text: str, _: int, stop: Sequence[str], is_included: bool
) -> tuple[str, int] | None:
    """The stop string that comes first in a text, and where the text ends."""
    places = sorted((text.find(it), it) for it in stop if it in text)
    if not places:
        return None
    place, found = places[0]
    return found, place + len(found) * is_included


def _load_tiny(load: Callable[[str], Any], *_: Any, **__: Any) -> Any:
    return load(tiny())


_KNOWN: dict[str, dict[str, Any]] = {
    "tests.utils": {
        "RemoteOpenAIServer": RemoteOpenAIServer,
        "RemoteLaunchRenderServer": RemoteOpenAIServer,
        "VLLM_PATH": Path(os.environ.get(SUITE, ".")),
        "ROCM_ENV_OVERRIDES": {},
        "ROCM_EXTRA_ARGS": [],
        "create_new_process_for_each_test": _as_it_is,
        "fork_new_process_for_each_test": _as_it_is,
        "spawn_new_process_for_each_test": _as_it_is,
        "single_gpu_only": _as_it_is,
        "multi_gpu_test": _skips("a test of several GPUs"),
        "multi_gpu_only": _skips("a test of several GPUs"),
        "large_gpu_test": _skips("a test of a large GPU"),
        "large_gpu_mark": lambda *_, **__: pytest.mark.skip(reason="part of the other server"),
    },
    "tests.conftest": {"LocalAssetServer": Absent("LocalAssetServer")},
    "vllm": {"__version__": _version()},
    "vllm.config": {"ModelSpec": _ModelConfig},
    "vllm.config.utils": {"getattr_iter": _getattr_iter},
    "vllm.v1.engine.detokenizer": {"check_stop_strings": _check_stop_strings},
    "vllm.version": {"__version__": _version(), "_prev_minor_version": _version},
    "vllm.platforms": {"current_platform": _Platform()},
    "vllm.tokenizers": {"get_tokenizer": _get_tokenizer},
    "vllm.transformers_utils.tokenizer": {"get_tokenizer": _get_tokenizer},
    "vllm.utils.network_utils": {"get_open_port": free_port},
}


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    sys.meta_path.insert(0, _Finder())
    import huggingface_hub
    import transformers

    for kind in (transformers.AutoTokenizer, transformers.AutoConfig):
        kind.from_pretrained = partial(_load_tiny, kind.from_pretrained)
    huggingface_hub.snapshot_download = _snapshot_download
    huggingface_hub.hf_hub_download = lambda *_, **__: not_applicable("a file of a hub")
