"""Cases that the tests of the CPU kernels share."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from pagoda.backend.base import TokenBatch
from pagoda.backend.cpu import native
from pagoda.backend.reference.backend import ReferenceBackend
from pagoda.devices import BackendUnavailableError

try:
    SETS = native.available_instruction_sets()
except BackendUnavailableError:
    SETS = []
needs_kernels = pytest.mark.skipif(
    not SETS, reason="the kernels are not built, or not for this CPU"
)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.int8: 5e-3}
REFERENCE = ReferenceBackend()

sets = st.sampled_from(SETS or [""])
dtypes = st.sampled_from(DTYPES)
seeds = st.integers(0, 2**20)
threads = st.integers(1, 4)
examples = settings(max_examples=60, deadline=None, derandomize=True)


def random_tensor(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(
    actual: Tensor, expected: Tensor, scale: float = 1.0, tolerance: float | None = None
) -> None:
    assert actual.dtype == expected.dtype
    tolerance = tolerance or TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual, expected, atol=tolerance * scale, rtol=tolerance)


def token_batch(spans: list[tuple[int, int, list[int]]]) -> TokenBatch:
    """Batch of (tokens computed before, tokens computed now, block ids) per sequence."""
    width = max(len(blocks) for _, _, blocks in spans)
    counts = torch.tensor([count for _, count, _ in spans])
    positions = torch.cat([torch.arange(done, done + count) for done, count, _ in spans])
    return TokenBatch(
        token_ids=torch.zeros_like(positions),
        positions=positions,
        sequence_ids=torch.repeat_interleave(counts),
        query_lens=counts,
        context_lens=torch.tensor([done + count for done, count, _ in spans]),
        block_tables=torch.tensor([b + [0] * (width - len(b)) for _, _, b in spans]),
    )
