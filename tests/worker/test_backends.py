# SPDX-License-Identifier: Apache-2.0
"""The backend is the best that there is, unless a flag says otherwise; what is used is said, and why."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from driver import load
from family_models import FAMILIES, make_model
from msgspec.structs import replace

from pagoda.backend.base import UnsupportedError
from pagoda.backend.cpu import native
from pagoda.backend.cpu.backend import CpuBackend
from pagoda.backend.reference.backend import ReferenceBackend
from pagoda.checkpoints.config_json import parse_model_config, read_model_config
from pagoda.errors import ConfigError
from pagoda.model import decoder
from pagoda.model.needed_operations import needed_operations
from pagoda.worker.backends import check_model, choose_backend, main


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


def _shape(architecture: str) -> dict[str, Any]:
    """Values of config.json of a small model."""
    shape: dict[str, Any] = {
        "architectures": [architecture],
        "vocab_size": 32,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    if architecture == "Lfm2ForCausalLM":
        shape["layer_types"] = ["conv", "full_attention"]
    return shape


@pytest.mark.parametrize(
    ("architecture", "fields", "message"),
    [
        (
            "Qwen3MoeForCausalLM",
            {"num_experts": 1025},
            "at most 1024 experts in a layer .num_experts, .* of config.json., but the model has 1025",
        ),
        (
            "Lfm2ForCausalLM",
            {"conv_L_cache": 17},
            "at most 16 tokens under a convolution .conv_L_c",
        ),
        ("Qwen3_5ForCausalLM", {"linear_conv_kernel_dim": 17}, "at most 16 tokens .*el_dim, mamba"),
        ("Qwen3_5ForCausalLM", {"linear_key_head_dim": 260}, "at most 256 elements .*has 260; ch"),
        ("Qwen3_5ForCausalLM", {"linear_key_head_dim": 6}, "a multiple of 4 elements in a key of"),
        ("MambaForCausalLM", {"state_size": 257}, "at most 256 elements in a state of a Mamba"),
    ],
)
def test_models_that_kernels_have_no_room_for(
    architecture: str, fields: dict[str, Any], message: str, backend: str
) -> None:
    shape = _shape(architecture)
    chosen, _ = choose_backend(backend)
    check_model(parse_model_config(shape, source="shape"), chosen)
    spec = parse_model_config({**shape, **fields}, source="shape")
    if backend == "reference":
        check_model(spec, chosen)
        return
    with pytest.raises(UnsupportedError, match=rf"^cpu .*{message}"):
        check_model(spec, chosen)


class _Lacking:
    """A backend that lacks some operations."""

    arithmetic = "npu"

    def __init__(self, *lacking: str) -> None:
        whole = choose_backend("reference")[0].capabilities
        self.capabilities = replace(whole, lacks_operations=lacking)


@pytest.mark.parametrize(
    ("architecture", "operation"),
    [
        ("Qwen3MoeForCausalLM", "experts"),
        ("DeepseekV3ForCausalLM", "latent_attention"),
        ("Lfm2ForCausalLM", "short_conv"),
        ("Qwen3_5ForCausalLM", "gated_delta"),
        ("MambaForCausalLM", "selective_scan"),
        ("CohereForCausalLM", "layer_norm"),
    ],
)
def test_models_with_operations_that_a_backend_lacks(architecture: str, operation: str) -> None:
    lacking: Any = _Lacking(operation)
    spec = parse_model_config(_shape(architecture), source="shape")
    wanted = f"^npu lacks {operation}, which this model needs; choose another --backend.$"
    with pytest.raises(UnsupportedError, match=wanted):
        check_model(spec, lacking)
    check_model(parse_model_config(_shape("LlamaForCausalLM"), source="shape"), lacking)


@pytest.mark.parametrize("name", FAMILIES)
def test_operations_are_known_before_a_model_is_loaded(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the recorded graph, but for those that are in every graph."""
    recorded: set[str] = set()
    monkeypatch.setattr(decoder, "check_operations", lambda ops, *_: recorded.update(ops))
    make_model(name).save_pretrained(tmp_path)
    load(tmp_path, dtype="float32", max_model_len=64, backend="reference")
    assert needed_operations(read_model_config(tmp_path)) == recorded - {
        *("embedding", "linear", "add", "select_rows")
    }


def test_doctor_is_told_of_a_model_that_is_too_large(tmp_path: Path, backend: str) -> None:
    if backend != "cpu":
        pytest.skip("needs the kernels")
    values = {**_shape("Qwen3MoeForCausalLM"), "num_experts": 1025}
    (tmp_path / "config.json").write_text(json.dumps(values))
    command = [
        sys.executable,
        "-m",
        "pagoda.worker.backends",
        str(tmp_path),
        "auto",
        "auto",
        "none",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert re.fullmatch("cpu .* computes at most 1024 experts .* the model has 1025; .*", line)


def test_doctor_hears_why_amx_is_not_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], backend: str
) -> None:
    if backend != "cpu":
        pytest.skip("needs the kernels")
    module = native.load_native()
    monkeypatch.setattr(module, "has_amx", lambda: True)
    for obstacle in ("the kernel refuses AMX's tiles", ""):
        monkeypatch.setattr(module, "amx_obstacle", lambda obstacle=obstacle: obstacle)
        main([])
        line = next(it for it in capsys.readouterr().out.splitlines() if it.startswith("cpu: "))
        assert line.endswith(f" (without AMX: {obstacle})") == bool(obstacle)
