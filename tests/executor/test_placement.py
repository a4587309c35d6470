# SPDX-License-Identifier: Apache-2.0
"""How ranks are laid over hosts."""

from __future__ import annotations

import pytest

from pagoda.errors import ConfigError
from pagoda.executor.placement import (
    RankPlacement,
    neighbours_first,
    plan_placement,
    workers_on_host,
)
from pagoda.parallel.config import ParallelConfig


def parallel(dp: int = 1, pp: int = 1, tp: int = 1) -> ParallelConfig:
    return ParallelConfig(data_parallel_size=dp, pipeline_parallel_size=pp, tensor_parallel_size=tp)


@pytest.mark.parametrize(
    ("hosts", "sizes", "threads", "expected"),
    [
        ([16], parallel(), None, RankPlacement(16, 1, 1)),
        ([16, 16], parallel(tp=2), None, RankPlacement(16, 1, 2)),
        ([16, 16], parallel(tp=2), 8, RankPlacement(8, 2, 1)),
        ([16, 16], parallel(tp=2, pp=2), None, RankPlacement(8, 2, 2)),
        ([16, 4], parallel(tp=2), None, RankPlacement(8, 2, 1)),
        ([3, 3], parallel(tp=2, pp=2), 1, RankPlacement(1, 2, 2)),
        ([3, 3], parallel(tp=3, pp=2), 1, RankPlacement(1, 3, 2)),
        ([3, 1], parallel(tp=2, pp=2), 1, RankPlacement(1, 1, 4)),
        ([8, 8], parallel(dp=2, tp=2), None, RankPlacement(4, 2, 1)),
        ([1, 1], parallel(tp=2), None, RankPlacement(1, 1, 2)),
    ],
)
def test_tensor_parallel_ranks_share_a_bundle_where_it_fits(
    hosts: list[int], sizes: ParallelConfig, threads: int | None, expected: RankPlacement
) -> None:
    assert plan_placement(hosts, sizes, threads) == expected


@pytest.mark.parametrize(
    ("hosts", "threads", "needs", "have"),
    [([1], None, "2 × 1", "1"), ([8, 8], 12, "2 × 12", "8, 8"), ([], None, "2 × 1", "none")],
)
def test_too_few_cores_are_refused_with_the_numbers(
    hosts: list[int], threads: int | None, needs: str, have: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_placement(hosts, parallel(tp=2), threads)
    assert f"The ranks need {needs} cores, the hosts of the Ray cluster have {have};" in str(
        caught.value
    )


def test_ranks_that_follow_each_other_share_hosts() -> None:
    assert neighbours_first(["b", "a", "b", "a"]) == [1, 3, 0, 2]
    assert neighbours_first(["a", "b", "b", "b"]) == [1, 2, 3, 0]


@pytest.mark.parametrize(
    ("own", "cores", "sizes", "expected"),
    [
        (2, 64, parallel(tp=2), 2),
        (1, 64, parallel(tp=2), 1),
        (2, 16, parallel(dp=2, tp=2), 4),
        (2, 12, parallel(dp=2, tp=2), 3),
        (2, 8, parallel(dp=2, tp=2), 2),
    ],
)
def test_other_replicas_are_counted_as_far_as_they_find_cores(
    own: int, cores: int, sizes: ParallelConfig, expected: int
) -> None:
    assert workers_on_host(own, cores, 4, sizes) == expected
