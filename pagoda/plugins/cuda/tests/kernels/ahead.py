# SPDX-License-Identifier: Apache-2.0
"""Compilation of kernels for GPUs that are not there: launches become compilations, and nothing runs.

    python pagoda/plugins/cuda/tests/kernels/ahead.py [NAME ...] compiles launches of these names for all `TARGETS`

TRITON_INTERPRET must not be set.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime import driver
from triton.runtime.jit import JITFunction, mangle_type

from pagoda.backend.base import ExpertActivation
from pagoda.backend.fp8 import E4M3
from pagoda.backend.weights import BLOCK_INPUT_GROUP
from pagoda.checkpoints.expert_routing import ExpertRouting
from pagoda.checkpoints.gguf.config import BLOCKS
from pagoda.checkpoints.weight_formats import BlockFormat
from pagoda.plugins.backend_check.products import block_weight
from pagoda.plugins.backend_check.sampling import mask, row_of, table_of
from pagoda.plugins.cuda.kernels import (
    attention,
    block_weights,
    blocks,
    experts,
    kv,
    latents,
    linear,
    low_rank,
    quantized,
    quantized_experts,
    rows,
    sampler,
    states,
)
from pagoda.plugins.cuda.kernels.numbers import blocks as blocks_of
from pagoda.plugins.cuda.weights import prepare

TARGETS = {
    "H100": GPUTarget("cuda", 90, 32),
    "L4": GPUTarget("cuda", 89, 32),
    "MI300": GPUTarget("hip", "gfx942", 64),
}
"""GPUs by name."""
SHARED_MEMORY = {"H100": 227 * 1024, "L4": 99 * 1024, "MI300": 64 * 1024}
"""Bytes that a program may have."""
_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")


@dataclass
class Compiler:
    """Compiles each kernel that is launched, once for each kind of arguments."""

    targets: dict[str, GPUTarget]
    compiled: dict[str, Any] = field(default_factory=dict)
    """Results of triton, by kernel, arguments and target."""
    whole: bool = True
    """Compiles to machine code; else each kernel is only translated to Triton's first form."""

    def launch(self, kernel: JITFunction[Any], args: Any, kwargs: dict[str, Any]) -> None:
        options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
        named = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        signature: dict[str, str] = {}
        constants: dict[str, Any] = {}
        attributes: dict[tuple[int, ...], Any] = {}
        for place, parameter in enumerate(kernel.params):
            value = named[parameter.name]
            constant = parameter.is_constexpr or value is None
            if constant or (isinstance(value, int) and value == 1):
                signature[parameter.name], constants[parameter.name] = "constexpr", value
                continue
            signature[parameter.name] = mangle_type(value)
            if isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0):
                attributes[(place,)] = [["tt.divisibility", 16]]
        for name, target in self.targets.items():
            key = f"{kernel.__name__} {signature} {constants} {options} {name}"
            if key not in self.compiled:
                source = ASTSource(kernel, signature, constants, attributes)
                # Kernels ask which GPU they are for.
                driver.set_active(SimpleNamespace(get_current_target=lambda target=target: target))
                self.compiled[key] = (
                    triton.compile(source, target=target, options=options)
                    if self.whole
                    else translated(source, target, options)
                )


def translated(source: ASTSource, target: GPUTarget, options: dict[str, Any]) -> Any:
    """A kernel in Triton's first form, which tells most of what the compiler refuses, in a tenth of the time."""
    backend, context = make_backend(target), ir.context()
    chosen = backend.parse_options(options)
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions = backend.get_codegen_implementation(chosen)
    return source.make_ir(target, chosen, functions, backend.get_module_map(), context)


@contextmanager
def ahead(compiler: Compiler) -> Iterator[Compiler]:
    """Turns launches into compilations."""
    run = JITFunction.run

    def instead(self: Any, *args: Any, grid: Any, warmup: Any, **kwargs: Any) -> None:  # noqa: ARG001
        compiler.launch(self, args, kwargs)

    JITFunction.run = instead  # type: ignore[method-assign]
    try:
        yield compiler
    finally:
        JITFunction.run = run  # type: ignore[method-assign]


