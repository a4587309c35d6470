# SPDX-License-Identifier: Apache-2.0
"""The conformance suite passes Pagoda's backends and the toy, and finds what is wrong with others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from pagoda.backend.operations import OPERATIONS
from pagoda.cli.main import main
from pagoda.plugins.backend_check.suite import checks, open_subject, operation_checks, outcomes

TOY = Path(__file__).parents[4] / "tests" / "toy_backend"
CHECKS = {check.name: check for check in checks()}
_OF_KV = (
    "rotate_and_cache, attention",
    "KV formats and block sizes",
    "KV layout and store",
    "metadata ahead of steps",
    "KV store",
    "pagoda-tiny, answers",
)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.syspath_prepend(TOY)
    return "toy"


@pytest.fixture
def wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a package's backend, which `wrong_backend.chosen` makes wrong."""
    about = tmp_path / "wrong-1.dist-info"
    about.mkdir()
    about.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: wrong\nVersion: 1\n")
    about.joinpath("entry_points.txt").write_text("[pagoda.backends]\nwrong = wrong_entry:ENTRY\n")
    tmp_path.joinpath("wrong_entry.py").write_text(
        "from pagoda.devices import BackendEntry\nENTRY = BackendEntry('wrong_backend', 'wrong', 2)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(Path(__file__).parent)
    return "wrong"


def test_every_operation_is_checked() -> None:
    assert operation_checks().keys() == OPERATIONS.keys()
    assert [name for name, check in operation_checks().items() if check is None] == []


@pytest.mark.parametrize("check", CHECKS)
def test_own_backends_pass(backend: str, check: str) -> None:
    (outcome,) = outcomes(open_subject(backend), [CHECKS[check]])
    assert outcome.verdict == "ok", outcome
    assert "; lacks " not in outcome.detail, outcome


def test_the_toy_passes(toy: str) -> None:
    found = {outcome.check: outcome for outcome in outcomes(open_subject(toy))}
    failed = [outcome for outcome in found.values() if outcome.verdict == "FAILED"]
    assert failed == []
    assert found["pagoda-tiny, answers"].verdict == "ok"
    assert found["rotate_and_cache, attention"].verdict == "ok"
    two = found["pagoda-tiny, two devices of a rank"]
    assert (two.verdict, two.detail[:9]) == ("ok", "4 prompts")
    assert found["weights of int8"].detail == "the toy has weights of float32 only"
    source = (TOY / "pagoda_toy" / "backend.py").read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 300


def test_a_toy_whose_kv_lies_on_its_device_passes(toy: str) -> None:
    assert toy == "toy"
    chosen = [CHECKS[name] for name in _OF_KV]
    verdicts = {it.check: it.verdict for it in outcomes(open_subject("far"), chosen)}
    assert verdicts == dict.fromkeys(_OF_KV, "ok")


def test_a_right_store_that_copies_late_passes(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import wrong_backend

    monkeypatch.setitem(wrong_backend.BROKEN, "nothing", ("", {"store": wrong_backend.LateStore}))
    monkeypatch.setattr(wrong_backend, "chosen", "nothing")
    chosen = [CHECKS[name] for name in _OF_KV]
    found = list(outcomes(open_subject(wrong), chosen))
    assert [outcome for outcome in found if outcome.verdict != "ok"] == []


def _kinds() -> list[str]:
    sys.path.insert(0, str(Path(__file__).parent))
    from wrong_backend import BROKEN

    return list(BROKEN)


@pytest.mark.parametrize("kind", _kinds())
def test_what_is_wrong_is_found(wrong: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import wrong_backend

    monkeypatch.setattr(wrong_backend, "chosen", kind)
    expected, _ = wrong_backend.BROKEN[kind]
    (outcome,) = outcomes(open_subject(wrong), [CHECKS[expected]])
    assert outcome.verdict == "FAILED", outcome


@pytest.mark.parametrize(
    "check",
    [
        "rotate_and_cache, attention",
        "rotate_and_cache_latents, latent_attention",
        "KV layout and store",
        "metadata ahead of steps",
        "long contexts",
        "blocks behind windows",
    ],
)
def test_a_backend_is_checked_in_blocks_that_it_has(
    wrong: str, check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wrong_backend

    monkeypatch.setitem(wrong_backend.BROKEN, "nothing", ("", wrong_backend.BLOCKS_OF_128))
    monkeypatch.setattr(wrong_backend, "chosen", "nothing")
    (outcome,) = outcomes(open_subject(wrong), [CHECKS[check]])
    assert outcome.verdict == "ok", outcome


def test_the_command(
    toy: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TOY), prepend=":")
    assert main(["backend", "check", toy]) == 0
    *lines, summary = capfd.readouterr().out.splitlines()
    assert len(lines) == len(CHECKS)
    assert lines[0].startswith("ok      capabilities: toy (toy:0)")
    assert summary.endswith("0 failed")
    assert main(["backend", "check", "toyy"]) == 2
    error = capfd.readouterr().err
    assert "--backend must be one of auto, cpu, reference, " in error
    assert ", toy, got 'toyy'" in error


def test_a_failed_check_is_the_exit_status(wrong: str, tmp_path: Path) -> None:
    code = (
        "import sys, wrong_backend\n"
        "import pagoda.plugins.backend_check.suite as suite\n"
        "wrong_backend.chosen = 'a rank of a token'\n"
        "suite.checks = lambda: list(suite.sampling.FURTHER)\n"
        "sys.argv = ['check', 'wrong']\n"
        "from pagoda.plugins.backend_check.__main__ import main\n"
        "sys.exit(main())\n"
    )
    paths = f"{tmp_path}:{Path(__file__).parent}"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {paths.split(':')!r}\n{code}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "FAILED  score: score of 1 tokens has other ranks" in done.stdout
    assert wrong == "wrong"


PYPTO_DEVICE = Path(__file__).parents[4] / "tests" / "pypto_device"
_OF_WHOLE_MODELS = (
    "capabilities",
    "parts of models",
    "KV store",
    "pagoda-tiny, answers",
    "pagoda-tiny, memory of the device",
)


def test_a_backend_of_whole_models_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(PYPTO_DEVICE)
    names = (*_OF_WHOLE_MODELS, "linear", "rms_norm", "memory", "weights of bfloat16")
    chosen = [CHECKS[name] for name in names if name in CHECKS]
    found = {outcome.check: outcome for outcome in outcomes(open_subject("pypto"), chosen)}
    assert [found[name].verdict for name in _OF_WHOLE_MODELS] == ["ok"] * len(_OF_WHOLE_MODELS)
    assert "a sum is refused: this model computes add (node 0)" in found["parts of models"].detail
    assert {each.verdict for each in found.values()} == {"ok", "lacks"}
    assert found["rms_norm"].detail == "its programs are whole models"


def test_whole_models_that_are_parts_are_found() -> None:
    subject = open_subject("reference")
    capabilities = msgspec.structs.replace(subject.backend.capabilities, whole_models=True)
    subject.backend.capabilities = capabilities
    (outcome,) = outcomes(subject, [CHECKS["parts of models"]])
    assert str(outcome).startswith("FAILED  parts of models: it says that its programs are whole")
