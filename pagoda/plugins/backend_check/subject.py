# SPDX-License-Identifier: Apache-2.0
"""The backend that is checked, beside the reference, and what a check may find."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pagoda.backend.base import Backend, TokenBatch
from pagoda.backend.graph import Value
from pagoda.backend.reference.backend import ReferenceBackend
from pagoda.backend.single import compute
from pagoda.devices import BackendEntry
from pagoda.parallel.collectives import HostGroup

PIECES = ((0, 1), (1, 2), (7, 5), (24, 17))
"""First row and number of rows of steps that compute a part of `ROWS`."""
ROWS = 41
BROKEN_ROW = 3
"""Row of `ROWS` that becomes NaN, beside which the others must stay as they are."""
THREADS = (1, 3)
"""Numbers of threads of host backends with which rows must have the same bits in any company."""


class FailedError(Exception):
    """The backend does not do what it should; the message is one sentence."""


class LackingError(Exception):
    """The backend says that it lacks something, and refuses it; the message is one sentence."""


@dataclass(frozen=True)
class Subject:
    """A backend by name, with the function that opens it as a rank of a group."""

    name: str
    entry: BackendEntry
    open: Callable[[HostGroup], Backend[Any, Any]]
    backend: Backend[Any, Any]
    reference: ReferenceBackend

    @property
    def both(self) -> tuple[Backend[Any, Any], Backend[Any, Any]]:
        return self.backend, self.reference

    @property
    def dense(self) -> torch.dtype:
        """Number format of dense weights that the backend has, float32 if it can be."""
        known = self.backend.capabilities.weight_formats
        names = ("float32", "bfloat16", "float16")
        found: torch.dtype = getattr(torch, next((n for n in names if n in known), "float32"))
        return found

    def needs(self, *operations: str) -> None:
        """Raises LackingError: the backend says that it lacks one of some operations, or computes none alone."""
        if self.backend.capabilities.whole_models:
            raise LackingError("its programs are whole models")
        for operation in operations:
            if operation in self.backend.capabilities.lacks_operations:
                raise LackingError(f"its capabilities name {operation} in lacks_operations")


@dataclass(frozen=True)
class Check:
    name: str
    run: Callable[[Subject], str]
    """Says in a few words what was compared; raises FailedError, LackingError, or what the backend does."""


def random_tensor(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def batch_of_spans(spans: Sequence[tuple[int, int, list[int]]]) -> TokenBatch:
    """A step of (tokens computed before, tokens computed now, block ids) of each sequence.

    Entries of block tables past a sequence's own name block 0.
    """
    width = max(len(blocks) for _, _, blocks in spans) + 1
    counts = torch.tensor([count for _, count, _ in spans])
    positions = torch.cat([torch.arange(done, done + count) for done, count, _ in spans])
    return TokenBatch(
        token_ids=torch.zeros_like(positions),
        positions=positions,
        sequence_ids=torch.repeat_interleave(counts),
        query_lens=counts,
        context_lens=torch.tensor([done + count for done, count, _ in spans]),
        block_tables=(torch.tensor([b + [0] * (width - len(b)) for _, _, b in spans]),),
    )


def ensure(holds: bool, sentence: str) -> None:
    """Raises FailedError unless something holds."""
    if not holds:
        raise FailedError(sentence)


def ensure_close(actual: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    """Raises FailedError: two tensors differ by more than a tolerance, absolute and relative, or in kind."""
    ensure(
        actual.shape == expected.shape and actual.dtype == expected.dtype,
        f"{what} is {list(actual.shape)} of {actual.dtype}, not {list(expected.shape)} of {expected.dtype}",
    )
    close = torch.isclose(actual, expected, atol=tolerance, rtol=tolerance, equal_nan=True)
    if not bool(close.all()):
        worst = (actual.double() - expected.double()).abs().nan_to_num(torch.inf).max().item()
        raise FailedError(
            f"{what}: {int((~close).sum())} of {close.numel()} elements differ from reference, by {worst:.2g} at "
            f"most, where {tolerance:.2g} is allowed"
        )


def ensure_same(actual: Tensor, expected: Tensor, what: str) -> None:
    """Raises FailedError: two tensors differ in a bit, NaN apart."""
    same = actual.shape == expected.shape and actual.dtype == expected.dtype
    if same and actual.is_floating_point():
        # Beside the values, which NaN has none of, -0 and 0 are told apart.
        same = torch.equal(actual.isnan(), expected.isnan()) and torch.equal(
            actual.nan_to_num(1.0).signbit(), expected.nan_to_num(1.0).signbit()
        )
    same = same and bool(torch.isclose(actual, expected, atol=0, rtol=0, equal_nan=True).all())
    ensure(same, f"{what} has other bits")


Record = Callable[..., Value | Sequence[Value]]


def outputs(
    backend: Backend[Any, Any],
    record: Record,
    tensors: Mapping[str, Tensor],
    metadata: object = None,
) -> list[Tensor]:
    """Results of a few operations in host memory; their inputs must stay as they are.

    Raises FailedError: an input was written to.
    """
    given = {name: tensor.clone() for name, tensor in tensors.items()}
    results = compute(backend, record, given, metadata)
    for name, tensor in tensors.items():
        ensure_same(given[name].float(), tensor.float(), f"the input {name}, which was written to,")
    several = [results] if isinstance(results, Tensor) else results
    return [each.cpu() for each in several]


def check_rows(
    subject: Subject,
    record: Callable[[Backend[Any, Any]], Record],
    tensors: Mapping[str, Tensor],
    tolerance: float,
    what: str,
) -> None:
    """Compares operations on `ROWS` rows with reference, and with the backend's own bits of fewer rows.

    `record` makes a recorder with a backend's own weights. Rows of another order have the same bits, too, and so
    have those beside a row of NaN.
    """
    own = record(subject.backend)
    expected = outputs(subject.reference, record(subject.reference), tensors)
    mixed = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))
    threads = torch.get_num_threads()
    try:
        for num_threads in THREADS:
            torch.set_num_threads(num_threads)
            whole = outputs(subject.backend, own, tensors)
            for actual, wanted in zip(whole, expected, strict=True):
                ensure_close(actual, wanted, tolerance, what)
            for first, size in PIECES:
                rows = torch.arange(first, first + size)
                _check_part(subject, own, tensors, whole, rows, f"{what}, {size} of {ROWS} rows,")
            _check_part(subject, own, tensors, whole, mixed, f"{what}, rows in another order,")
        _check_beside_nan(subject, own, tensors, whole, what)
    finally:
        torch.set_num_threads(threads)


def _check_beside_nan(
    subject: Subject,
    record: Record,
    tensors: Mapping[str, Tensor],
    whole: Sequence[Tensor],
    what: str,
) -> None:
    others = torch.arange(ROWS) != BROKEN_ROW
    broken = {
        name: torch.where(others[:, None], tensor, torch.nan)
        if tensor.is_floating_point()
        else tensor
        for name, tensor in tensors.items()
    }
    for own, all_rows in zip(outputs(subject.backend, record, broken), whole, strict=True):
        ensure_same(own[others], all_rows[others], f"{what}, beside a row of NaN,")


def _check_part(
    subject: Subject,
    record: Record,
    tensors: Mapping[str, Tensor],
    whole: Sequence[Tensor],
    rows: Tensor,
    what: str,
) -> None:
    part = {name: tensor[rows] for name, tensor in tensors.items()}
    for own, all_rows in zip(outputs(subject.backend, record, part), whole, strict=True):
        ensure_same(own, all_rows[rows], what)
