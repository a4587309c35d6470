# SPDX-License-Identifier: Apache-2.0
"""The kernel library of a checkout of pypto-lib (github.com/hw-native-sys/pypto-lib), named by `PYPTO_LIB_ROOT`.

The order of arguments is that of the HOST functions in the checkout, read from their source; their meanings are
known here by name. So a checkout whose functions take other arguments is refused before anything is compiled.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from pagoda.plugins.pypto.contract import SCHEMA_VERSION, Topology
from pagoda.plugins.pypto.library import ROOT_ENV, DeviceTensor, DistributedWorker, RunHandle

_MODEL = Path("models", "qwen3_14b")
_PLATFORM = "a2a3"
_DRIVER_FILE = Path("/usr/local/Ascend/driver/version.info")
_MEMORY_TIMEOUT_S = 60
_READ_MEMORY = (
    "import acl, sys; acl.init(); acl.rt.set_device(int(sys.argv[1]));"
    "print(*acl.rt.get_mem_info(1)[:2])"
)
"""Asks CANN in a process of its own: a process that has a context of a chip must not fork workers."""
_RINGS = {"ring_task_window": 1 << 17, "ring_heap": 1 << 29, "ring_dep_pool": 1 << 17}
"""Rings with which pypto-serving runs the model."""

_Field = tuple[str, str, str, Mapping[str, object]]
_WEIGHTS: dict[str, _Field] = {
    "input_rms_weight": ("fp32", "L H", "attention_norms", {}),
    "wq": ("bf16", "L*H QH*D", "w_q", {}),
    "wk": ("bf16", "L*H KVH*D", "w_k", {}),
    "wv": ("bf16", "L*H KVH*D", "w_v", {}),
    "q_norm_weight": ("fp32", "L D", "q_norms", {}),
    "k_norm_weight": ("fp32", "L D", "k_norms", {}),
    "rope_cos": ("fp32", "S D", "rope_cos", {}),
    "rope_sin": ("fp32", "S D", "rope_sin", {}),
    "wo": ("bf16", "L*QH*D H", "w_o", {}),
    "w_gate": ("bf16", "L*H I", "w_gate", {}),
    "w_up": ("bf16", "L*H I", "w_up", {}),
    "w_down": ("bf16", "L*I H", "w_down", {}),
    "post_rms_weight": ("fp32", "L H", "mlp_norms", {}),
    "final_norm_weight": ("fp32", "1 H", "final_norm", {}),
    "lm_head_weight": ("bf16", "V H", "head", {"pad": "first_row"}),
    "embed_weight": ("bf16", "V H", "embedding", {}),
    "k_cache": ("bf16", "L*PAGES*KVH*PAGE D", "keys", {"direction": "inout"}),
    "v_cache": ("bf16", "L*PAGES*KVH*PAGE D", "values", {"direction": "inout"}),
    "out": ("fp32", "B V", "logits", {"direction": "out"}),
    "seq_lens": ("int32", "B", "seq_lens", {}),
}
_PROGRAMS: dict[str, tuple[str, str, dict[str, _Field]]] = {
    "prefill": (
        "prefill_fwd",
        "qwen3_prefill_host",
        {
            **_WEIGHTS,
            "input_ids": ("int32", "T", "tokens", {}),
            "chunk_lens": ("int32", "B", "chunk_lens", {}),
            "chunk_offsets": ("int32", "B", "chunk_offsets", {}),
            "block_table": ("int32", "B*BLOCKS", "block_table", {"fill": -1}),
            "slot_mapping": ("int32", "T", "slot_mapping", {}),
        },
    ),
    "decode": (
        "decode_fwd",
        "qwen3_decode_host",
        {
            **_WEIGHTS,
            "block_table": ("int32", "B*BLOCKS", "block_table", {}),
            "slot_mapping": ("int32", "B", "slot_mapping", {}),
            "sampled_ids_in": ("int32", "B IDS", "tokens", {}),
            "sampled_ids": ("int32", "B IDS", "sampled", {"direction": "out"}),
            "next_hidden": ("bf16", "B H", "next_hidden", {"direction": "out"}),
        },
    ),
    "topk_select": (
        "topk_select",
        "qwen3_topk_select_host",
        {
            "logits": ("fp32", "WINDOW V", "logits", {}),
            "sampling_control": ("int32", "2", "control", {}),
            "topk_values": ("fp32", "WINDOW K", "topk_values", {"direction": "out"}),
            "topk_indices": ("int32", "WINDOW K", "topk_indices", {"direction": "out"}),
        },
    ),
}
"""Programs: for each its file, its HOST function, and by name the dtype, shape and meaning of its arguments."""


class PyptoLib:
    """`KernelLibrary` over a checkout. Its programs are of one chip."""

    def manifest(self) -> Mapping[str, object]:
        """Raises ValueError, whose text is one sentence: there is no checkout, or not one like this."""
        directory = _directory()
        model, tiling = _constants(directory)
        try:
            sizes = {
                **{"L": model.num_layers, "H": model.hidden, "I": model.intermediate},
                **{"QH": model.num_heads, "KVH": model.num_kv_heads, "D": model.head_dim},
                **{"V": model.vocab, "REAL_V": model.real_vocab, "IDS": model.sampled_ids_pad},
            }
            limits = {
                **{"window": model.batch_pad, "max_batch": model.batch_pad},
                **{"max_seq": model.max_seq, "page": tiling.block_size},
                "prefill_tokens": model.batch_pad * model.max_seq,
                "topk": model.topk_select_k,
            }
            contract = {"name": model.name, "sizes": sizes, "eps": model.eps, "limits": limits}
        except AttributeError as error:
            raise ValueError(f"the constants in {directory} are others ({error})") from None
        programs = {
            name: {"args": list(_arguments(directory, *program))}
            for name, program in _PROGRAMS.items()
        }
        return {
            "schema_version": SCHEMA_VERSION,
            "library": f"pypto-lib at {directory.parent.parent}",
            "driver": {"at_least": "0", "below": "1000"},  # pypto-lib names none
            "contracts": [
                {**contract, "programs": programs, "topologies": [{"chips": 1, **_RINGS}]}
            ],
        }

    def driver_version(self) -> str:
        found = re.search(r"^Version=(\S+)", _DRIVER_FILE.read_text(encoding="utf-8"), re.MULTILINE)
        if found is None:
            raise OSError(f"{_DRIVER_FILE} names no version")
        return found[1]

    def num_chips(self) -> int:
        return sum(path.name[len("davinci") :].isdigit() for path in Path("/dev").glob("davinci*"))

    def memory_info(self, chip: int) -> tuple[int, int]:
        command = [sys.executable, "-c", _READ_MEMORY, str(chip)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_MEMORY_TIMEOUT_S, check=False
        )
        if done.returncode:
            reason = done.stderr.strip().rpartition("\n")[2]
            raise RuntimeError(f"CANN does not say what memory chip {chip} has ({reason})")
        free, total = map(int, done.stdout.split()[-2:])
        return free, total

    def compile(
        self, contract: str, program: str, chips: Sequence[int], topology: Topology
    ) -> object:
        if len(chips) != topology.chips:
            raise RuntimeError(f"{contract} is compiled for {topology.chips} chips, not {chips}")
        name, function, _ = _PROGRAMS[program]
        host = getattr(_load(_directory(), name), function)
        return host.compile(config=_run_config(chips, codegen_only=True))

    def open_worker(self, programs: Sequence[object], chips: Sequence[int]) -> DistributedWorker:
        from pypto.runtime import DistributedWorker as Worker  # type: ignore[import-not-found]

        return _PyptoWorker(Worker(list(programs)), chips)

    def stack(self, shards: Sequence[DeviceTensor]) -> object:
        raise RuntimeError(f"the programs of pypto-lib run on one chip, not on {len(shards)}")


LIBRARY = PyptoLib()


class _PyptoWorker:
    """PyPTO's worker, whose runs take its rings; all else it does itself."""

    def __init__(self, worker: Any, chips: Sequence[int]) -> None:
        self._worker = worker
        self._config = _run_config(chips, **_RINGS)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)

    def submit(self, program: object, *args: object) -> RunHandle:
        return _Handle(self._worker.submit(program, *args, config=self._config))


