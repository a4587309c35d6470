# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from system_trees import write_system

from pagoda.messages.worker_config import WorkerConfig
from pagoda.worker.pinning import bind, bind_threads, free_threads, part_of_cores, places


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
    _siblings(tmp_path / "system/cpu", [(0, 4), (1, 5), (2, 6), (3, 7)])
    parts = [part_of_cores(range(8), index, 2, tmp_path) for index in range(2)]
    assert parts == [{0, 4, 1, 5}, {2, 6, 3, 7}]
    assert part_of_cores(range(8), 3, 4, tmp_path) == {3, 7}


def test_parts_are_memory_nodes_however_their_cores_are_numbered(tmp_path: Path) -> None:
    _siblings(tmp_path / "system/cpu", [(0, 4), (1, 5), (2, 6), (3, 7)])
    even_and_odd = {
        "system/node/node0/cpulist": "0,2,4,6\n",
        "system/node/node1/cpulist": "1,3,5,7\n",
    }
    write_system(tmp_path, even_and_odd)
    assert [part_of_cores(range(8), index, 2, tmp_path) for index in range(2)] == [
        {0, 2, 4, 6},
        {1, 3, 5, 7},
    ]
    assert part_of_cores(range(8), 3, 4, tmp_path) == {3, 7}


@pytest.fixture
def two_cores() -> Iterator[list[int]]:
    """Two of the cores that the test may run on, which it is free to bind itself to."""
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2:
        pytest.skip("there is one core only")
    chosen = sorted(allowed)[:2]
    os.sched_setaffinity(0, chosen)
    yield chosen
    os.sched_setaffinity(0, allowed)


@pytest.mark.parametrize(("num_threads", "threads"), [(None, 1), (2, 2), (1, 1)])
def test_slow_cores_are_for_threads_that_were_asked_for(
    num_threads: int | None, threads: int, two_cores: list[int], tmp_path: Path
) -> None:
    fast, slow = two_cores
    files = {
        "system/cpu/online": f"{fast},{slow}\n",
        "cpu_core/cpus": f"{fast}\n",
        "cpu_atom/cpus": f"{slow}\n",
    }
    config = WorkerConfig(model="m", num_threads=num_threads)
    bound, cores = bind(config, write_system(tmp_path, files))
    assert bound.num_threads == threads
    assert cores == os.sched_getaffinity(0) == ({fast} if num_threads is None else {fast, slow})


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
