from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pagoda.api.server import ProfileConfig
from pagoda.cli import main as command
from pagoda.cli.bench.serve import RequestOptions
from pagoda.cli.serve import ProfileOptions
from pagoda.errors import ConfigError, EngineDeadError
from pagoda.frontend.engine_options import EngineOptions, ExecutorOptions
from pagoda.telemetry.tracer import TraceLevel
from pagoda.version import __version__

Calls = list[dict[str, object]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Runs `pagoda bench serve` up to the point where it would send requests; collects its flags."""
    seen: Calls = []

    def record(options: RequestOptions, seed: int) -> list[object]:
        seen.append({"requests": options, "seed": seed})
        raise ConfigError("stop here.")

    monkeypatch.setattr(RequestOptions, "samples", record)
    return seen


def _requests(calls: Calls) -> RequestOptions:
    [call] = calls
    options = call["requests"]
    assert isinstance(options, RequestOptions)
    return options


def _flags(directory: Path, text: str) -> Path:
    path = directory / "flags.yaml"
    path.write_text(text)
    return path


def test_flag_wins_over_environment_over_file_over_default(
    calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ["num-prompts: 1", "random_input_len: 1", "random_output_len: 1", "seed: 7"]
    lines += ["ignore-eos: false", "dataset-name: sharegpt"]
    config = _flags(tmp_path, "\n".join(lines))
    monkeypatch.setenv("PAGODA_NUM_PROMPTS", "2")
    monkeypatch.setenv("PAGODA_RANDOM_INPUT_LEN", "2")
    command.main(["bench", "serve", "--config", str(config), "--num-prompts", "3"])
    options = _requests(calls)
    assert options.num_prompts == 3
    assert options.random_input_len == 2
    assert options.random_output_len == 1
    assert options.random_prefix_len == 0
    assert options.ignore_eos is False
    assert calls[0]["seed"] == 7
    assert options.dataset == "sharegpt", "under a name that users of others know"


def test_the_config_file_may_be_named_in_the_environment(
    calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = _flags(tmp_path, "num_prompts: 4\n")
    monkeypatch.setenv("PAGODA_CONFIG", str(config))
    command.main(["bench", "serve"])
    assert _requests(calls).num_prompts == 4


def test_an_empty_config_file_and_empty_values_change_nothing(calls: Calls, tmp_path: Path) -> None:
    config = _flags(tmp_path, "num_prompts:\n")
    command.main(["bench", "serve", "--config", str(config)])
    assert _requests(calls).num_prompts == 100


@pytest.mark.parametrize("source", ["flag", "environment", "file"])
def test_names_that_users_of_vllm_know_are_known(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    seen = _engine_of_serve(monkeypatch, ["--executor", "local", *arguments])
    assert (seen.memory_utilization, seen.num_kv_blocks) == (0.25, 77)


def _engine_of_serve(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> EngineOptions:
    """Runs `pagoda serve` up to the point where it would look for its model."""
    seen = []

    def stop(_: ExecutorOptions, engine: EngineOptions, *__: object) -> None:
        seen.append(engine)
        raise ConfigError("stop here.")

    monkeypatch.setattr(ExecutorOptions, "resolve", stop)
    monkeypatch.setattr("pagoda.cli.serve.hold_lifeline", lambda: None)
    assert command.main(["serve", *arguments]) == 2
    [engine] = seen
    return engine


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
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[ProfileOptions] = []

    def stop(options: ProfileOptions) -> None:
        seen.append(options)
        raise ConfigError("stop here.")

    monkeypatch.setattr(ProfileOptions, "config", stop)
    monkeypatch.setattr(f"pagoda.cli.{name}.hold_lifeline", lambda: None)
    arguments = ["--profile", "kernel", "--profile-dir", "traces"]
    if name == "route":
        (tmp_path / "key").write_text("x" * 32)
        arguments += ["--cluster-key-file", str(tmp_path / "key")]
    assert command.main([name, *arguments]) == 2
    assert seen == [ProfileOptions(profile="kernel", profile_dir=Path("traces"))]


def test_where_traces_go_unless_something_else_is_said() -> None:
    assert ProfileOptions().config() == ProfileConfig(Path("pagoda-trace"), None)
    assert ProfileOptions(profile="verbose").config().level is TraceLevel.VERBOSE
