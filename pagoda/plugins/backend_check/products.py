# SPDX-License-Identifier: Apache-2.0
"""Checks of linear layers, embeddings, adapters and experts, in all formats of weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pagoda.backend.base import (
    Backend,
    ExpertActivation,
    Experts,
    UnsupportedError,
)
from pagoda.backend.block_rounding import quantize_blocks
from pagoda.backend.fp8 import E4M3, to_e4m3
from pagoda.backend.graph import Value
from pagoda.backend.lattices import point_codes
from pagoda.backend.low_rank import LowRank, LowRankMaps, low_rank_dtype
from pagoda.backend.operations import GraphBuilder
from pagoda.backend.reference.quantized import quantize_int4, quantize_int8
from pagoda.backend.weights import (
    BlockWeight,
    DenseWeight,
    Fp8Weight,
    GroupedWeight,
    LinearWeight,
    dequantize,
)
from pagoda.checkpoints.expert_routing import ExpertRouting
from pagoda.checkpoints.gguf.config import BLOCKS
from pagoda.checkpoints.weight_formats import BlockFormat
from pagoda.plugins.backend_check.subject import (
    ROWS,
    Check,
    FailedError,
    LackingError,
    Record,
    Subject,
    check_rows,
    ensure,
    ensure_close,
    ensure_same,
    outputs,
    random_tensor,
)

DENSE = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TOLERANCE = {torch.float32: 5e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
_SHAPES = ((1, 64), (33, 96), (200, 320))
"""Outputs and inputs of linear layers."""
_NUMBERS_OF_ROWS = (1, 17, 64, 65, 129, 520)
"""Rows of steps from a single token to a long prompt, at which backends are likely to change tiles."""


def weights_of(weight_format: str, outputs: int, inputs: int) -> Iterator[tuple[str, LinearWeight]]:
    """Weights [outputs, inputs] that a backend takes which has a format, with words for each."""
    values = random_tensor(outputs, inputs, seed=outputs) / 8
    if weight_format in DENSE:
        yield weight_format, DenseWeight(values.to(DENSE[weight_format]))
    elif weight_format == "int8":
        yield "int8", quantize_int8(values, symmetric=True)
        yield "int8 with zero points", quantize_int8(values, symmetric=False)
    elif weight_format == "fp8":
        yield "fp8 with a scale for each output", fp8_weight(outputs, inputs, None)
        yield "fp8 with scales of groups of 64", fp8_weight(outputs, inputs, 64)
        yield "fp8 with scales of groups of 32", fp8_weight(outputs, inputs, 32)
    elif weight_format == "int4" and inputs % 64 == 0:
        plain = quantize_int4(values, 32)
        yield "int4 in groups of 32", plain
        yield "int4 in groups of 64", quantize_int4(values, 64)
        order = torch.randperm(inputs, generator=torch.Generator().manual_seed(1))
        offsets = (random_tensor(*plain.scales.shape) / 8).half()
        yield "int4 with offsets and act-order", replace(plain, offsets=offsets, act_order=order)
        yield "8 bits in groups", _eight_bits(outputs, inputs)


def _eight_bits(outputs: int, inputs: int) -> GroupedWeight:
    codes = torch.randint(
        0, 256, (outputs, inputs), generator=torch.Generator().manual_seed(2), dtype=torch.uint8
    )
    scales = (random_tensor(outputs, inputs // 32) / 800).half()
    return GroupedWeight(codes, scales, None, bits=8, group_size=32)


def fp8_weight(outputs: int, inputs: int, group_size: int | None, seed: int = 4) -> Fp8Weight:
    """A weight of random 8-bit floats, the highest among them, whose last group may be cut off."""
    values = to_e4m3(random_tensor(outputs, inputs, seed=seed) * 100)
    groups = -(-inputs // (group_size or inputs))
    scales = (1 + random_tensor(outputs, groups, seed=seed).abs()) / 800
    return Fp8Weight(values, scales, group_size)


def block_weight(stored_format: BlockFormat, outputs: int, inputs: int) -> BlockWeight:
    """A weight of random codes, scales and minima in blocks of ggml."""
    generator = torch.Generator().manual_seed(3)
    codes = random_codes(stored_format, outputs, inputs, generator)
    groups, blocks = inputs // stored_format.group_size, inputs // stored_format.block_size

    def halves(count: int) -> Tensor:
        drawn: Tensor = torch.randn((outputs, count), generator=generator) / 2**stored_format.bits
        return drawn.half()

    if not stored_format.integer_scales:
        minima = halves(groups) if stored_format.minima else None
        return BlockWeight(stored_format, codes, halves(groups), minima, None, None)
    if stored_format.scales_are_floats:
        drawn = torch.randint(0, 127, (outputs, groups), generator=generator, dtype=torch.uint8)
        return BlockWeight(stored_format, codes, drawn.view(E4M3), None, halves(blocks), None)
    low, high = scale_limits(stored_format)

    def integers() -> Tensor:
        drawn = torch.randint(low, high + 1, (outputs, groups), generator=generator)
        return (drawn if stored_format.lattice is None else drawn | 1).to(torch.int8)

    has_minima = stored_format.minima
    return BlockWeight(
        stored_format,
        codes,
        integers(),
        integers() if has_minima else None,
        halves(blocks) / high,
        halves(blocks) / high if has_minima else None,
    )


def scale_limits(stored_format: BlockFormat) -> tuple[int, int]:
    """The lowest and the highest integer of a scale; those of points are odd."""
    if stored_format.lattice is not None:
        return 1, 15 if stored_format.lattice.sign_inputs == 32 else 31
    if stored_format.bits == 2:
        return 0, 15
    return (0, 63) if stored_format.minima else (-128, 127)


def random_codes(
    stored_format: BlockFormat, outputs: int, inputs: int, generator: torch.Generator
) -> Tensor:
    """Codes [outputs, inputs] uint8 that a format can hold."""

    def drawn(highest: int, count: int) -> Tensor:
        return torch.randint(0, highest, (outputs, count), generator=generator)

    lattice = stored_format.lattice
    if lattice is None:
        kinds = 3 if stored_format.trits else 2**stored_format.bits
        return drawn(kinds, inputs).to(torch.uint8)
    signs = drawn(2, inputs // lattice.sign_inputs).to(torch.uint8)
    return point_codes(lattice, drawn(lattice.points, inputs // lattice.inputs), signs)


def format_checks() -> list[Check]:
    names = (*DENSE, "int8", "int4", "fp8")
    checks = [Check(f"weights of {name}", _format_check(name)) for name in names]
    return [*checks, Check("weights in blocks of GGUF", _block_check)]


def _format_check(name: str) -> Callable[[Subject], str]:
    def run(subject: Subject) -> str:
        counted = 0
        has = name in subject.backend.capabilities.weight_formats
        for num_outputs, inputs in _SHAPES:
            for words, weight in weights_of(name, num_outputs, inputs):
                if not has:
                    _expect_refusal(subject, name, weight)
                for dtype in _dtypes(subject, name):
                    what = f"{words}, {num_outputs} of {inputs} beside {dtype}"
                    _check_weight(subject, weight, dtype, what)
                counted += 1
        return f"{counted} weights: products, argmax, embedding, several parts, bias"

    return run


def _dtypes(subject: Subject, name: str) -> list[torch.dtype]:
    """Dtypes of models that weights of a format are checked in."""
    if name == "fp8":  # inputs are rounded as for dense weights
        known = subject.backend.capabilities.weight_formats
        return [dtype for dense, dtype in DENSE.items() if dense in known]
    return [DENSE.get(name, torch.float32)]


def _block_check(subject: Subject) -> str:
    formats, lacking = subject.backend.capabilities.weight_formats, list[str]()
    for name, stored_format in BLOCKS.items():
        weight = block_weight(stored_format, 70, 512)
        if not {"int8", "int4"} <= {*formats}:
            _expect_refusal(subject, "int8 and int4", weight)
        try:  # it may have other quantized weights, and not these
            subject.backend.prepare_linear([weight], None, torch.float32)
        except UnsupportedError as error:
            lacking.append(name)
            if len(lacking) == len(BLOCKS):
                raise LackingError(str(error).removesuffix(".")) from None
            continue
        _check_weight(subject, weight, torch.float32, name)
    there = ", ".join(name for name in BLOCKS if name not in lacking)
    return f"{there}; lacks {', '.join(lacking)}" if lacking else there


def _expect_refusal(subject: Subject, name: str, weight: LinearWeight) -> None:
    """Raises LackingError: the backend refuses a weight of a format that it lacks; FailedError: it takes it."""
    try:
        subject.backend.prepare_linear([weight], None, torch.float32)
    except UnsupportedError as error:
        raise LackingError(str(error).removesuffix(".")) from None
    raise FailedError(
        f"its capabilities have no weights of {name}, but prepare_linear takes them without UnsupportedError"
    )


def _check_weight(subject: Subject, weight: LinearWeight, dtype: torch.dtype, what: str) -> None:
    subject.needs("linear")
    num_outputs, inputs = dequantize(weight).shape
    x = random_tensor(ROWS, inputs, seed=7)
    if inputs > 64:
        x[5] *= 1e4
        x[6] = 0
    bias = random_tensor(2 * num_outputs, seed=5)
    tolerance = TOLERANCE[dtype]

    def for_backend(backend: Backend[Any, Any]) -> Record:
        alone = backend.prepare_linear([weight], None, dtype)
        joined = backend.prepare_linear([weight, weight], bias.to(backend.device), dtype)

        def record(ops: GraphBuilder, x: Value) -> list[Value]:
            return [ops.linear(x, alone), ops.linear(x, joined)]

        return record

    scale = dequantize(weight).abs().max().item() * inputs**0.5
    usual = torch.arange(ROWS) != 5
    rows = {"x": torch.where(usual[:, None], x, x / 1e4)}
    check_rows(subject, for_backend, rows, tolerance * max(1.0, scale), f"linear, {what}")
    _check_argmax(subject, weight, dtype, x, what)
    if getattr(weight, "act_order", None) is None:
        _check_embedding(subject, weight, dtype, what)


def _check_argmax(
    subject: Subject, weight: LinearWeight, dtype: torch.dtype, x: Tensor, what: str
) -> None:
    subject.needs("linear_argmax")
    spoiled = x.clone()
    spoiled[9, 0] = torch.nan
    held = subject.backend.prepare_linear([weight], None, dtype)

    def record(ops: GraphBuilder, x: Value) -> list[Value]:
        return [ops.linear(x, held), ops.linear_argmax(x, held, first_id=1000)]

    logits, found = outputs(subject.backend, record, {"x": spoiled})
    sound = [row for row in range(ROWS) if row != 9]
    best = logits[sound].argmax(1)
    highest = found[sound, 1].int().view(torch.float32)
    flags = int(found[9, 2]) == 0 and bool((found[sound, 2] == 1).all())
    ensure(flags, f"linear_argmax, {what}: flags do not say which rows are finite")
    same_index = torch.equal(found[sound, 0] - 1000, best)
    ensure(same_index, f"linear_argmax, {what}: another index than of linear's highest output")
    same_value = torch.equal(highest, logits[sound].amax(1))
    ensure(same_value, f"linear_argmax, {what}: another value than linear's highest output")


def _check_embedding(subject: Subject, weight: LinearWeight, dtype: torch.dtype, what: str) -> None:
    subject.needs("embedding")
    size = len(dequantize(weight))
    ids = torch.arange(ROWS) * 7 % (size + 20)
    held = subject.backend.prepare_linear([weight], None, dtype)

    def record(ops: GraphBuilder, token_ids: Value) -> Value:
        return ops.embedding(token_ids, held, first_id=10, vocab_size=size + 20)

    (rows,) = outputs(subject.backend, record, {"token_ids": ids})
    own = (ids >= 10) & (ids < size + 10)
    expected = torch.zeros_like(rows)
    expected[own] = dequantize(weight)[ids[own] - 10]
    ensure_close(rows, expected, 1e-6, f"embedding, {what}")
    try:
        outputs(subject.backend, record, {"token_ids": ids + size + 20})
    except IndexError:
        return
    raise FailedError(
        f"embedding, {what}, takes a token that is not in the vocabulary without IndexError"
    )


def _quantize(subject: Subject) -> str:
    formats = subject.backend.capabilities.weight_formats
    if not {"int8", "int4"} & {*formats}:
        raise LackingError("its capabilities have weights of neither int8 nor int4")
    values = random_tensor(70, 192, seed=1)
    pairs: list[tuple[str, LinearWeight, LinearWeight]] = []
    if "int8" in formats:
        for symmetric in (False, True):
            own = subject.backend.quantize_int8(values, symmetric=symmetric)
            pairs.append(("int8", own, quantize_int8(values, symmetric=symmetric)))
    if "int4" in formats:
        own_groups = subject.backend.quantize_int4(values, 64)
        pairs.append(("int4", own_groups, quantize_int4(values, 64)))
        of_rows = BlockFormat(4, 32, 192, integer_scales=True, minima=True, whole_rows=True)
        own_rows = subject.backend.quantize_blocks(values, of_rows)
        pairs.append(("blocks", own_rows, quantize_blocks(values, of_rows)))
    for name, own_weight, expected in pairs:
        ensure_close(dequantize(own_weight), dequantize(expected), 1e-6, f"quantize_{name}")
    return ", ".join(name for name, *_ in pairs)


def _adapters(subject: Subject) -> str:
    subject.needs("add_low_rank")
    x, out = random_tensor(ROWS, 96), random_tensor(ROWS, 80, seed=1)
    adapters = torch.arange(ROWS) % 4 - 1
    for name in subject.backend.capabilities.weight_formats:
        if name not in DENSE:
            continue
        dtype = low_rank_dtype(DENSE[name])

        def for_backend(backend: Backend[Any, Any], dtype: torch.dtype = dtype) -> Record:
            maps = LowRankMaps(96, (48, 32), dtype)
            for adapter, rank in enumerate((4, 16, 16)):
                parts = [
                    LowRank(
                        random_tensor(rank, 96, seed=adapter) / 8,
                        random_tensor(size, rank, seed=size) / 4,
                        0.7,
                    )
                    for size in (48, 32)
                ]
                backend.set_low_rank(maps, adapter, [parts[0], None if adapter == 1 else parts[1]])
            backend.remove_low_rank(maps, 2)

            def record(ops: GraphBuilder, out: Value, x: Value, adapters: Value) -> Value:
                return ops.add_low_rank(ops.scale(out, 1.0), x, adapters, maps)

            return record

        tensors = {"out": out, "x": x, "adapters": adapters}
        tolerance = 3e-2 if dtype == torch.bfloat16 else 2e-5
        check_rows(subject, for_backend, tensors, tolerance, f"adapters in {dtype}")
    return "three adapters, one with a part less, one removed"


_ROUTINGS = {
    "the usual": ExpertRouting(8, 2, renormalize=True),
    "without renormalizing": ExpertRouting(8, 3, renormalize=False, scaling_factor=2.5),
    "sigmoids in groups": ExpertRouting(
        8, 2, True, "sigmoid", num_groups=4, groups_per_token=2, group_score="best_two"
    ),
    "weighed inputs": ExpertRouting(8, 1, False, "sigmoid", weighs_inputs=True),
}
_GIVEN = {
    f"given weights, {it.kind}": (ExpertRouting(8, 2, False, "given"), it)
    for it in (
        ExpertActivation("gelu_tanh"),
        ExpertActivation("relu"),
        ExpertActivation("clamped_silu", limit=0.5),
    )
}
"""Cases of models whose weights of experts are worked out apart, by `expert_weights`."""
_FP8_EXPERTS = "weights of fp8"
_ACTIVATIONS = (
    ExpertActivation(),
    ExpertActivation("swiglu_oai", 1.702, 7.0),
)


def _experts(subject: Subject) -> str:
    subject.needs("experts")
    x, logits = random_tensor(ROWS, 64), random_tensor(ROWS, 8, seed=1)
    correction = random_tensor(8, seed=2)
    routings = dict(_ROUTINGS)
    if "fp8" in subject.backend.capabilities.weight_formats:
        routings[_FP8_EXPERTS] = ExpertRouting(8, 2, renormalize=True)
    cases = {
        words: (routing, _ACTIVATIONS[number % len(_ACTIVATIONS)])
        for number, (words, routing) in enumerate(routings.items())
    }
    if "expert_weights" not in subject.backend.capabilities.lacks_operations:
        cases |= _GIVEN
    for words, (routing, activation) in cases.items():
        counts: list[Tensor] = []
        stored_format = _expert_in_fp8 if words == _FP8_EXPERTS else _dense_expert

        def for_backend(
            backend: Backend[Any, Any],
            routing: ExpertRouting = routing,
            activation: ExpertActivation = activation,
            counts: list[Tensor] = counts,
            stored_format: Callable[[int, int, int], LinearWeight] = stored_format,
        ) -> Record:
            def maps(outputs: int, inputs: int, seed: int) -> tuple[Any, ...]:
                return tuple(
                    backend.prepare_linear(
                        [stored_format(outputs, inputs, seed + expert)], None, subject.dense
                    )
                    for expert in range(2, 7)
                )

            counts.append(torch.zeros(8, dtype=torch.int64, device=backend.device))
            is_corrected = routing.scores == "sigmoid" and routing.num_groups > 1
            held: Experts[Any] = Experts(
                routing,
                2,
                maps(48, 64, 10),
                maps(48, 64, 20),
                maps(64, 48, 30),
                counts[-1],
                activation,
                correction.to(backend.device) if is_corrected else None,
            )

            def record(ops: GraphBuilder, x: Value, logits: Value) -> Value:
                return ops.experts(x, logits, held)

            return record

        tensors, tolerance = {"x": x, "logits": logits}, TOLERANCE[subject.dense]
        check_rows(subject, for_backend, tensors, tolerance, f"experts, {words}")
        for backend in subject.both:
            outputs(backend, for_backend(backend), tensors)
        own, expected = (each.cpu() for each in counts[-2:])
        ensure_same(own, expected, f"experts, {words}: the number of tokens of each expert")
    return ", ".join(cases)


def _dense_expert(outputs: int, inputs: int, seed: int) -> LinearWeight:
    return DenseWeight(random_tensor(outputs, inputs, seed=seed) / 8)


def _expert_in_fp8(outputs: int, inputs: int, seed: int) -> LinearWeight:
    return fp8_weight(outputs, inputs, 32, seed)


_LINEAR = Check("weights of float32", _format_check("float32"))
EXPLICIT = {
    **dict.fromkeys(("linear", "linear_argmax", "embedding"), _LINEAR),
    "add_low_rank": Check("add_low_rank", _adapters),
    "experts": Check("experts", _experts),
}
"""Checks of operations with weights; those of linear layers are made for every format."""


def _any_number_of_rows(subject: Subject) -> str:
    """Backends choose tiles by the number of rows: a row's bits are the same in all of them."""
    subject.needs("linear", "rms_norm")
    formats = [name for name in DENSE if name in subject.backend.capabilities.weight_formats]
    x = random_tensor(max(_NUMBERS_OF_ROWS), 256, seed=3)
    norm, bias = 1 + random_tensor(256, seed=4) / 8, random_tensor(70, seed=5)
    for name in formats:
        weight = DenseWeight((random_tensor(70, 256, seed=6) / 8).to(DENSE[name]))
        device = subject.backend.device
        held = subject.backend.prepare_linear([weight], bias.to(device), DENSE[name])
        of_norm = norm.to(device)

        def record(
            ops: GraphBuilder, x: Value, held: Any = held, norm: Any = of_norm
        ) -> list[Value]:
            return [ops.linear(x, held), ops.linear(ops.rms_norm(x, norm, 1e-6), held)]

        whole = outputs(subject.backend, record, {"x": x})
        for count in _NUMBERS_OF_ROWS:
            some = outputs(subject.backend, record, {"x": x[:count]})
            for kind, own, all_rows in zip(("", " behind a norm"), some, whole, strict=True):
                what = f"linear of {name}{kind}, {count} of {len(x)} rows,"
                ensure_same(own, all_rows[:count], what)
    counts = ", ".join(map(str, _NUMBERS_OF_ROWS))
    return f"{', '.join(formats)}: {counts} rows, also behind a norm"


ANY_ROWS = Check("linear, any number of rows", _any_number_of_rows)
QUANTIZE = Check("quantize_int8, quantize_int4, quantize_blocks", _quantize)
