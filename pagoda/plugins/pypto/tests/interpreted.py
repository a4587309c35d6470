# SPDX-License-Identifier: Apache-2.0
"""Kernels in CANN's PyPTO, computed by its graph interpreter: `interpreted.py CALCULATOR`, in an empty folder.

The interpreter builds a graph as it would for a device, and computes its nodes with torch by a library that it
compiles, which is kept in the folder CALCULATOR: no code for a device is made or run. Three kernels are compared
by value: an RMS norm and a product inside a step of the embedded model, which goes on with what they gave, and a
decode layer by itself. What was compared is printed as JSON.
"""

import csv
import ctypes
import json
import sys
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import pypto
import torch
from pypto._utils import BuildOnlineManager
from pypto.frontend.parser import entry
from torch import Tensor

from pagoda.backend.reference import backend as reference
from pagoda.checkpoints.resolve import EMBEDDED_MODEL, resolve_model
from pagoda.messages.frontend import Work
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.worker import SlotStart, StepPlan
from pagoda.messages.worker_config import WorkerConfig
from pagoda.telemetry.tracer import Tracer
from pagoda.worker.loading import load_runner, plan_worker

ROWS, HIDDEN, INNER, CONTEXT = 16, 256, 512, 64
OPTIONS: dict[str, Any] = {
    "runtime_options": {"run_mode": pypto.RunMode.SIM},
    "verify_options": {"enable_pass_verify": True},
    "use_cache": False,  # a cached graph is not computed again
}
FP32 = pypto.DT_FP32


@pypto.frontend.jit(**OPTIONS)
def rms_norm_kernel(
    x: pypto.Tensor((ROWS, HIDDEN), FP32),
    weight: pypto.Tensor((1, HIDDEN), FP32),
    out: pypto.Tensor((ROWS, HIDDEN), FP32),
):
    pypto.set_vec_tile_shapes(16, 256)
    mean = pypto.mul(pypto.sum(pypto.mul(x, x), -1, keepdim=True), 1.0 / 256)
    out[:] = pypto.mul(pypto.mul(x, pypto.rsqrt(pypto.add(mean, 1e-6))), weight)


@pypto.frontend.jit(**OPTIONS)
def product_kernel(
    x: pypto.Tensor((ROWS, HIDDEN), FP32),
    weight: pypto.Tensor((HIDDEN, HIDDEN), FP32),
    out: pypto.Tensor((ROWS, HIDDEN), FP32),
):
    pypto.set_cube_tile_shapes([16, 16], [64, 128], [64, 64])
    out[:] = pypto.matmul(x, weight, FP32)


@pypto.frontend.jit(**OPTIONS)
def layer_kernel(
    x: pypto.Tensor((ROWS, HIDDEN), FP32),
    w_q: pypto.Tensor((HIDDEN, HIDDEN), FP32),
    keys: pypto.Tensor((CONTEXT, HIDDEN), FP32),
    values: pypto.Tensor((CONTEXT, HIDDEN), FP32),
    w_o: pypto.Tensor((HIDDEN, HIDDEN), FP32),
    w_gate: pypto.Tensor((HIDDEN, INNER), FP32),
    w_up: pypto.Tensor((HIDDEN, INNER), FP32),
    w_down: pypto.Tensor((INNER, HIDDEN), FP32),
    out: pypto.Tensor((ROWS, HIDDEN), FP32),
):
    pypto.set_vec_tile_shapes(16, 256)
    pypto.set_cube_tile_shapes([16, 16], [64, 128], [64, 64])
    mean = pypto.mul(pypto.sum(pypto.mul(x, x), -1, keepdim=True), 1.0 / 256)
    h = pypto.mul(x, pypto.rsqrt(pypto.add(mean, 1e-6)))
    q = pypto.matmul(h, w_q, FP32)
    scores = pypto.mul(pypto.matmul(q, keys, FP32, b_trans=True), 0.0625)
    attended = pypto.matmul(pypto.softmax(scores, -1), values, FP32)
    y = pypto.add(x, pypto.matmul(attended, w_o, FP32))
    mean_y = pypto.mul(pypto.sum(pypto.mul(y, y), -1, keepdim=True), 1.0 / 256)
    h2 = pypto.mul(y, pypto.rsqrt(pypto.add(mean_y, 1e-6)))
    gate = pypto.matmul(h2, w_gate, FP32)
    inner = pypto.mul(pypto.mul(gate, pypto.sigmoid(gate)), pypto.matmul(h2, w_up, FP32))
    out[:] = pypto.add(y, pypto.matmul(inner, w_down, FP32))


def load_calculator(directory: Path) -> None:
    """Loads the library that computes graphs, which is compiled the first time."""
    manager = BuildOnlineManager()
    library = directory / "install" / "lib" / "libtile_fwk_calculator.so"
    if not library.exists():
        cmake, known = attrgetter("_CMakeContext", "_TorchContext")(manager)
        cmake, known = cmake(), known()
        context = cmake.CompileContext(
            src_dir=Path(manager.pkg_lib_dir, "calculator"), tmp_dir=directory
        )
        context.cfg_cmd_ext = (
            f"-DPY3_MOD_TORCH_VERSION={known.torch_version} "
            f"-DPY3_MOD_TORCH_ROOT_PATH={known.torch_root_dir} "
            f"-DPY3_MOD_TORCH_C_GLIBCXX_USE_CXX11_ABI={known.torch_c_use_cxx11_abi}"
        )
        cmake.compile(ctx=context)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    manager.calculator_loaded = True
    # Staging would copy zeros over the tensors of a caller that are on the CPU already.
    vars(entry)["_gen_pto_tensor"] = lambda tensors: (tensors, None)