class _Handle:
    """A run, of which the runtime does not say how long it took on the chip."""

    device_ns = 0

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def result(self) -> None:
        self._handle.result()


def _run_config(chips: Sequence[int], **fields: object) -> Any:
    from pypto.backend import BackendType  # type: ignore[import-not-found]
    from pypto.ir.distributed_compiled_program import (  # type: ignore[import-not-found]
        DistributedConfig,
    )
    from pypto.runtime import RunConfig

    return RunConfig(
        platform=_PLATFORM,
        device_id=chips[0],
        backend_type=BackendType.Ascend910B,
        distributed_config=DistributedConfig(
            device_ids=list(chips), num_sub_workers=0, aicpu_thread_num=4
        ),
        **fields,
    )


def _directory() -> Path:
    """The directory of the model's kernels. Raises ValueError: there is none, or PyPTO is missing."""
    root = Path(os.environ.get(ROOT_ENV, ""))
    if not (root / _MODEL).is_dir():
        raise ValueError(f"{ROOT_ENV} must name a checkout of pypto-lib with {_MODEL}, got {root}")
    try:
        is_there = importlib.util.find_spec("pypto.language") is not None
    except ModuleNotFoundError:
        is_there = False
    if not is_there:
        raise ValueError(
            "pypto-lib needs PyPTO of hw-native-sys, which is not installed; the package pypto of the Python "
            "index is another one"
        )
    return root / _MODEL