def launches(*, all_sizes: bool = True) -> dict[str, Callable[[], None]]:
    """Launches of all kernels with shapes of real models, by name; or of one size of heads and groups only."""
    made = {
        "rows": _rows,
        "linear hopper": _hopper_linear,
        "kv": _kv,
        "sampler": _sampler,
        "low_rank": _low_rank,
        "blocks": _blocks,
        "experts": _experts,
        "states": _states,
        "latents": lambda: _latents(torch.bfloat16, torch.bfloat16),
        "latents int8": lambda: _latents(torch.int8, torch.bfloat16),
        "latents float32": lambda: _latents(torch.float32, torch.float32),
        "latents fp8": lambda: _latents(E4M3, torch.bfloat16),
    }
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.int8, E4M3):
        products = torch.bfloat16 if dtype.itemsize == 1 else dtype
        for dim in (64, 128, 256) if all_sizes else (128,):
            name = f"attention {str(dtype).removeprefix('torch.')} {dim}"
            made[name] = partial(_attention, dtype, products, dim)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        made[f"linear {str(dtype).removeprefix('torch.')}"] = partial(_linear, dtype)
        made[f"fp8 {str(dtype).removeprefix('torch.')}"] = partial(_fp8, dtype)
    made["int8"] = _int8
    for size in (32, 64, 128) if all_sizes else (64,):
        made[f"groups of {size}"] = partial(_groups, size)
    for name in ("Q8_0", "Q4_K", "Q6_K", "IQ4_XS"):  # others are like them
        made[f"blocks {name}"] = partial(_block_weight, BLOCKS[name])
    for bits, size in ((5, 32), (8, 64)):
        stored_format = BlockFormat(bits, size, 512, True, True, whole_rows=True)
        made[f"whole rows {bits}"] = partial(_block_weight, stored_format)
    return made


def _rows() -> None:
    x, y, half = torch.empty(5, 128), torch.empty(5, 128), torch.empty(5, 64)
    numbers, weight = torch.zeros(5, dtype=torch.int64), torch.empty(128)
    rows.add(x, y, x)
    rows.mul(x, y, x)
    rows.scale_rows(x, torch.empty(5, 1), y)
    rows.scale(x, y, factor=2.5)
    rows.softcap(x, y, cap=2.5)
    rows.gelu(x, y)
    rows.gelu_tanh(x, y)
    rows.silu(x, y)
    rows.relu(x, y)
    rows.sigmoid(x, y)
    rows.silu_and_mul(x, half)
    rows.gelu_and_mul(x, half)
    rows.gelu_erf_and_mul(x, half)
    rows.swiglu_oai(x, half, alpha=1.7, limit=7.0)
    rows.rms_norm(x, weight, y, eps=1e-5)
    rows.rms_norm(x, weight, y, eps=1e-5, delta=y, total=x)
    rows.rms_norm(torch.empty(2, 5120), torch.empty(5120), torch.empty(2, 5120), eps=1e-5)
    rows.layer_norm(x, weight, weight, y, eps=1e-5)
    rows.gated_head_norm(x, y, weight[:32], y, eps=1e-5)
    rows.sum_of_squares(x, torch.empty(5, 2), queries=64, keys=32)
    norms = {"all_queries": 64, "all_keys": 32, "eps": 1e-5}
    rows.norm_by_squares(x, torch.empty(5, 2), weight[:64], weight[:32], y, **norms)
    rows.position_scale(numbers, torch.empty(5, 1), period=16.0, factor=0.1, offset=1.0)
    rows.rotary_table(numbers, weight[:64], half, half, scale=1.5)
    rows.select_rows(x, numbers, y)
    rows.select_rows(numbers, numbers, numbers)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        rows.embedding(numbers, torch.empty(9, 128, dtype=dtype), y, first_id=7)
    rows.argmax(torch.empty(5, 151936), torch.empty((5, 3), dtype=torch.int64), first_id=0)


def _cache(dtype: torch.dtype, heads: int, dim: int) -> tuple[Tensor, Tensor | None]:
    cache = torch.empty((8, heads, 16, dim), dtype=dtype)
    return cache, torch.empty(8, heads, 16) if dtype == torch.int8 else None


