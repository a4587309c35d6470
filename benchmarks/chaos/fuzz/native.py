# SPDX-License-Identifier: Apache-2.0
"""Native kernels behind files and messages: models with any weights, and an engine's orders to a worker.

With the kernels of `make test-native` the first access outside of a tensor ends the process.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.chaos.fuzz.forms import JSON, MSGPACK
from benchmarks.chaos.fuzz.gguf_form import GGUF
from benchmarks.chaos.fuzz.target import Feed, Target
from pagoda.checkpoints.gguf.reader import BLOCK_TYPES
from pagoda.errors import ConfigError
from pagoda.ipc.codec import Codec
from pagoda.messages.frontend import Work
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.worker import SlotStart, StepPlan, TokenMasks, WorkerOrder
from pagoda.messages.worker_config import WorkerConfig
from pagoda.telemetry.tracer import Tracer
from pagoda.worker.loading import load_runner, plan_worker
from pagoda.worker.runner import Runner

_ALIGNMENT = 32
_MOST_BYTES = 2**22
"""Bytes of a model's weights."""
_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "I32": 4, "I64": 8, "I8": 1, "U8": 1, "F8_E4M3": 1}
_FINITE = bytes(byte & 0x37 for byte in range(256))
"""Bytes of which numbers of any type are small."""
_TOKENS = list(range(1, 21))


def _worker(model: Path) -> WorkerConfig:
    return WorkerConfig(
        model=str(model),
        backend="cpu",
        num_threads=1,
        num_blocks=16,
        block_size=16,
        max_num_seqs=4,
        max_model_len=64,
        max_num_batched_tokens=64,
    )


def _runner(model: Path, await_masks: Any = None) -> Runner:
    waiting = {} if await_masks is None else {"await_masks": await_masks}
    loaded = load_runner(plan_worker(_worker(model)), Tracer("worker"), **waiting)
    if not isinstance(loaded.runner, Runner):
        raise TypeError("one worker alone is the last stage")
    return loaded.runner


# ---- models


