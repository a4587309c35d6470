# SPDX-License-Identifier: Apache-2.0
"""Groups whose ranks are processes: every sum is that of all ranks in order, in all bits, on all of them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import psutil
import pytest
import torch

from pagoda.backend.cpu.collectives import SharedMemory
from pagoda.devices import BackendUnavailableError
from pagoda.parallel.collectives import Alone
from pagoda.parallel.distributed import GroupStore

SIZES = (2, 3, 4)


@pytest.fixture(autouse=True)
def _rank_module_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, folders)))


@contextlib.contextmanager
def _processes(*arguments: Sequence[str]) -> Iterator[list[subprocess.Popen[str]]]:
    with contextlib.ExitStack() as stack:
        started = []
        for own in arguments:
            process = subprocess.Popen(
                [sys.executable, "-m", "collectives_rank", *own],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            started.append(process)
        yield started


def _run(kind: str, sizes: Sequence[int], addresses: Sequence[str]) -> None:
    groups = (",".join(map(str, sizes)), ",".join(addresses))
    arguments = [(kind, str(rank), *groups) for rank in range(max(sizes))]
    with _processes(*arguments) as ranks:
        outputs = [rank.communicate(timeout=100)[0] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0] * len(ranks), outputs


@pytest.fixture
def memories() -> Iterator[list[SharedMemory]]:
    """Shared memory for groups of `SIZES`."""
    try:
        made = [SharedMemory(size) for size in SIZES]
    except BackendUnavailableError as error:
        pytest.skip(str(error))
    yield made
    for memory in made:
        memory.close()


def test_ranks_that_share_memory(memories: list[SharedMemory]) -> None:
    _run("shared", SIZES, [memory.path for memory in memories])


def test_ranks_over_gloo() -> None:
    stores = [GroupStore("127.0.0.1") for _ in SIZES[:2]]
    _run("gloo", SIZES[:2], [store.address for store in stores])


def test_ranks_whose_peer_is_killed_sleep_and_leave_nothing_behind(
    memories: list[SharedMemory],
) -> None:
    path = memories[1].path
    with _processes(*[("wait", path, str(rank), "3") for rank in range(2)]) as ranks:
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "here\n"
        for rank in ranks:
            while psutil.Process(rank.pid).status() != psutil.STATUS_SLEEPING:
                time.sleep(0.01)
        os.kill(ranks[0].pid, signal.SIGKILL)
        assert ranks[0].wait(10) == -signal.SIGKILL
        assert ranks[1].poll() is None
        ranks[1].terminate()
        assert ranks[1].wait(10) == -signal.SIGTERM
    memories[1].close()
    assert not os.path.exists(path)


def test_a_group_of_one() -> None:
    group, x = Alone(), torch.ones(3)
    assert group.all_reduce(x) is x
    assert torch.equal(group.all_gather(x), x[None])
    assert group.all_to_all(x, [[3]]) is x
    assert group.broadcast(b"x") == b"x"
    with pytest.raises(ValueError, match="Rank 0 gives"):
        group.broadcast(None)
