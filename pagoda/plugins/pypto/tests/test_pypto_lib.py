# SPDX-License-Identifier: Apache-2.0
"""The adapter to pypto-lib, over a checkout and a PyPTO that this test writes: published arguments, no kernels."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pagoda.devices import BackendUnavailableError, DeviceSet
from pagoda.plugins.pypto.backend import open_backend
from pagoda.plugins.pypto.contract import read_manifest
from pagoda.plugins.pypto.library import open_library
from pagoda.plugins.pypto.pypto_lib import LIBRARY

PREFILL = [
    "input_ids",
    "seq_lens",
    "chunk_lens",
    "chunk_offsets",
    "input_rms_weight",
    "wq",
    "wk",
    "wv",
    "q_norm_weight",
    "k_norm_weight",
    "rope_cos",
    "rope_sin",
    "block_table",
    "slot_mapping",
    "k_cache",
    "v_cache",
    "wo",
    "w_gate",
    "w_up",
    "w_down",
    "post_rms_weight",
    "final_norm_weight",
    "lm_head_weight",
    "embed_weight",
    "out",
]
DECODE = [
    "input_rms_weight",
    "wq",
    "wk",
    "wv",
    "q_norm_weight",
    "k_norm_weight",
    "seq_lens",
    "block_table",
    "slot_mapping",
    "rope_cos",
    "rope_sin",
    "k_cache",
    "v_cache",
    "wo",
    "w_gate",
    "w_up",
    "w_down",
    "post_rms_weight",
    "final_norm_weight",
    "lm_head_weight",
    "out",
    "embed_weight",
    "sampled_ids_in",
    "sampled_ids",
    "next_hidden",
]
TOPK = ["logits", "sampling_control", "topk_values", "topk_indices"]
"""As the HOST functions of pypto-lib take them, of autumn 2026."""
CONSTANTS = """
from types import SimpleNamespace
QWEN3_14B = SimpleNamespace(
    name="qwen3-14b", batch_pad=16, max_seq=4096, num_heads=40, num_kv_heads=8, head_dim=128, hidden=5120,
    intermediate=17408, vocab=152064, real_vocab=151936, num_layers=40, sampled_ids_pad=8, topk_select_k=32,
    eps=1e-6,
)
QWEN3_14B_TILING = SimpleNamespace(block_size=128)
"""
PYPTO = """
class Recorded:
    def __init__(self, *args, **fields):
        self.args, self.fields = args, fields

class RunConfig(Recorded): pass
class DistributedConfig(Recorded): pass
class BackendType:
    Ascend910B = "910B"

class DistributedWorker(Recorded):
    def submit(self, program, *args, config):
        self.submitted = program, args, config
        return Recorded()
    def close(self):
        self.is_closed = True
"""
HOST = """
import pypto.language as pl
from {module} import QWEN3_14B as M

@pl.jit.host
def {name}({args}):
    return None
"""
LANGUAGE = """
class jit:
    @staticmethod
    def host(function):
        function.compile = lambda config: (function.__name__, config)
        return function