def _kv() -> None:
    qkv, slots = torch.empty(5, 48 * 128), torch.zeros(5, dtype=torch.int64)
    table, norm, queries = torch.empty(5, 64), torch.empty(128), torch.empty(5, 32 * 128)
    for dtype in (torch.bfloat16, torch.float32, torch.int8, E4M3):
        cache, scales = _cache(dtype, 8, 128)
        scaled = {"key_scales": scales, "value_scales": scales}
        kv.rotate_and_cache(qkv, slots, cache, cache, queries, **scaled)
        norms = {"query_norm": norm, "key_norm": norm, "eps": 1e-6}
        turned = {"cosines": table, "sines": table}
        kv.rotate_and_cache(qkv, slots, cache, cache, queries, **turned, **norms, **scaled)
    cache, _ = _cache(torch.bfloat16, 8, 128)
    norms = {"query_norm": queries[0], "key_norm": queries[0], "squares": torch.empty(5, 2)}
    kv.rotate_and_cache(qkv, slots, cache, cache, queries, **turned, **norms, eps=1e-6)
    for dtype in (torch.bfloat16, torch.int8, E4M3):
        cache, scales = _cache(dtype, 1, 576)
        kv.rotate_and_cache_latents(
            torch.empty(5, 1024), torch.empty(5, 576), slots, cache, torch.empty(512),
            torch.empty(5, 1024), eps=1e-6, cosines=table[:, :32], sines=table[:, :32], scales=scales,
        )  # fmt: skip


def _steps() -> attention.Steps:
    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32)

    return attention.Steps(zeros(5), zeros(3, 3), zeros(4), zeros(4, 16))


def _attention(dtype: torch.dtype, products: torch.dtype, dim: int) -> None:
    cache, scales = _cache(dtype, 8, dim)
    queries = torch.empty(5, 32 * dim)
    kinds = {"scale": 0.1, "key_scales": scales, "value_scales": scales, "products": products}
    attention.attention(queries, cache, cache, _steps(), queries, **kinds)
    partials = attention.Partials.new(5, 32, dim, 4096, torch.device("cpu"))
    kinds |= {"partials": partials, "window": 4096, "softcap": 30.0, "sinks": torch.empty(32)}
    attention.attention(queries, cache, cache, _steps(), queries, **kinds)


def _latents(dtype: torch.dtype, products: torch.dtype) -> None:
    cache, scales = _cache(dtype, 1, 576)
    queries, turned = torch.empty(5, 16 * 512), torch.empty(5, 16 * 64)
    kinds = {"rank": 512, "scale": 0.1, "scales": scales, "products": products}
    latents.latent_attention(queries, turned, cache, _steps(), queries, **kinds)
    partials = attention.Partials.new(5, 16, 512, 4096, torch.device("cpu"))
    latents.latent_attention(queries, turned, cache, _steps(), queries, partials=partials, **kinds)


def _linear(dtype: torch.dtype) -> None:
    x, out, weight = torch.empty(5, 256), torch.empty(5, 32), torch.empty((32, 256), dtype=dtype)
    linear.linear(x, weight, out, bias=torch.empty(32))
    linear.head_linear(x, torch.zeros(2, dtype=torch.int64), out, dtype=dtype)


def _hopper_linear() -> None:
    weight, bias = torch.empty((512, 4096), dtype=torch.bfloat16), torch.empty(512)
    for count in (1, 64, 256, 1024):
        for dtype in (torch.float32, torch.bfloat16):
            x, out = torch.empty((count, 4096), dtype=dtype), torch.empty(count, 512)
            linear.hopper_linear(x, weight, out, bias=bias)


def _fp8(dtype: torch.dtype) -> None:
    x, out, values = torch.empty(5, 4096), torch.empty(5, 32), torch.empty((32, 4096), dtype=E4M3)
    for size in (2**30, 128, 32):
        scales = torch.empty(32, blocks_of(4096, size))
        linear.fp8_linear(x, values, scales, out, size=size, dtype=dtype, bias=torch.empty(32))
        linear.fp8_embedding(torch.zeros(5).long(), values, scales, x, first_id=0, size=size)


