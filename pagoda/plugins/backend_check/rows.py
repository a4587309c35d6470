# SPDX-License-Identifier: Apache-2.0
"""Checks of operations on every row by itself.

Most are made from the method of `GraphBuilder`, or the function of `decoder_operations`, that records the
operation: its values become random rows, its vectors random vectors, its numbers those of `_NUMBERS`. So a new
operation of this kind is checked at once.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pagoda.backend import decoder_operations
from pagoda.backend.base import Backend, HeadNorms
from pagoda.backend.decoder_operations import layer_norm_heads, rotate_heads
from pagoda.backend.graph import Value
from pagoda.backend.norms_over_ranks import norm_by_squares, sum_of_squares
from pagoda.backend.operations import GraphBuilder
from pagoda.backend.relative_attention import columns
from pagoda.plugins.backend_check.subject import (
    ROWS,
    Check,
    Record,
    Subject,
    check_rows,
    ensure,
    outputs,
    random_tensor,
)

WIDTHS = (2, 30, 64, 130, 1026)
_NUMBERS = {"eps": 1e-5, "alpha": 1.702, "limit": 4.0, "cap": 2.0, "period": 16.0, "offset": 1.0}
_NUMBERS |= {"positive": 0.8, "negative": 0.7, "beta": 0.5}
"""Numbers of operations by name; others are 0.3."""
_ONE_COLUMN = {"factors"}
"""Names of values that have one element a row."""
TOLERANCE = 3e-6
_ENDS = (-1e12, -200.0, -20.0, -9.0, -1e-30, 0.0, 1e-30, 9.0, 20.0, 200.0, 1e12)


def row_check(operation: str) -> Check | None:
    """Check of an operation whose arguments are rows, vectors and numbers; None of any other."""
    method = getattr(GraphBuilder, operation, None) or vars(decoder_operations).get(operation)
    if method is None:
        return None
    parameters = list(inspect.signature(method).parameters.items())[1:]
    kinds = {name: parameter.annotation for name, parameter in parameters}
    if not set(kinds.values()) <= {"Value", "Sized", "float"} or "Value" not in kinds.values():
        return None

    def run(subject: Subject) -> str:
        subject.needs(operation)
        for width in WIDTHS:
            _check_width(subject, operation, kinds, width)
        if "positions" not in kinds:
            _check_ends(subject, operation, kinds)
        return f"rows of {', '.join(map(str, WIDTHS))} elements"

    return Check(operation, run)


def _inputs(kinds: dict[str, str], width: int) -> dict[str, Tensor]:
    tensors = {}
    for place, name in enumerate(name for name, kind in kinds.items() if kind == "Value"):
        if name == "positions":
            tensors[name] = torch.arange(ROWS) * 613 % 997
        else:
            tensors[name] = 3 * random_tensor(
                ROWS, 1 if name in _ONE_COLUMN else width, seed=width + place
            )
    return tensors


def _recorder(
    operation: str, kinds: dict[str, str], width: int
) -> Callable[[Backend[Any, Any]], Record]:
    def for_backend(backend: Backend[Any, Any]) -> Record:
        options: dict[str, Any] = {}
        for place, (name, kind) in enumerate(kinds.items()):
            if kind == "Sized":
                options[name] = random_tensor(width, seed=place).to(backend.device)
            elif kind == "float":
                options[name] = _NUMBERS.get(name, 0.3)

        def record(ops: GraphBuilder, **values: Value) -> Any:
            method = getattr(GraphBuilder, operation, None) or vars(decoder_operations)[operation]
            return method(ops, **values, **options)

        return record

    return for_backend


def _check_width(subject: Subject, operation: str, kinds: dict[str, str], width: int) -> None:
    recorder, tensors = _recorder(operation, kinds, width), _inputs(kinds, width)
    tolerance = TOLERANCE * math.sqrt(width)
    check_rows(subject, recorder, tensors, tolerance, f"{operation} of {width} elements")


def _check_ends(subject: Subject, operation: str, kinds: dict[str, str]) -> None:
    """A row that is not finite spoils no other row, and is not hidden."""
    ends = torch.tensor(_ENDS)
    recorder = _recorder(operation, kinds, 2)
    tensors = {
        name: torch.ones(len(ends), 1 if name in _ONE_COLUMN else 2)
        for name, kind in kinds.items()
        if kind == "Value"
    }
    first = next(iter(tensors))
    tensors[first][:, 0] = ends
    (plain,) = outputs(subject.backend, recorder(subject.backend), tensors)
    (expected,) = outputs(subject.reference, recorder(subject.reference), tensors)
    close = torch.isclose(plain, expected, atol=1e-6, rtol=1e-5, equal_nan=True)
    ensure(
        bool(close.all()),
        f"{operation} of {ends[~close.all(1)][:1].tolist()} differs from reference",
    )
    tensors[first][3, 0] = math.nan
    (spoiled,) = outputs(subject.backend, recorder(subject.backend), tensors)
    ensure(bool(spoiled[3].isnan().any()), f"{operation} hides a NaN")
    others = [row for row in range(len(ends)) if row != 3]
    same = torch.isclose(spoiled[others], plain[others], atol=0, rtol=0, equal_nan=True)
    ensure(bool(same.all()), f"{operation} of a row with a NaN changes other rows")


def _select_rows(subject: Subject) -> str:
    subject.needs("select_rows")
    x = random_tensor(ROWS, 64)
    for rows in ([], [0], [40, 3, 17], list(range(ROWS))):
        chosen = torch.tensor(rows, dtype=torch.int64)

        def record(ops: GraphBuilder, x: Value, rows: Value) -> Value:
            return ops.select_rows(x, rows)

        (out,) = outputs(subject.backend, record, {"x": x, "rows": chosen})
        ensure(torch.equal(out, x[chosen]), f"select_rows of {len(rows)} rows gives others")
    numbers = torch.arange(ROWS) * 1_000_003

    def of_positions(ops: GraphBuilder, rows: Value, positions: Value) -> Value:
        return ops.select_rows(positions, rows)

    step = {"rows": torch.tensor([40, 3, 17]), "positions": numbers}
    (out,) = outputs(subject.backend, of_positions, step)
    ensure(
        torch.equal(out.flatten(), numbers[[40, 3, 17]]),
        "select_rows of whole numbers gives others",
    )
    return "none, some and all rows, in any order"


def _norms_over_ranks(subject: Subject) -> str:
    subject.needs("sum_of_squares", "norm_by_squares")
    for queries, keys in ((64, 32), (130, 30), (9, 3)):
        rows = {"x": random_tensor(ROWS, queries + 2 * keys, seed=queries)}

        def for_backend(
            backend: Backend[Any, Any], queries: int = queries, keys: int = keys
        ) -> Record:
            vectors = [random_tensor(n, seed=n).to(backend.device) for n in (queries, keys)]

            def record(ops: GraphBuilder, x: Value) -> list[Value]:
                squares = sum_of_squares(ops, x, queries=queries, keys=keys)
                whole = {"all_queries": 2 * queries, "all_keys": 2 * keys}
                return [
                    squares,
                    norm_by_squares(
                        ops, x, squares, HeadNorms(vectors[0], vectors[1], 1e-5), **whole
                    ),
                ]

            return record

        check_rows(subject, for_backend, rows, 2e-5, f"norms of {queries} and {keys} elements")
    return "sums of squares, and norms of queries and keys by them"


def _heads(subject: Subject) -> str:
    subject.needs("layer_norm_heads", "rotate_heads", "rotary_table")
    positions = torch.arange(ROWS) * 13
    for head_dim, rotated in ((2, 2), (24, 8), (64, 64)):
        count = 5 * head_dim
        tensors = {"x": random_tensor(ROWS, 7 * head_dim, seed=head_dim), "positions": positions}

        def for_backend(
            backend: Backend[Any, Any],
            head_dim: int = head_dim,
            rotated: int = rotated,
            count: int = count,
        ) -> Record:
            vectors = [random_tensor(count, seed=i).to(backend.device) for i in (1, 2)]
            frequencies = torch.logspace(0, -2, rotated // 2).to(backend.device)

            def record(ops: GraphBuilder, x: Value, positions: Value) -> list[Value]:
                sizes = {"elements": count, "head_dim": head_dim}
                table = ops.rotary_table(positions, frequencies, 1.0)
                return [
                    layer_norm_heads(ops, x, *vectors, head_dim=head_dim, eps=1e-5),
                    rotate_heads(ops, x, table, **sizes),
                ]

            return record

        check_rows(subject, for_backend, tensors, 1e-4, f"heads of {head_dim} elements")
    return "layer norms and rotation of the first heads of rows"


def _columns(subject: Subject) -> str:
    subject.needs("columns")
    tensors = {"x": random_tensor(ROWS, 130)}
    for first, count in ((0, 130), (3, 1), (65, 64)):

        def for_backend(_: Backend[Any, Any], first: int = first, count: int = count) -> Record:
            return lambda ops, x: columns(ops, x, first, count)

        check_rows(subject, for_backend, tensors, 0.0, f"{count} columns from {first} on")
    return "some columns of rows"


def _rotary_table(subject: Subject) -> str:
    subject.needs("rotary_table")
    positions = torch.arange(ROWS) * 2_003

    def for_backend(backend: Backend[Any, Any]) -> Record:
        frequencies = torch.logspace(0, -4, 16).to(backend.device)

        def record(ops: GraphBuilder, positions: Value) -> list[Value]:
            return list(ops.rotary_table(positions, frequencies, 1.25))

        return record

    check_rows(subject, for_backend, {"positions": positions}, 1e-4, "rotary tables")
    return f"positions up to {int(positions[-1])}"


EXPLICIT = {
    "select_rows": Check("select_rows", _select_rows),
    "sum_of_squares": Check("sum_of_squares, norm_by_squares", _norms_over_ranks),
    "norm_by_squares": Check("sum_of_squares, norm_by_squares", _norms_over_ranks),
    "columns": Check("columns", _columns),
    "rotary_table": Check("rotary_table", _rotary_table),
    "layer_norm_heads": Check("layer_norm_heads, rotate_heads", _heads),
    "rotate_heads": Check("layer_norm_heads, rotate_heads", _heads),
}
"""Checks of operations whose arguments are no rows, vectors and numbers."""
