"""The backend is the best that there is, unless a flag says otherwise; what is used is said, and why."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pagoda.backend.cpu import native
from pagoda.backend.cpu.backend import CpuBackend
from pagoda.backend.reference.backend import ReferenceBackend
from pagoda.errors import ConfigError
from pagoda.worker.backends import choose_backend


def test_auto_takes_the_kernels(backend: str) -> None:
    chosen, line = choose_backend(backend)
    assert isinstance(chosen, CpuBackend if backend == "cpu" else ReferenceBackend)
    assert line.startswith("cpu (avx" if backend == "cpu" else "reference on cpu, ")
    if backend == "cpu":
        assert choose_backend("auto")[1] == line


def test_without_kernels_auto_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pagoda.backend._native", None)
    chosen, line = choose_backend("auto")
    assert isinstance(chosen, ReferenceBackend)
    assert "not the cpu backend: the kernels were not built when Pagoda was installed" in line
    with pytest.raises(ConfigError, match="--backend cpu is not available: the kernels were not"):
        choose_backend("cpu")


def test_a_cpu_without_the_instructions(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """Without AVX2 `auto` goes without the kernels; an instruction set that is asked for must be there."""
    if backend != "cpu":
        pytest.skip("needs the kernels")
    monkeypatch.setenv(native.INSTRUCTION_SET_ENV, "mmx")
    with pytest.raises(ConfigError, match="PAGODA_CPU_ISA must be one of avx2"):
        choose_backend("auto")
    monkeypatch.setattr("pagoda.backend._native.instruction_sets", lambda: [])
    assert "not the cpu backend: this CPU has no AVX2" in choose_backend("auto")[1]
    with pytest.raises(ConfigError, match="this CPU has no AVX2"):
        choose_backend("cpu")


def test_other_names_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"--backend must be one of auto, cpu, reference.*, got 'x'"
    ):
        choose_backend("x")


def test_the_line_that_doctor_prints() -> None:
    command = [sys.executable, "-m", "pagoda.worker.backends"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    line = choose_backend("auto")[1]
    assert done.stdout.splitlines()[-1].startswith(line[: line.index(", ")])


def test_every_backend_that_is_installed_has_a_line() -> None:
    command = [sys.executable, "-m", "pagoda.worker.backends"]
    *lines, _ = subprocess.run(
        command, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert lines[1].startswith("reference: reference on cpu, ")
    assert lines[0].startswith("cpu: ")