def _int8() -> None:
    x, out, vector = torch.empty(5, 4096), torch.empty(5, 32), torch.empty(32)
    rounded = quantized.RoundedRows.new(5, 4096, x.device)
    values = torch.empty((32, 4096), dtype=torch.int8)
    quantized.round_rows(x, rounded)
    quantized.int8_linear(rounded, values, vector, out)
    more = {"zero_points": vector.int()}
    quantized.int8_linear(rounded, values, vector, out, bias=vector, **more)
    quantized.int8_embedding(torch.zeros(5).long(), values, vector, x, first_id=0, **more)


def _groups(size: int) -> None:
    x, out = torch.empty(5, 1024), torch.empty(5, 32)
    rounded = quantized.RoundedGroups.new(5, 1024, size, x.device)
    scales = torch.empty((32, 1024 // size), dtype=torch.float16)
    quantized.round_groups(x, rounded)
    quantized.round_groups(x, rounded, order=torch.arange(1024))
    for bits in (4, 8):
        codes = torch.empty((32, 128 * bits), dtype=torch.uint8)
        quantized.grouped_linear(rounded, codes, scales, out, bits=bits)
        more = {"bits": bits, "offsets": scales}
        quantized.grouped_linear(rounded, codes, scales, out, bias=torch.empty(32), **more)
        quantized.grouped_embedding(torch.zeros(5).long(), codes, scales, x, first_id=0, **more)


def _block_weight(stored_format: BlockFormat) -> None:
    x, out = torch.empty(5, 512), torch.empty(5, 32)
    weight = prepare(
        [block_weight(stored_format, 32, 512)], None, x.dtype, Tensor.contiguous
    ).segments[0]
    assert isinstance(weight, block_weights.Blocks)
    rounded: quantized.RoundedGroups | quantized.RoundedRows
    if stored_format.whole_rows:
        rounded = quantized.RoundedRows.new(5, 512, x.device)
        quantized.round_rows(x, rounded)
    else:
        rounded = quantized.RoundedGroups.new(5, 512, BLOCK_INPUT_GROUP, x.device)
        quantized.round_groups(x, rounded)
    block_weights.block_linear(rounded, weight, out, bias=torch.empty(32))
    block_weights.block_embedding(torch.zeros(5).long(), weight, x, first_id=0)


def _sampler() -> None:
    rules = {"top_p": 0.8, "top_k": 50, "logprobs": 3, "logit_bias": {3: 1.0}}
    row = row_of(5000, allowed=mask([1, 2], 5000), stops=(3,), seen=(1,), counts=(2,), **rules)
    packed = sampler.pack_rows(table_of(5000, [row]), [0])
    logits = torch.empty(1, 5000)
    sampler.sample(logits, packed, logits, sampler.Found.new(1, 3, logits.device))


def _low_rank() -> None:
    table, adapters = torch.zeros((2, 1, 4), dtype=torch.int64), torch.zeros(5, dtype=torch.int64)
    for dtype in (torch.bfloat16, torch.float32):
        for width in (16, 256):
            kinds = {"outputs": (32,), "dtype": dtype}
            x, out, narrow = torch.empty(5, 256), torch.empty(5, 32), torch.empty(5, 1, width)
            low_rank.add_low_rank(out, x, adapters, table, narrow, **kinds)


def _blocks() -> None:
    ids, cache = torch.zeros(2, dtype=torch.int64), torch.empty(4, 2, 16, 8)
    memory = torch.empty((2, 2048), dtype=torch.uint8)
    blocks.gather_blocks(cache, ids, memory, offset=0)
    blocks.scatter_blocks(cache, ids, memory, offset=1)


def _states() -> None:
    """Convolutions of LFM2, and those and the delta rule of Qwen3-Next; of prompts, and of single tokens."""
    halves, steps, weight = (torch.empty(4, 2**19), torch.empty(4, 2**19)), _steps(), torch.empty
    for count in (5, 3):
        qkv, out = torch.empty(count, 8192), torch.empty(count, 2048)
        gated = {"block_size": 16, "gated": True}
        states.short_conv(torch.empty(count, 6144), weight(3, 2048), halves, steps, out, **gated)
        more = {"block_size": 1152, "activated": True, "bias": weight(8192)}
        states.short_conv(qkv, weight(4, 8192), halves, steps, qkv, **more)
    sizes = {"block_size": 1152, "key_heads": 16, "key_dim": 128}
    vectors = (torch.empty(32), torch.empty(32))
    gates, results = torch.empty(3, 64), torch.empty(3, 4096)
    states.gated_delta(qkv, gates, *vectors, halves, steps, results, **sizes)


def _experts() -> None:
    addresses, x = torch.zeros(16, dtype=torch.int64), torch.empty(5, 256)
    room = experts.Workspace.new(5, 256, 128, 4, 16, x.device)
    softmax = ExpertRouting(16, 4, renormalize=True)
    groups = ExpertRouting(16, 4, True, "sigmoid", 4, 2, "best_two", 2.5)
    oai = ExpertActivation("swiglu_oai", 1.702, 7.0)
    of_kinds = (softmax, ExpertActivation(), None), (groups, oai, addresses)
    for routing, activation, biases in of_kinds:
        weights = experts.ExpertWeights(
            addresses, addresses, addresses, torch.bfloat16, 0, 128, biases, biases, biases
        )
        more = {"routing": routing, "activation": activation, "counts": addresses}
        more |= {"correction": None if biases is None else torch.empty(16)}
        experts.experts(x, torch.empty(5, 16), x, weights, room, **more, valid=addresses)
        scales = experts.ExpertScales((addresses, addresses, addresses), (128, 32))
        in_fp8 = replace(weights, scales=scales)
        experts.experts(x, torch.empty(5, 16), x, in_fp8, room, **more, valid=addresses)
    for form, routing in (
        (quantized_experts.Form("rows", True), softmax),
        (quantized_experts.Form("groups", True, 64, 4), replace(softmax, weighs_inputs=True)),
        (quantized_experts.Form("blocks", True, 32, 4, 1, has_blocks=True, per_block=4), softmax),
        (quantized_experts.Form("whole rows", True, 32, 4, has_blocks=True, per_block=4), softmax),
    ):
        _quantized_experts(x, room, routing, form)


def _quantized_experts(
    x: Tensor, room: experts.Workspace, routing: ExpertRouting, form: quantized_experts.Form
) -> None:
    def rounded(rows: int, inputs: int) -> quantized.RoundedRows | quantized.RoundedGroups:
        if form.rounds == 0:
            return quantized.RoundedRows.new(rows, inputs, x.device)
        return quantized.RoundedGroups.new(rows, inputs, form.rounds, x.device)

    addresses = torch.zeros((16, quantized_experts.COLUMNS), dtype=torch.int64)
    gate = quantized_experts.QuantizedMap(addresses, 128, 256, form, True)
    down = replace(gate, outputs=256, inputs=128)
    weighed = torch.empty(20, 256) if routing.weighs_inputs else None
    scratch = quantized_experts.Rounded(
        rounded(20, 256), rounded(20, 128), torch.empty(20, 256), weighed
    )
    weights = quantized_experts.QuantizedExperts(gate, gate, down, 0)
    more = {"routing": routing, "activation": ExpertActivation(), "counts": addresses[:, 0]}
    quantized_experts.quantized_experts(x, torch.empty(5, 16), x, weights, room, scratch, **more)


def main(names: list[str]) -> None:
    """Compiles launches of these names, or all, and prints a line for each kernel and target.

    With `translate` as the first name, those of one size are translated only, before others are compiled, and both
    for one GPU of each vendor.
    """
    targets = TARGETS
    known = launches()
    chosen = names or [*known]
    if names[:1] == ["translate"]:
        targets = {name: TARGETS[name] for name in ("H100", "MI300")}
        with ahead(Compiler(targets, whole=False)) as compiler:
            for launch in launches(all_sizes=False).values():
                launch()
        print(f"{len(compiler.compiled)} kernels for {', '.join(targets)}")
        chosen = names[1:]
    for name in chosen:
        with ahead(Compiler(targets)) as compiler:
            known[name]()
        for key, made in compiler.compiled.items():
            kernel, target = key.split()[0], key.split()[-1]
            print(f"{name}: {kernel} for {target}, {made.metadata.shared} bytes of shared memory")
            if made.metadata.shared > SHARED_MEMORY[target]:
                raise SystemExit(f"{target} has {SHARED_MEMORY[target]} bytes of shared memory")


if __name__ == "__main__":
    main(sys.argv[1:])