class Tensor: pass
"""
MODULES = {
    "__init__": "",
    "language": LANGUAGE,
    "runtime": PYPTO,
    "backend": PYPTO,
    "ir/__init__": "",
    "ir/distributed_compiled_program": PYPTO,
}

Checkout = Callable[..., Path]


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkout:
    """Writes a checkout whose functions take these arguments; its PyPTO is the one that is installed."""
    about = tmp_path / "pagoda_own-1.dist-info"
    about.mkdir()
    about.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: pagoda-own\nVersion: 1\n")
    about.joinpath("entry_points.txt").write_text(
        "[pagoda.pypto_kernels]\npypto-lib = pagoda.plugins.pypto.pypto_lib:LIBRARY\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    for name in list(sys.modules):
        if name.partition(".")[0] in ("pypto", "config", "constants"):
            del sys.modules[name]

    def write(
        prefill: list[str] = PREFILL,
        decode: list[str] = DECODE,
        topk: list[str] = TOPK,
        *,
        module: str = "config",
        has_pypto: bool = True,
    ) -> Path:
        root = tmp_path / "pypto-lib"
        kernels = root / "models" / "qwen3_14b"
        kernels.mkdir(parents=True)
        (kernels / f"{module}.py").write_text(CONSTANTS)
        for file, name, args in (
            ("prefill_fwd", "qwen3_prefill_host", prefill),
            ("decode_fwd", "qwen3_decode_host", decode),
            ("topk_select", "qwen3_topk_select_host", topk),
        ):
            typed = ", ".join(f"{arg}: pl.Tensor" for arg in args)
            text = HOST.format(module=module, name=name, args=typed)
            (kernels / f"{file}.py").write_text(text)
        for file, text in MODULES.items() if has_pypto else ():
            path = tmp_path / "pypto" / f"{file}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        monkeypatch.setenv("PYPTO_LIB_ROOT", str(root))
        return root

    return write


@pytest.mark.parametrize("module", ["config", "constants"])
def test_the_published_arguments_are_a_contract(checkout: Checkout, module: str) -> None:
    checkout(module=module)
    [contract] = read_manifest(LIBRARY.manifest()).contracts
    names = {name: [arg.name for arg in it.args] for name, it in contract.programs.items()}
    assert names == {"prefill": PREFILL, "decode": DECODE, "topk_select": TOPK}
    sizes = contract.environment(batch=16, tokens=40, pages=7)
    shapes = {arg.name: arg.dims(sizes) for arg in contract.programs["decode"].args}
    assert shapes["wq"] == shapes["wo"] == (40 * 5120, 5120)
    assert shapes["wk"] == (40 * 5120, 1024)
    assert shapes["w_down"] == (40 * 17408, 5120)
    assert shapes["k_cache"] == (40 * 7 * 8 * 128, 128)
    assert (shapes["block_table"], shapes["sampled_ids"]) == ((16 * 32,), (16, 8))
    assert shapes["lm_head_weight"] == (152064, 5120)
    assert contract.weight_dtype is torch.bfloat16


def test_arguments_in_another_order_are_passed_in_that_order(checkout: Checkout) -> None:
    checkout(decode=DECODE[::-1])
    [contract] = read_manifest(LIBRARY.manifest()).contracts
    assert [arg.name for arg in contract.programs["decode"].args] == DECODE[::-1]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"prefill": [*PREFILL, "lora"]},
            r"qwen3_prefill_host of .* takes other arguments \(lora\)",
        ),
        ({"decode": DECODE[1:]}, r"takes other arguments \(input_rms_weight\)"),
        ({"topk": ["logits", "k"]}, r"\(k, sampling_control, topk_indices, topk_values\)"),
        ({"has_pypto": False}, "pypto-lib needs PyPTO of hw-native-sys, which is not installed"),
        ({"module": "settings"}, "has no constants of Qwen3-14B"),
    ],
)
def test_another_checkout_is_refused_in_a_sentence(
    checkout: Checkout, fields: dict[str, object], sentence: str
) -> None:
    checkout(**fields)
    with pytest.raises(BackendUnavailableError, match=sentence):
        open_library(DeviceSet("npu", (0,)))


@pytest.mark.usefixtures("checkout")
def test_a_root_without_kernels_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYPTO_LIB_ROOT", str(tmp_path))
    with pytest.raises(BackendUnavailableError, match="PYPTO_LIB_ROOT must name a checkout"):
        open_backend(DeviceSet("npu", (0,)))


def test_without_a_driver_that_is_what_is_said(checkout: Checkout) -> None:
    checkout()
    with pytest.raises(BackendUnavailableError, match="there is no Ascend driver here"):
        open_backend(DeviceSet("npu", (0,)))


def test_programs_are_compiled_and_run_as_pypto_takes_them(checkout: Checkout) -> None:
    checkout()
    [contract] = read_manifest(LIBRARY.manifest()).contracts
    [topology] = contract.topologies
    programs = [LIBRARY.compile(contract.name, name, [3], topology) for name in contract.programs]
    assert [name for name, _ in programs] == [  # type: ignore[misc]
        *("qwen3_prefill_host", "qwen3_decode_host", "qwen3_topk_select_host")
    ]
    for _, config in programs:  # type: ignore[misc]
        assert config.fields["codegen_only"] is True
        assert config.fields["distributed_config"].fields["device_ids"] == [3]
    worker = LIBRARY.open_worker(programs, [3])
    assert worker.args == (programs,)  # type: ignore[attr-defined]
    handle = worker.submit(programs[1], "weights", "tokens")
    assert handle.device_ns == 0
    program, args, config = worker.submitted  # type: ignore[attr-defined]
    assert (program, args) == (programs[1], ("weights", "tokens"))
    assert config.fields["ring_heap"] == topology.ring_heap
    worker.close()
    assert worker.is_closed  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="is compiled for 1 chips"):
        LIBRARY.compile(contract.name, "decode", [0, 1], topology)
