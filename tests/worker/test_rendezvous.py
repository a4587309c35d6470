# SPDX-License-Identifier: Apache-2.0
"""Ranks of a replica that find each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import zmq

from pagoda.backend.cpu.collectives import SharedMemory, SharedMemoryCollectives
from pagoda.devices import BackendUnavailableError
from pagoda.errors import ConfigError
from pagoda.ipc.curve import new_keys
from pagoda.messages.worker import GroupOffer, StepPlan, WorkerPeers
from pagoda.messages.worker_config import CurveKeys, WorkerConfig
from pagoda.parallel.collectives import Collectives
from pagoda.parallel.config import ParallelConfig
from pagoda.parallel.distributed import DistributedCollectives
from pagoda.worker import rendezvous
from pagoda.worker.rendezvous import Rendezvous, host_identity
from pagoda.worker.stages import StageState
from pagoda.worker.step_clock import StepTimes

HIDDEN = 8


Meetings = Callable[..., list[Rendezvous]]


@pytest.fixture
def meetings(tmp_path: Path) -> Iterator[Meetings]:
    contexts: list[zmq.Context[zmq.Socket[bytes]]] = []

    def make(
        *,
        tp: int = 1,
        pp: int = 1,
        cp: int = 1,
        keys: CurveKeys | None = None,
        hosts: tuple[str, ...] = ("",),
    ) -> list[Rendezvous]:
        parallel = ParallelConfig(
            tensor_parallel_size=tp, pipeline_parallel_size=pp, context_parallel_size=cp
        )
        address, sizes = f"ipc://{tmp_path / 'w-1'}", {"hidden_size": HIDDEN}
        made = []
        for rank, place in enumerate(parallel.places(0)):
            contexts.append(zmq.Context())
            host = hosts[rank % len(hosts)]
            config = WorkerConfig(
                model="m", parallel=parallel, place=place, curve=keys, bind_host=host
            )
            made.append(Rendezvous(config, contexts[-1], address, **sizes))
        return made

    yield make
    for context in contexts:
        context.destroy(linger=0)


def introduce(several: list[Rendezvous]) -> WorkerPeers:
    return WorkerPeers(hellos=[meeting.hello() for meeting in several])


def all_join(several: list[Rendezvous]) -> list[Collectives]:
    """Joins all groups at the same time, as each waits for the others."""
    peers = introduce(several)
    with ThreadPoolExecutor(len(several)) as pool:
        joined = list(pool.map(lambda meeting: meeting.form_groups(peers).tensor, several))
        sums = pool.map(lambda group: group.all_reduce(torch.tensor([1.0 + group.rank])), joined)
        assert [total.tolist() for total in sums] == [[3.0], [3.0]]
    return joined


def test_ranks_of_one_host_share_memory(meetings: Meetings) -> None:
    several = meetings(tp=2)
    path = several[0].hello().offers["stage"].shared_memory
    if not path:
        pytest.skip("the native kernels are not installed")
    assert Path(path).exists()
    joined = all_join(several)
    assert all(isinstance(group, SharedMemoryCollectives) for group in joined)
    assert not Path(path).exists()  # nobody else can open it


@pytest.mark.parametrize(
    ("hosts", "error"),
    [
        (("127.0.0.1", "127.0.0.2"), None),
        (("",), BackendUnavailableError("the kernels were not built")),
        (("",), OSError("there is no memory")),
        (("",), ValueError("too many ranks")),
    ],
)
def test_ranks_that_cannot_share_memory_meet_over_the_network(
    meetings: Meetings,
    monkeypatch: pytest.MonkeyPatch,
    hosts: tuple[str, ...],
    error: Exception | None,
) -> None:
    if error is not None:

        def unavailable(size: int) -> SharedMemory:  # noqa: ARG001
            raise error

        monkeypatch.setattr(rendezvous, "SharedMemory", unavailable)
    several = meetings(tp=2, hosts=hosts, keys=new_keys() if hosts[0] else None)
    joined = all_join(several)
    assert all(isinstance(group, DistributedCollectives) for group in joined)


def test_memory_that_cannot_be_opened_is_one_sentence() -> None:
    offer = GroupOffer(shared_memory="/nowhere")
    with pytest.raises(ConfigError, match="cannot open the memory that another one"):
        rendezvous.join_group(1, ["h", "h"], offer, "")


@pytest.mark.parametrize("hosts", [("",), ("127.0.0.1", "127.0.0.2")])
def test_ranks_of_each_kind_form_groups(meetings: Meetings, hosts: tuple[str, ...]) -> None:
    several = meetings(tp=2, cp=2, hosts=hosts, keys=new_keys() if hosts[0] else None)
    peers = introduce(several)

    def sums(rank: int) -> list[float]:
        groups = several[rank].form_groups(peers)
        return [group.all_reduce(torch.tensor([10.0**rank])).item() for group in groups]

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(sums, range(4)))
    # Of the stage, of tensor-parallel, and of context-parallel ranks.
    assert found == [[1111, 11, 101], [1111, 11, 1010], [1111, 1100, 101], [1111, 1100, 1010]]


@pytest.mark.parametrize("secure", [False, True])
def test_each_stage_passes_on_to_the_next(meetings: Meetings, secure: bool) -> None:
    keys, hosts = (new_keys(), ("127.0.0.1", "127.0.0.2")) if secure else (None, ("",))
    several = meetings(pp=3, keys=keys, hosts=hosts)
    peers = introduce(several)
    assert [meeting.form_groups(peers).stage.size for meeting in several] == [1] * 3
    first, second, third = several
    targets = [meeting.target(peers) for meeting in several]
    assert first.source is None
    assert targets[2] is None
    assert targets[0] is not None
    assert targets[1] is not None
    assert second.source is not None
    assert third.source is not None
    targets[0].send(0, StageState(torch.zeros(1, HIDDEN), [], StepTimes(0.5)))
    targets[1].send(0, StageState(torch.ones(1, HIDDEN), [], StepTimes(0.5)))
    plan = StepPlan(0, [0], [1])
    assert second.source.receive(plan).hidden.sum() == 0
    assert third.source.receive(plan).hidden.sum() == HIDDEN


def test_one_host_has_one_identity_for_each_address() -> None:
    assert host_identity("") == host_identity("")
    assert host_identity("10.0.0.1") != host_identity("10.0.0.2")
