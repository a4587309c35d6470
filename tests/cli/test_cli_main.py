# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagoda.cli import main as command
from pagoda.cli.options import ProfileOptions
from pagoda.errors import ConfigError, EngineDeadError
from pagoda.llm.engine_options import ExecutorOptions
from pagoda.plugins.bench.serve import RequestOptions
from pagoda.telemetry.tracer import ProfileConfig, TraceLevel
from pagoda.version import __version__

Collect = Callable[[type, str], list[tuple[Any, ...]]]


@pytest.fixture
def stop_at(monkeypatch: pytest.MonkeyPatch) -> Collect:
    """Ends commands where they call a method; gives the arguments of these calls."""

    def stop_at(owner: type, method: str) -> list[tuple[Any, ...]]:
        seen = []

        def stop(*arguments: object) -> None:
            seen.append(arguments)
            raise ConfigError("stop here.")

        monkeypatch.setattr(owner, method, stop)
        for name in ("cli.serve", "plugins.router.command"):
            monkeypatch.setattr(f"pagoda.{name}.hold_lifeline", lambda: None)
        return seen

    return stop_at


def _flags(directory: Path, text: str) -> Path:
    path = directory / "flags.yaml"
    path.write_text(text)
    return path


def test_flag_wins_over_environment_over_file_over_default(
    stop_at: Collect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = stop_at(RequestOptions, "samples")
    lines = ["num-prompts: 1", "random_input_len: 1", "random_output_len: 1", "seed: 7"]
    lines += ["ignore-eos: false", "dataset-name: sharegpt"]
    config = _flags(tmp_path, "\n".join(lines))
    monkeypatch.setenv("PAGODA_NUM_PROMPTS", "2")
    monkeypatch.setenv("PAGODA_RANDOM_INPUT_LEN", "2")
    command.main(["bench", "serve", "--config", str(config), "--num-prompts", "3"])
    [(options, seed)] = seen
    assert (options.num_prompts, options.random_input_len, options.random_output_len) == (3, 2, 1)
    assert (options.random_prefix_len, options.ignore_eos, seed) == (0, False, 7)
    assert options.dataset == "sharegpt", "under a name that users of others know"


def test_the_config_file_may_be_named_in_the_environment(
    stop_at: Collect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = stop_at(RequestOptions, "samples")
    config = _flags(tmp_path, "num_prompts: 4\n")
    monkeypatch.setenv("PAGODA_CONFIG", str(config))
    command.main(["bench", "serve"])
    assert [options.num_prompts for options, _ in seen] == [4]


def test_empty_values_of_a_config_file_change_nothing(stop_at: Collect, tmp_path: Path) -> None:
    seen = stop_at(RequestOptions, "samples")
    config = _flags(tmp_path, "num_prompts:\n")
    command.main(["bench", "serve", "--config", str(config)])
    assert [options.num_prompts for options, _ in seen] == [100]


@pytest.mark.parametrize("source", ["flag", "environment", "file"])
def test_names_that_users_of_vllm_know_are_known(
    source: str, stop_at: Collect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = []
    if source == "flag":
        arguments = ["--gpu-memory-utilization", "0.25", "--num-gpu-blocks-override", "77"]
    elif source == "environment":
        monkeypatch.setenv("PAGODA_GPU_MEMORY_UTILIZATION", "0.25")
        monkeypatch.setenv("PAGODA_NUM_GPU_BLOCKS_OVERRIDE", "77")
    else:
        text = "gpu-memory-utilization: 0.25\nnum_gpu_blocks_override: 77\n"
        arguments = ["--config", str(_flags(tmp_path, text))]
    seen = stop_at(ExecutorOptions, "resolve")
    assert command.main(["serve", "--executor", "local", *arguments]) == 2
    [(_, engine, *_)] = seen
    assert (engine.memory_utilization, engine.num_kv_blocks) == (0.25, 77)


@pytest.mark.parametrize(
    ("error", "code"),
    [(ConfigError("told."), 2), (EngineDeadError("told."), 1), (KeyboardInterrupt(), 130)],
)
def test_every_end_has_its_exit_code(
    error: BaseException,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("pagoda.cli.serve.serve_api", fail)
    monkeypatch.setattr("pagoda.cli.serve.hold_lifeline", lambda: None)
    assert command.main(["serve", "--executor", "sim"]) == code
    said = "" if isinstance(error, KeyboardInterrupt) else "pagoda: told.\n"
    assert capsys.readouterr().err == said


def test_version_and_module_name() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pagoda", "--version"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout.strip()) == (0, __version__)


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys; from pagoda.cli.main import main; main(['--help']);"
        "heavy = {'torch', 'aiohttp', 'zmq', 'tokenizers', 'transformers', 'yaml'};"
        "sys.exit(', '.join(heavy & set(sys.modules)) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    for name in ("serve", "generate", "chat", "bench", "doctor", "demo"):
        assert name in done.stdout


def test_a_reader_that_goes_away_is_no_error() -> None:
    done = subprocess.run(
        [
            "/bin/sh",
            "-c",
            'for i in 1 2 3 4 5; do "$0" -m pagoda bench serve --help || exit 9; done | true',
            sys.executable,
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["serve", "route"])
def test_servers_may_be_traced_from_their_start(
    name: str, stop_at: Collect, tmp_path: Path
) -> None:
    seen = stop_at(ProfileOptions, "config")
    arguments = ["--profile", "kernel", "--profile-dir", "traces"]
    if name == "route":
        (tmp_path / "key").write_text("x" * 32)
        arguments += ["--cluster-key-file", str(tmp_path / "key")]
    assert command.main([name, *arguments]) == 2
    assert seen == [(ProfileOptions(profile="kernel", profile_dir=Path("traces")),)]


def test_where_traces_go_unless_something_else_is_said() -> None:
    assert ProfileOptions().config() == ProfileConfig(Path("pagoda-trace"), None)
    assert ProfileOptions(profile="verbose").config().level is TraceLevel.VERBOSE
