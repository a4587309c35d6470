# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st
from system_trees import write_system

from pagoda.ipc.cores import choose_cores, format_cores, memory_nodes


def _of_each(file: str, values: list[int]) -> dict[str, str]:
    return {f"system/cpu/cpu{core}/{file}": f"{value}\n" for core, value in enumerate(values)}


INTEL = {"system/cpu/online": "0-7\n", "cpu_core/cpus": "0-3\n", "cpu_atom/cpus": "4-7\n"}
ARM = {"system/cpu/online": "0-7\n", **_of_each("cpu_capacity", [250] * 4 + [870] * 3 + [1024])}
DENSE = {
    "system/cpu/online": "0-3\n",
    **_of_each("cpufreq/cpuinfo_max_freq", [5_100_000, 5_000_000, 3_300_000, 3_300_000]),
}


@pytest.mark.parametrize(
    ("files", "fast", "slow", "evidence"),
    [
        (INTEL, {0, 1, 2, 3}, {4, 5, 6, 7}, "cpu_atom/cpus"),
        (ARM, {4, 5, 6, 7}, {0, 1, 2, 3}, "cpu*/cpu_capacity"),
        (DENSE, {0, 1}, {2, 3}, "cpu*/cpufreq/cpuinfo_max_freq"),
    ],
)
def test_slow_cores_are_left_out(
    files: dict[str, str], fast: set[int], slow: set[int], evidence: str, tmp_path: Path
) -> None:
    choice = choose_cores(fast | slow, write_system(tmp_path, files))
    assert (choice.cores, choice.slow) == (fast, slow)
    assert choice.evidence.endswith(evidence)


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"system/cpu/online": "0-3\n"},
        {**DENSE, "system/cpu/cpu3/cpufreq/cpuinfo_max_freq": "unknown\n"},
        {"system/cpu/online": "0-3\n", **_of_each("cpu_capacity", [1024, 1024, 1000, 990])},
        {"system/cpu/online": "0-3\n", "cpu_core/cpus": "0-3\n", "cpu_atom/cpus": "\n"},
    ],
    ids=["nothing", "only numbers", "one unknown", "nearly alike", "no atoms"],
)
def test_cores_are_alike_unless_all_are_known(files: dict[str, str], tmp_path: Path) -> None:
    choice = choose_cores(range(4), write_system(tmp_path, files))
    assert (choice.cores, choice.slow) == ({0, 1, 2, 3}, set())


def test_cores_that_somebody_chose_are_kept(tmp_path: Path) -> None:
    choice = choose_cores({3, 4, 5}, write_system(tmp_path, INTEL))
    assert (choice.cores, choice.slow) == ({3, 4, 5}, set())


def test_memory_nodes(tmp_path: Path) -> None:
    files = {f"system/node/node{i}/cpulist": f"{i},{i + 12}\n" for i in range(11)}
    system = write_system(tmp_path, files)
    assert memory_nodes({0, 2, 10, 22}, system) == ({0}, {2}, {10, 22})
    assert memory_nodes({0, 99}, system) == ({0, 99},)
    assert memory_nodes({0, 1}, tmp_path / "nothing") == ({0, 1},)


@given(st.sets(st.integers(0, 40), min_size=1))
def test_numbers_as_linux_writes_them(cores: set[int]) -> None:
    with TemporaryDirectory() as directory:
        atoms = {"cpu_core/cpus": "0,2,4-40\n", "cpu_atom/cpus": "1,3\n"}
        files = {"system/cpu/online": format_cores(cores) + "\n", **atoms}
        choice = choose_cores(cores, write_system(Path(directory), files))
    assert choice.cores == (cores - {1, 3} or cores)
    assert choice.slow == cores - choice.cores