def _fill(fill: object, num_bytes: int, item_bytes: int) -> bytes:
    """Bytes of a tensor: random for odd numbers, those of small numbers for even ones, zeros for 0, for -n the
    elements 0, 0... 1, 1..., n of each, and those of a list of elements."""
    form = {4: "<i", 8: "<q"}.get(item_bytes, "<B")
    if isinstance(fill, list):
        return b"".join(struct.pack(form, it) for it in fill)[:num_bytes].ljust(num_bytes, b"\0")
    if not isinstance(fill, int) or not fill:
        return bytes(num_bytes)
    if fill < 0:
        count = num_bytes // struct.calcsize(form)
        elements = b"".join(struct.pack(form, (at // -fill) % 128) for at in range(count))
        return elements.ljust(num_bytes, b"\0")
    drawn = random.Random(fill).randbytes(num_bytes)
    return drawn if fill % 2 else drawn.translate(_FINITE)


def _elements(shape: Sequence[object]) -> int:
    sizes = [size for size in shape if isinstance(size, int) and 0 <= size < 2**32]
    return math.prod(sizes)


def _write_safetensors(path: Path, tensors: Mapping[str, Any]) -> None:
    header, parts, end = {}, [], 0
    for name, (dtype, shape, fill) in tensors.items():
        item = _ITEM_BYTES.get(dtype, 1)
        size = min(_elements(shape) * item, _MOST_BYTES - end)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        parts.append(_fill(fill, size, item))
        end += size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(parts))


def _write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
    """The shapes are those of ggml: the number of inputs comes first."""
    table, parts, end = [], [], 0
    for name, (kind, shape, fill) in tensors.items():
        known = BLOCK_TYPES.get(kind)
        size = 0 if known is None else _elements(shape) // known.weights * known.num_bytes
        size = min(size, _MOST_BYTES - end)
        table.append([name, shape, kind, end])
        parts.append(_fill(fill, size, 1).ljust(size + -size % _ALIGNMENT, b"\0"))
        end += len(parts[-1])
    head = GGUF.write({"metadata": metadata, "tensors": table, "rest": 0})
    path.write_bytes(head.ljust(len(head) + -len(head) % _ALIGNMENT, b"\0") + b"".join(parts))


def _write_model(room: Path, data: bytes) -> Path:
    """Raises ValueError and others: the input is no object of a model."""
    model = json.loads(data)
    if "metadata" in model:
        path = room / "model.gguf"
        _write_gguf(path, model["metadata"], model["tensors"])
        return path
    (room / "config.json").write_text(json.dumps(model["config"]), encoding="utf-8")
    _write_safetensors(room / "model.safetensors", model["tensors"])
    return room


def _blocks(slot: int, block_size: int) -> list[int]:
    """Blocks of a slot, which has room for a token behind the prompt."""
    count = -(-(len(_TOKENS) + 1) // block_size)
    return list(range(slot * count, (slot + 1) * count))


def _answer(runner: Runner) -> None:
    """Computes a prompt and a token behind it, with two kinds of sampling."""
    sizes = runner.batch.block_sizes
    sampling = (SamplingParams(temperature=0, seed=0), SamplingParams(top_k=3, seed=1, logprobs=4))
    starts = [
        SlotStart(
            slot, _TOKENS, len(_TOKENS), 0, [_blocks(slot, size) for size in sizes], Work(each)
        )
        for slot, each in enumerate(sampling)
    ]
    slots = [0, 1]
    prompt = StepPlan(step=0, slots=slots, num_tokens=[len(_TOKENS)] * 2, starts=starts)
    runner.submit(prompt).result()
    runner.submit(StepPlan(step=1, slots=slots, num_tokens=[1, 1])).result()


@contextmanager
def _open_models(room: Path) -> Iterator[Feed]:
    """The input is an object of a model's configuration and its tensors: type, shape and what fills them."""

    def feed(data: bytes) -> None:
        try:
            path = _write_model(room, data)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError, struct.error):
            return
        except AttributeError:  # a list where an object belongs
            return
        with contextlib.suppress(ConfigError):
            _answer(_runner(path))

    yield feed


# ---- orders of an engine

_HIDDEN, _VOCABULARY = 64, 96
_SMALL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": _VOCABULARY,
    "hidden_size": _HIDDEN,
    "intermediate_size": _HIDDEN,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
_LAYER = {
    "self_attn.q_proj": [_HIDDEN, _HIDDEN],
    "self_attn.k_proj": [32, _HIDDEN],
    "self_attn.v_proj": [32, _HIDDEN],
    "self_attn.o_proj": [_HIDDEN, _HIDDEN],
    "self_attn.q_norm": [32],
    "self_attn.k_norm": [32],
    "mlp.gate_proj": [_HIDDEN, _HIDDEN],
    "mlp.up_proj": [_HIDDEN, _HIDDEN],
    "mlp.down_proj": [_HIDDEN, _HIDDEN],
    "input_layernorm": [_HIDDEN],
    "post_attention_layernorm": [_HIDDEN],
}


def _write_small(room: Path) -> None:
    shapes = {f"model.layers.0.{name}.weight": shape for name, shape in _LAYER.items()}
    shapes |= {"model.embed_tokens.weight": [_VOCABULARY, _HIDDEN], "model.norm.weight": [_HIDDEN]}
    (room / "config.json").write_text(json.dumps(_SMALL), encoding="utf-8")
    tensors = {name: ["BF16", shape, 2] for name, shape in shapes.items()}
    _write_safetensors(room / "model.safetensors", tensors)


@contextmanager
def _open_orders(room: Path) -> Iterator[Feed]:
    """The input is a list of an engine's messages to a worker, whose steps are computed."""
    _write_small(room)
    decode = Codec[WorkerOrder](WorkerOrder).decode

    def feed(data: bytes) -> None:
        with contextlib.suppress(msgspec.DecodeError):
            decode(data)
        try:
            items = msgspec.msgpack.decode(data)
        except (msgspec.DecodeError, ValueError, RecursionError):
            return
        masks: dict[int, TokenMasks] = {}
        runner = _runner(room, lambda step: masks.pop(step, TokenMasks(step)))
        for item in items if isinstance(items, list) else []:
            try:
                order = decode(msgspec.msgpack.encode(item))
            except (msgspec.DecodeError, ValueError, TypeError, OverflowError):
                continue
            if isinstance(order, TokenMasks):
                masks[order.step] = order
            elif isinstance(order, StepPlan):
                try:
                    runner.submit(order).result()
                except Exception:  # a worker says so in its log and ends, and another one starts
                    return

    yield feed


NATIVE = (
    Target("native_models", _open_models, JSON, is_native=True),
    Target("native_orders", _open_orders, MSGPACK, is_native=True),
)