def _constants(directory: Path) -> tuple[Any, Any]:
    for name in ("config", "constants"):
        if (directory / f"{name}.py").is_file():
            module = _load(directory, name)
            if hasattr(module, "QWEN3_14B") and hasattr(module, "QWEN3_14B_TILING"):
                return module.QWEN3_14B, module.QWEN3_14B_TILING
    raise ValueError(f"{directory} has no constants of Qwen3-14B")


def _load(directory: Path, name: str) -> ModuleType:
    """A module of the checkout, which imports others there by their bare names."""
    spec = importlib.util.spec_from_file_location(f"_pypto_lib_{name}", directory / f"{name}.py")
    if spec is None or spec.loader is None:
        raise RuntimeError(f"{directory} has no module {name}")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    paths = [str(directory), str(directory.parent.parent)]
    sys.path[:0] = paths
    try:
        spec.loader.exec_module(module)
    finally:
        for path in paths:
            sys.path.remove(path)
    return module


def _arguments(
    directory: Path, module: str, function: str, known: Mapping[str, _Field]
) -> Iterator[dict[str, object]]:
    """The arguments of a HOST function, in its order. Raises ValueError: it takes others than are known."""
    names = _parameters(directory / f"{module}.py", function)
    if sorted(names) != sorted(known):
        changed = ", ".join(sorted({*names} ^ {*known})) or "one of them twice"
        raise ValueError(
            f"{function} of pypto-lib at {directory} takes other arguments ({changed})"
        )
    for name in names:
        dtype, shape, meaning, others = known[name]
        yield {"name": name, "dtype": dtype, "shape": shape.split(), "meaning": meaning, **others}


def _parameters(path: Path, function: str) -> list[str]:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError) as error:
        raise ValueError(f"{path} of pypto-lib cannot be read ({error})") from None
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            return [arg.arg for arg in node.args.args]
    raise ValueError(f"{path} of pypto-lib has no function {function}")
