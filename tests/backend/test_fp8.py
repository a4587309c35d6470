# SPDX-License-Identifier: Apache-2.0
"""8-bit floats of the KV cache."""

import torch

from pagoda.backend.fp8 import E4M3, to_e4m3
from pagoda.backend.reference.kept import as_kept
from pagoda.messages.kv_formats import KV_FORMATS


def test_numbers_beyond_the_format_become_its_highest() -> None:
    beyond = torch.tensor([448.0, 449.0, 1e9, torch.inf, -500.0, -torch.inf])
    assert to_e4m3(beyond).dtype == E4M3
    assert to_e4m3(beyond).float().tolist() == [448.0, 448.0, 448.0, 448.0, -448.0, -448.0]


def test_nan_stays_and_numbers_are_rounded_half_to_even() -> None:
    found = to_e4m3(torch.tensor([torch.nan, 1.0625, 1.1875, 2.0**-10, 3 * 2.0**-10, -0.0])).float()
    assert bool(found[0].isnan())
    assert found[1:].tolist() == [1.0, 1.25, 0.0, 2.0**-8, 0.0]
    assert bool(found[-1].signbit())


def test_the_reference_keeps_every_format_as_its_row_says() -> None:
    x = torch.tensor([[1.0625, -500.0, 0.0, 1e9]])
    for name, row in KV_FORMATS.items():
        kept, scales = as_kept(x, getattr(torch, row.dtype))
        assert kept.dtype == getattr(torch, row.dtype), name
        assert kept.itemsize == row.element_bytes
        assert (scales is not None) == row.has_scales
    assert torch.equal(as_kept(x, E4M3)[0].float(), to_e4m3(x).float())
