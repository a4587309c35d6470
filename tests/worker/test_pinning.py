# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pagoda.worker.pinning import bind_threads, free_threads, part_of_cores, places


def _siblings(topology: Path, pairs: list[tuple[int, int]]) -> None:
    for pair in pairs:
        for core in pair:
            directory = topology / f"cpu{core}" / "topology"
            directory.mkdir(parents=True)
            (directory / "thread_siblings_list").write_text(f"{pair[0]},{pair[1]}\n")


def test_each_core_once_before_any_twice(tmp_path: Path) -> None:
    _siblings(tmp_path, [(0, 1), (2, 3), (4, 5)])
    assert places({0, 1, 2, 3, 4, 5}, tmp_path) == [0, 2, 4, 1, 3, 5]
    assert places({1, 2, 3}, tmp_path) == [1, 2, 3]


def test_siblings_may_be_numbered_far_apart(tmp_path: Path) -> None:
    _siblings(tmp_path, [(0, 2), (1, 3)])
    assert places({3, 2, 1, 0}, tmp_path) == [0, 1, 2, 3]
    assert places({0, 2, 3}, tmp_path) == [0, 3, 2]


def test_without_topology_all_cores_are_alike(tmp_path: Path) -> None:
    assert places({7, 5}, tmp_path) == [5, 7]


def test_a_place_is_one_core() -> None:
    environment = {"OMP_PLACES": "threads"}
    bind_threads([4, 0], environment)
    assert environment == {"OMP_PROC_BIND": "close", "OMP_PLACES": "{4},{0}"}


def test_parts_are_equal_and_keep_siblings_together(tmp_path: Path) -> None:
    _siblings(tmp_path, [(0, 4), (1, 5), (2, 6), (3, 7)])
    parts = [part_of_cores(range(8), index, 2, tmp_path) for index in range(2)]
    assert parts == [{0, 4, 1, 5}, {2, 6, 3, 7}]
    assert part_of_cores(range(8), 3, 4, tmp_path) == {3, 7}


def test_cores_that_cannot_be_shared_out_evenly(tmp_path: Path) -> None:
    assert [part_of_cores({1, 3, 5}, index, 2, tmp_path) for index in range(2)] == [{1}, {3}]
    assert [part_of_cores({4, 9}, index, 4, tmp_path) for index in range(4)] == [{4}, {9}] * 2


def test_threads_beside_the_bound_ones_are_free() -> None:
    allowed = os.sched_getaffinity(0)
    own = {min(allowed)}
    os.sched_setaffinity(0, own)
    try:
        with free_threads(allowed), ThreadPoolExecutor(1) as pool:
            cores = pool.submit(os.sched_getaffinity, 0).result()
        assert cores == allowed
        assert os.sched_getaffinity(0) == own
    finally:
        os.sched_setaffinity(0, allowed)
