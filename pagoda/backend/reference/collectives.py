# SPDX-License-Identifier: Apache-2.0
"""Exchanges between ranks, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda.backend import host
from pagoda.parallel.collectives import Collectives, sum_in_order


def all_reduce(x: Tensor, group: Collectives) -> Tensor:
    return group.all_reduce(x) if len(x) else x


def all_gather(x: Tensor, group: Collectives, *, sizes: tuple[int, ...]) -> Tensor:
    # Ranks hold up to a few columns more or less, and gather rows of one length.
    shares = group.all_gather(F.pad(x, (0, max(sizes) - x.shape[1])))
    return torch.cat([share[:, :n] for share, n in zip(shares, sizes, strict=True)], dim=1)


def gather_rows(x: Tensor, counts: Tensor, group: Collectives) -> Tensor:
    sizes = counts.tolist()
    if not max(sizes):
        return x
    # Ranks gather equally many rows.
    shares = group.all_gather(F.pad(x, (0, 0, 0, max(sizes) - len(x))))
    return torch.cat([share[:n] for share, n in zip(shares, sizes, strict=True)])


def scatter_rows(x: Tensor, counts: Tensor, group: Collectives) -> Tensor:
    sizes = counts.tolist()
    if not max(sizes):
        return x
    parts = group.all_to_all(x, [sizes] * group.size)
    return sum_in_order(parts.view(group.size, sizes[group.rank], x.shape[1]))


def all_gather_argmax(found: Tensor, group: Collectives) -> Tensor:
    tokens, bits, finite = group.all_gather(found).unbind(2)
    values = bits.int().view(torch.float32)
    # Of equal ones that of the lowest rank.
    winner = (values == values.amax(dim=0)).int().argmax(dim=0)[None]
    best = (tokens.gather(0, winner)[0], bits.gather(0, winner)[0])
    return torch.stack((*best, finite.amin(dim=0)), dim=1)


def own_rows(x: Tensor, ranks: Collectives) -> Tensor:
    own = host.own_rows(len(x), ranks.rank, ranks.size)
    return x[own.start : own.stop]


def share_rows(x: Tensor, positions: Tensor, ranks: Collectives) -> Tensor:
    count = len(positions)
    most = len(host.own_rows(count, 0, ranks.size))
    if most == count:
        return x
    return ranks.all_gather(F.pad(x, (0, 0, 0, most - len(x)))).flatten(0, 1)[:count]


OPERATIONS: Mapping[str, Callable[..., Tensor]] = {
    function.__name__: function
    for function in (
        all_reduce,
        all_gather,
        gather_rows,
        scatter_rows,
        all_gather_argmax,
        own_rows,
        share_rows,
    )
}
"""Operations by name."""
