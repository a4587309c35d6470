# SPDX-License-Identifier: Apache-2.0
"""Checks of what a backend says of its memory, of which KV gets what is left."""

from __future__ import annotations

from typing import Any

import torch

from pagoda.backend.base import Backend, StepInput
from pagoda.backend.operations import GraphBuilder
from pagoda.backend.weights import DenseWeight
from pagoda.plugins.backend_check.subject import Check, Subject, ensure, ensure_same

_SHAPE = (2048, 4096)
"""Outputs and inputs of a weight that is larger than what else a process takes meanwhile."""
_WIDTH, _INNER = 64, 512


def _memory(subject: Subject) -> str:
    """Memory is free before weights are prepared, and taken behind that."""
    subject.needs("linear")  # whole models take it later: `serving` checks these
    backend = subject.backend
    memory = backend.memory
    ensure(isinstance(memory.on_host, bool), f"memory.on_host is {memory.on_host!r}")
    free, before = memory.free_bytes(), memory.taken_bytes()
    ensure(free > 0, f"memory.free_bytes() is {free}")
    wanted = _SHAPE[0] * _SHAPE[1] * subject.dense.itemsize
    held = backend.prepare_linear(
        [DenseWeight(torch.ones(_SHAPE, dtype=subject.dense))], None, subject.dense
    )
    taken = memory.taken_bytes() - before
    ensure(
        taken >= wanted * 3 // 4,
        f"memory.taken_bytes() grows by {taken} with a weight of {wanted} bytes",
    )
    return f"{free >> 20} MiB free, {taken >> 20} taken for a weight of {held.outputs} by {held.inputs}"


def _profile(subject: Subject) -> str:
    """A step takes its results and what lies between, more with more tokens; asking changes nothing."""
    subject.needs("linear")
    backend = subject.backend
    compiled = _compiled(backend, subject.dense)
    small, large = (
        compiled.profile(StepInput({"x": torch.zeros(rows, _WIDTH)}), ["out"]) for rows in (16, 512)
    )
    for rows, found in ((16, small), (512, large)):
        least = rows * (_INNER + _WIDTH) * torch.float32.itemsize
        ensure(
            isinstance(found, int) and found >= least,
            f"profile gives {found} bytes for {rows} tokens, whose values alone take {least}",
        )
    ensure(large > small, f"profile gives {large} bytes for 512 tokens, and {small} for 16")
    step: StepInput[Any] = StepInput({"x": torch.ones(16, _WIDTH)})
    (before,) = compiled(step, ["out"])
    kept = before.clone()
    compiled.profile(step, ["out"])
    ensure_same(before.cpu(), kept.cpu(), "a result, behind a profile of its step,")
    ensure_same(compiled(step, ["out"])[0].cpu(), kept.cpu(), "a step behind its profile")
    return f"{small >> 10} KiB for 16 tokens, {large >> 10} for 512"


def _compiled(backend: Backend[Any, Any], dtype: torch.dtype) -> Any:
    """A wide layer between two narrow values."""
    ops = GraphBuilder(backend.group)
    up, down = (
        backend.prepare_linear([DenseWeight(torch.ones(shape) / 64)], None, dtype)
        for shape in ((_INNER, _WIDTH), (_WIDTH, _INNER))
    )
    ops.result("out", ops.linear(ops.linear(ops.input("x", _WIDTH), up), down))
    return backend.compile(ops.build())


FURTHER = (
    Check("memory", _memory),
    Check("profile of steps", _profile),
)
