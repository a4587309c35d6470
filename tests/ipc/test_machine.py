# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import subprocess
from pathlib import Path

import psutil
import pytest

from pagoda.ipc import machine


def _write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


V1 = {
    "proc/self/cgroup": "5:memory:/box\n3:cpu,cpuacct:/box\n",
    "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "250000\n",
    "sys/fs/cgroup/cpu/box/cpu.cfs_period_us": "100000\n",
    "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
    "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    "sys/fs/cgroup/memory/box/memory.limit_in_bytes": "1000\n",
    "sys/fs/cgroup/memory/box/memory.usage_in_bytes": "700\n",
    "sys/fs/cgroup/memory/box/memory.stat": "cache 1\ntotal_active_file 20\ntotal_inactive_file 30\n",
}
V2 = {
    "proc/self/cgroup": "0::/pod/box\n",
    "sys/fs/cgroup/pod/box/cpu.max": "max 100000\n",
    "sys/fs/cgroup/pod/cpu.max": "250000 100000\n",
    "sys/fs/cgroup/pod/box/memory.max": "max\n",
    "sys/fs/cgroup/pod/box/memory.current": "3\n",
    "sys/fs/cgroup/pod/memory.max": "1000\n",
    "sys/fs/cgroup/pod/memory.current": "700\n",
    "sys/fs/cgroup/pod/memory.stat": "anon 5\ninactive_file 30\nactive_file 20\n",
}


@pytest.mark.parametrize("files", [V1, V2], ids=["v1", "v2"])
def test_limits_of_a_group_or_its_ancestors(files: dict[str, str], tmp_path: Path) -> None:
    _write(tmp_path, files)
    assert machine.cgroup_cores(tmp_path) == 2.5
    assert machine.cgroup_memory_left_bytes(tmp_path) == 350


@pytest.mark.parametrize("files", [{}, {"proc/self/cgroup": "0::/\n"}], ids=["none", "empty"])
def test_no_limits(files: dict[str, str], tmp_path: Path) -> None:
    _write(tmp_path, files)
    assert machine.cgroup_cores(tmp_path) is None
    assert machine.cgroup_memory_left_bytes(tmp_path) is None


@pytest.mark.parametrize(("quota", "cores"), [(None, 7), (2.5, 2), (0.4, 1), (64.0, 7)])
def test_cores_are_whole_and_at_least_one(
    quota: float | None, cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(7))
    monkeypatch.setattr(machine, "cgroup_cores", lambda _: quota)
    assert machine.available_cores() == cores


def test_memory_is_the_smaller_of_machine_and_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cgroup_memory_left_bytes", lambda _: 5)
    assert machine.available_memory_bytes() == 5
    monkeypatch.setattr(machine, "cgroup_memory_left_bytes", lambda _: None)
    assert 0 < machine.available_memory_bytes() <= psutil.virtual_memory().total


def test_the_memory_of_a_process_is_what_the_system_says() -> None:
    own = machine.process_memory_bytes(os.getpid())
    assert own == pytest.approx(psutil.Process().memory_info().rss, rel=0.1)


def test_a_process_that_has_ended_has_no_memory() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    assert machine.process_memory_bytes(child.pid) is None


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536 * 1024, "1.50 MiB"),
        (1_192_099_840, "1.11 GiB"),
        (24 * 2**30, "24.0 GiB"),
        (5000 * 2**30, "5000 GiB"),
    ],
)
def test_amounts_are_written(amount: int, text: str) -> None:
    assert machine.format_bytes(amount) == text
