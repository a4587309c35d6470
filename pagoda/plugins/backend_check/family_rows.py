# SPDX-License-Identifier: Apache-2.0
"""Checks of operations on rows that one or two families of decoders need."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from pagoda.backend import family_operations as family
from pagoda.backend.base import Backend
from pagoda.backend.graph import Value
from pagoda.backend.operations import GraphBuilder
from pagoda.plugins.backend_check.subject import (
    ROWS,
    Check,
    Record,
    Subject,
    check_rows,
    random_tensor,
)


class _Case(NamedTuple):
    """An operation of rows of so many elements, and of vectors."""

    widths: tuple[int, ...]
    vectors: tuple[int, ...]
    record: Callable[..., Value]


_CASES: Mapping[str, _Case] = {
    "rms_norm_heads": _Case(
        (84,),
        (48,),
        lambda ops, x, w: family.rms_norm_heads(ops, x, w, first=24, head_dim=12, eps=1e-5),
    ),
    "sparse_mixing": _Case((16,), (), lambda ops, x: family.sparse_mixing(ops, x, 0.2)),
    "expert_weights": _Case(
        (9,),
        (9, 9),
        lambda ops, x, f, c: family.expert_weights(
            ops, x, f, c, per_token=3, renormalize=True, kept=6
        ),
    ),
    "above_deviations": _Case((130,), (), lambda ops, x: family.above_deviations(ops, x, 0.5)),
    "match_magnitude": _Case(
        (130, 130), (), lambda ops, x, y: family.match_magnitude(ops, x, y, 1e-5)
    ),
    "scale_heads": _Case((120, 5), (), lambda ops, x, f: family.scale_heads(ops, x, f, 24)),
    "join_columns": _Case((130, 7), (), family.join_columns),
    "mix_streams": _Case((90, 9), (), lambda ops, x, c: family.mix_streams(ops, x, c, 3)),
    "correct_streams": _Case(
        (90, 30, 3), (), lambda ops, x, y, c: family.correct_streams(ops, x, y, c, 3)
    ),
}


def _check(operation: str, case: _Case) -> Check:
    names = [f"x{place}" for place in range(len(case.widths))]

    def for_backend(backend: Backend[Any, Any]) -> Record:
        vectors = [
            random_tensor(size, seed=i).to(backend.device) for i, size in enumerate(case.vectors)
        ]

        def record(ops: GraphBuilder, **values: Value) -> Value:
            return case.record(ops, *(values[name] for name in names), *vectors)

        return record

    def run(subject: Subject) -> str:
        subject.needs(operation)
        tensors: dict[str, Tensor] = {
            name: random_tensor(ROWS, width, seed=width)
            for name, width in zip(names, case.widths, strict=True)
        }
        check_rows(subject, for_backend, tensors, 2e-5, operation)
        return f"rows of {', '.join(map(str, case.widths))} elements"

    return Check(operation, run)


EXPLICIT = {operation: _check(operation, case) for operation, case in _CASES.items()}
"""Checks by operation."""