def computed(kernel: Callable[..., None], *inputs: Tensor, width: int = HIDDEN) -> Tensor:
    """What a kernel makes of its inputs, which must stay as they are; rows are padded with zeros."""
    count = len(inputs[0])
    padded = torch.zeros(ROWS, inputs[0].shape[1])
    padded[:count] = inputs[0]
    given = [padded, *(tensor.contiguous().clone() for tensor in inputs[1:])]
    kept = [tensor.clone() for tensor in given]
    out = torch.full((ROWS, width), torch.nan)
    kernel(*given, out)
    if not all(map(torch.equal, given, kept)):
        raise ValueError(f"{kernel} has written to its inputs.")
    return out[:count]


class Replaced:
    """An operation of the reference whose first fitting call of each step is a kernel's."""

    def __init__(self, name: str, kernel: Callable[[Any, Any], Tensor | None]) -> None:
        self._own = reference.OPERATIONS[name]
        self._kernel = kernel
        self.is_on = False
        self.differences: list[float] = []
        reference.OPERATIONS[name] = self  # type: ignore[index]

    def __call__(self, x: Tensor, weight: Any, **attributes: Any) -> Tensor:
        expected: Tensor = self._own(x, weight, **attributes)
        found = self._kernel(x, weight) if self.is_on else None
        if found is None:
            return expected
        self.is_on = False
        self.differences.append((found - expected).abs().max().item())
        return found


def _norm(x: Tensor, weight: Tensor) -> Tensor | None:
    return computed(rms_norm_kernel, x, weight[None]) if x.shape[1:] == (HIDDEN,) else None


def _product(x: Tensor, weight: Any) -> Tensor | None:
    if (weight.inputs, weight.outputs) != (HIDDEN, HIDDEN):
        return None
    return computed(product_kernel, x.flatten(1), weight.parts[0].t())


def serve(replaced: list[Replaced]) -> list[int]:
    """Tokens of a prompt, of which one step has operations replaced."""
    config = WorkerConfig(
        model=resolve_model(EMBEDDED_MODEL).model,
        backend="reference",
        dtype="float32",
        num_blocks=16,
        max_num_seqs=1,
        max_model_len=128,
    )
    runner: Any = load_runner(plan_worker(config), Tracer("interpreted")).runner
    prompt = [7 * at % 900 for at in range(20)]
    sampling = SamplingParams(temperature=0.0, seed=0, max_tokens=4)
    start = SlotStart(0, prompt, len(prompt), 0, [[0, 1, 2]], Work(sampling))
    plans = [StepPlan(0, [0], [len(prompt)], [start]), *(StepPlan(n, [0], [1]) for n in (1, 2, 3))]
    tokens = []
    for plan in plans:
        for each in replaced:
            each.is_on = plan.step == 2
        tokens += runner.submit(plan).result().token_ids[0]
    return tokens


def layer() -> float:
    """The greatest difference of the decode layer from torch."""
    torch.manual_seed(0)
    shapes = [(HIDDEN, HIDDEN), (CONTEXT, HIDDEN), (CONTEXT, HIDDEN), (HIDDEN, HIDDEN)]
    shapes += [(HIDDEN, INNER), (HIDDEN, INNER), (INNER, HIDDEN)]
    x, *weights = (torch.randn(shape) / 16 for shape in [(ROWS, HIDDEN), *shapes])
    w_q, keys, values, w_o, w_gate, w_up, w_down = weights

    def norm(rows: Tensor) -> Tensor:
        return rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + 1e-6)

    attended = torch.softmax(norm(x) @ w_q @ keys.t() / 16, -1) @ values
    y = x + attended @ w_o
    expected = y + (torch.nn.functional.silu(norm(y) @ w_gate) * (norm(y) @ w_up)) @ w_down
    found = computed(layer_kernel, x, *weights)
    return (found - expected).abs().max().item()


def verdicts() -> list[str]:
    """What the interpreter itself says of each of its passes; failures do not raise."""
    found = []
    for path in Path("output").glob("*/verify*/verify_result_brief.csv"):
        with path.open(encoding="utf-8") as file:
            found += [
                cell for row in csv.reader(file) for cell in row if cell in ("PASS", "FAILED")
            ]
    return found


if __name__ == "__main__":
    load_calculator(Path(sys.argv[1]))
    expected = serve([])
    norm, product = Replaced("rms_norm", _norm), Replaced("linear", _product)
    result = {
        "same_tokens": serve([norm, product]) == expected,
        "norm": norm.differences,
        "product": product.differences,
        "layer": layer(),
        "verdicts": verdicts(),
    }
    print(json.dumps(result))
