# SPDX-License-Identifier: Apache-2.0
"""The workers of a replica as real child processes over a real socket, without torch."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec
import psutil
import pytest
import zmq
from fragment_files import read_fragments
from worker_group import (
    NAMES,
    PAIR,
    PLAN,
    SQUARE,
    MakeExecutor,
    assert_gone,
    next_event,
    pids,
    stop,
)

from benchmarks.simulation.workers import NobodyLaunched
from pagoda.executor import group
from pagoda.executor.base import ExecutorEvent, WorkerLost
from pagoda.executor.group import GroupExecutor
from pagoda.executor.launcher import LocalLauncher
from pagoda.ipc.clock import MonotonicClock, VirtualClock
from pagoda.ipc.curve import encrypt_client, new_keys
from pagoda.messages.engine_config import SimConfig
from pagoda.messages.tracing import TraceStopped
from pagoda.messages.transfers import DeviceBlocks, HostSlots, Transfer, TransferLink, Transfers
from pagoda.messages.worker import PROTOCOL_VERSION, StepPlan, StepResult, WorkerFailed, WorkerReady
from pagoda.messages.worker_config import WorkerConfig
from pagoda.parallel.config import ParallelConfig, RankPlace
from pagoda.plugins.sim.executor import SimExecutor
from pagoda.telemetry.tracer import TraceLevel, TraceSession
from pagoda.worker.engine_link import EngineLink

# ---- one worker

HUNG_STEP = WorkerLost("a step took longer than 0.2 s", suspicion=2)
STOPPED_IN_A_STEP = "a step took longer than {} s (the worker was stopped)"


def test_a_worker_that_dies_of_a_step_is_noticed(make_executor: MakeExecutor) -> None:
    executor = make_executor("dies")
    next_event(executor)
    executor.submit(PLAN)
    assert next_event(executor) == WorkerLost("the worker was killed by SIGSEGV")


def test_a_step_that_hangs_is_ended(make_executor: MakeExecutor) -> None:
    executor = make_executor("hangs", step_timeout_s=0.2)
    next_event(executor)
    pid = pids(executor)["the worker"]
    executor.submit(PLAN)
    assert next_event(executor) == HUNG_STEP
    assert_gone([pid])


def test_time_for_which_the_engine_stood_still_counts_against_no_step_and_no_transfer(
    make_executor: MakeExecutor,
) -> None:
    """Engine and workers are stopped together by a terminal (Ctrl-Z)."""
    clock = VirtualClock()
    executor = make_executor(
        "never-ends", step_timeout_s=5.0, kv_host_bytes=1, clock=clock, start_timeout_s=600.0
    )
    until_ready(executor)
    executor.submit_transfers(Transfers([Transfer(0, 0, DeviceBlocks([0]), HostSlots([0]))]))
    stop(pids(executor)["the worker"])
    executor.submit(PLAN)
    executor.next_event_at()
    clock.advance_to(clock.now() + 40)
    assert executor.poll() == []
    since = clock.now()
    while not (events := executor.poll()):
        at = executor.next_event_at()
        assert at is not None
        clock.advance_to(at)
    assert clock.now() == pytest.approx(since + 4)
    assert events == [WorkerLost(STOPPED_IN_A_STEP.format(5), suspicion=0)]


def test_a_killed_worker_that_stays_keeps_only_its_successor_waiting(
    make_executor: MakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is stuck in the kernel, or gives much memory back, ends when it can."""
    monkeypatch.setattr("pagoda.ipc.lifeline.REAP_S", 600.0)
    executor = make_executor("obeys", step_timeout_s=0.2)
    next_event(executor)
    pid = pids(executor)["the worker"]
    stop(pid)
    with monkeypatch.context() as stuck:
        stuck.setattr(subprocess.Popen, "kill", lambda _self: None)
        executor.submit(PLAN)
        assert next_event(executor) == WorkerLost(STOPPED_IN_A_STEP.format(0.2), suspicion=0)
        executor.start()
        assert executor.poll() == []
        assert psutil.pid_exists(pid)
        assert pids(executor) == {}
        os.kill(pid, signal.SIGKILL)
        assert isinstance(next_event(executor), WorkerReady)
    assert_gone([pid])


def until_heard(executor: GroupExecutor) -> None:
    """Waits for a message of a worker that starts, which moves the deadline of the start."""
    messages, *_ = executor.pollables()
    assert zmq.zmq_poll([(messages, zmq.POLLIN)], 60_000)
    assert executor.poll() == []


def until_ready(executor: GroupExecutor) -> None:
    """Polls a worker that starts while the clock of the executor stands still."""
    while not (events := executor.poll()):
        assert zmq.zmq_poll([(s, zmq.POLLIN) for s in executor.pollables()], 20_000)
    assert isinstance(events[0], WorkerReady)


@pytest.mark.parametrize(
    ("model", "parallel", "names"),
    [
        ("hangs-loading", ParallelConfig(), "the worker"),
        ("says-nothing@1", PAIR, "worker pp0 tp1"),
    ],
)
def test_workers_that_make_no_progress_while_they_start_are_ended(
    make_executor: MakeExecutor, model: str, parallel: ParallelConfig, names: str
) -> None:
    clock = VirtualClock()
    executor = make_executor(model, parallel, start_timeout_s=10.0, clock=clock)
    workers = list(pids(executor).values())
    clock.advance_to(9.0)
    until_heard(executor)
    while not (events := executor.poll()):  # a later message may move the deadline again
        at = executor.next_event_at()
        assert at is not None
        clock.advance_to(at)
    assert clock.now() >= 19
    (loss,) = events
    assert isinstance(loss, WorkerLost)
    assert loss.reason.endswith(f"{names} made no progress for 10 s while starting")
    assert_gone(workers)


@pytest.mark.parametrize("is_busy", [True, False])
def test_a_worker_that_is_stopped_is_lost_long_before_a_step_may_end(
    make_executor: MakeExecutor, is_busy: bool
) -> None:
    executor = make_executor("hangs" if is_busy else "obeys", PAIR, worker_timeout_s=0.4)
    next_event(executor)
    if is_busy:
        executor.submit(PLAN)
    stop(pids(executor)[NAMES[1]])
    workers = list(pids(executor).values())
    silent = "worker pp0 tp1 hung up, or was silent for 0.4 s (worker pp0 tp1 was stopped)"
    assert next_event(executor) == WorkerLost(silent, suspicion=0)
    assert_gone(workers)


def test_a_worker_that_is_stopped_while_it_loads_is_lost(make_executor: MakeExecutor) -> None:
    executor = make_executor("hangs-loading", worker_timeout_s=0.4)
    until_heard(executor)
    stop(pids(executor)["the worker"])
    silent = "the worker hung up, or was silent for 0.4 s (the worker was stopped)"
    assert next_event(executor) == WorkerLost(silent, suspicion=0)


def test_a_worker_that_is_stopped_before_it_connects_is_lost(make_executor: MakeExecutor) -> None:
    clock = VirtualClock()
    executor = make_executor("obeys", start_timeout_s=600.0, clock=clock)
    stop(pids(executor)["the worker"])
    clock.advance_to(LocalLauncher.first_word_s)
    mute = "the worker did not connect within 60 s (the worker was stopped)"
    assert executor.poll() == [WorkerLost(mute, suspicion=0)]


def test_a_worker_that_cannot_start_says_why(make_executor: MakeExecutor) -> None:
    assert next_event(make_executor("fails")) == WorkerLost("No such model.", is_user_error=True)


@pytest.mark.parametrize(("model", "num_ranks"), [("newer", 1), ("newer@1", 2)])
def test_a_worker_of_another_version_is_refused_with_both_numbers(
    make_executor: MakeExecutor, model: str, num_ranks: int
) -> None:
    loss = next_event(make_executor(model, ParallelConfig(tensor_parallel_size=num_ranks)))
    assert isinstance(loss, WorkerLost)
    assert loss.is_user_error
    assert f"speaks protocol {PROTOCOL_VERSION + 1}, the engine {PROTOCOL_VERSION}" in loss.reason


# ---- several workers


def test_all_ranks_become_ready_as_one(make_executor: MakeExecutor) -> None:
    executor = make_executor("obeys", SQUARE)
    ready = next_event(executor)
    assert isinstance(ready, WorkerReady)
    assert ready.num_blocks == 61  # what the rank with the least room has
    assert (ready.kv_host_slots, ready.kv_places) == (0, ())
    assert ready.summary == "2 pipeline stages of 2 tensor-parallel ranks: simulated worker"
    assert list(pids(executor)) == NAMES
    assert executor.max_in_flight == 3
    roles = [f"worker dp0 tp{tp} pp{pp}" for pp in range(2) for tp in range(2)]
    assert executor.pids() == dict(zip(roles, pids(executor).values(), strict=True))
    executor.close()
    assert executor.pids() == {}


def test_one_rank_answers_for_all(make_executor: MakeExecutor) -> None:
    executor = make_executor("obeys", SQUARE)
    next_event(executor)
    executor.submit(PLAN)
    first = next_event(executor)
    assert isinstance(first, StepResult)
    executor.submit(StepPlan(1, [0], [1], new_tokens=[(0, first.token_ids[0][0])]))
    second = next_event(executor)
    assert isinstance(second, StepResult)
    assert (first.step, second.step) == (0, 1)
    assert executor.next_event_at() is None


def test_a_rank_that_hangs_up_is_lost(make_executor: MakeExecutor) -> None:
    executor = make_executor("hangs-up@1", ParallelConfig(tensor_parallel_size=2))
    assert isinstance(next_event(executor), WorkerReady)
    executor.submit(PLAN)
    assert isinstance(next_event(executor), StepResult)
    assert next_event(executor) == WorkerLost("worker pp0 tp1 hung up, or was silent for 30 s")


def test_a_rank_that_leaves_before_it_knows_its_peers_is_lost(
    make_executor: MakeExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = tmp_path / "left"
    monkeypatch.setenv("LEFT", str(left))
    executor = make_executor("leaves@1", ParallelConfig(tensor_parallel_size=2))
    while not left.exists():  # the rank has said hello and is gone before the engine looks
        time.sleep(0.01)
    assert next_event(executor) == WorkerLost("worker pp0 tp1 hung up, or was silent for 30 s")


def test_the_log_names_who_has_not_said_hello(
    make_executor: MakeExecutor,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(group, "_PATIENCE_S", 0.05)
    executor = make_executor("says-nothing@2", SQUARE)
    while not caplog.messages:
        at = executor.next_event_at()
        assert at is not None, "nobody is waited for"
        zmq.zmq_poll([(s, zmq.POLLIN) for s in executor.pollables()], 20)
        assert executor.poll() == []
    (message,) = caplog.messages
    assert "worker pp1 tp0" in message
    assert executor.poll() == []
    assert len(caplog.messages) == 1, "the log says it once"


@pytest.mark.parametrize(
    ("parallel", "name"), [(ParallelConfig(), "the worker"), *((SQUARE, name) for name in NAMES)]
)
def test_any_ranks_death_is_the_end_of_all(
    make_executor: MakeExecutor, parallel: ParallelConfig, name: str
) -> None:
    executor = make_executor("obeys", parallel)
    next_event(executor)
    before = pids(executor)
    os.kill(before[name], signal.SIGKILL)
    assert next_event(executor) == WorkerLost(f"{name} was killed by SIGKILL", suspicion=0)
    assert_gone(list(before.values()))
    assert executor.pollables() == []
    executor.start(num_blocks=9)
    ready = next_event(executor)
    assert isinstance(ready, WorkerReady)
    assert ready.num_blocks == 9


@pytest.mark.parametrize(
    ("model", "loss"),
    [
        ("fails@1", WorkerLost("worker pp0 tp1: No such model.", is_user_error=True)),
        ("breaks@2", WorkerLost("worker pp1 tp0: RuntimeError: broken")),
        (
            "differs@3",
            WorkerLost(
                "the workers' backends prefer KV blocks of 16 and 32 tokens; name one with --block-size.",
                is_user_error=True,
            ),
        ),
        (
            "rounds@0",
            WorkerLost(
                "the workers compute with other bits and simulated, whose results differ in rounding; set "
                "PAGODA_CPU_ISA to an instruction set that all hosts have, or give --backend reference.",
                is_user_error=True,
            ),
        ),
    ],
)
def test_a_rank_that_cannot_start_ends_the_start(
    make_executor: MakeExecutor, model: str, loss: WorkerLost
) -> None:
    executor = make_executor(model, SQUARE)
    started = list(pids(executor).values())
    assert next_event(executor) == loss
    assert_gone(started)
    assert executor.pollables() == []


# ---- who is heard


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    """Of sockets whose messages perhaps nobody fetches: those that are let go wait for that."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def unlaunched(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[tuple[GroupExecutor, NobodyLaunched]]:
    """An executor that has started, with tiers and over the transport named by the parameter."""
    launcher = NobodyLaunched()
    executor = GroupExecutor(
        WorkerConfig(model="m", place=RankPlace(dp=3), kv_host_bytes=1),
        launcher,
        address="tcp://127.0.0.1" if request.param == "tcp" else f"ipc://{tmp_path / 'w'}",
        step_timeout_s=30.0,
        clock=MonotonicClock(),
    )
    executor.start()
    yield executor, launcher
    executor.close()


Unlaunched = tuple[GroupExecutor, NobodyLaunched]
over_both = pytest.mark.parametrize("unlaunched", ["ipc", "tcp"], indirect=True)


@pytest.mark.parametrize("unlaunched", ["tcp"], indirect=True)
def test_strangers_are_not_heard_over_tcp(
    unlaunched: Unlaunched, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    executor, launcher = unlaunched
    ([config], address) = launcher.starts[0]
    keys = config.curve
    assert keys is not None
    assert config.place == RankPlace(dp=3)
    other = new_keys()
    stolen_address = msgspec.structs.replace(other, server_key=keys.server_key)
    strangers = [
        EngineLink(context, address, msgspec.structs.replace(config, curve=strange))
        for strange in (None, other, stolen_address)
    ]
    for stranger in strangers:
        stranger.send(WorkerFailed("nonsense", False))
    friend = EngineLink(context, address, config)
    friend.send(WorkerFailed("No such model.", True))
    assert next_event(executor) == WorkerLost("No such model.", is_user_error=True)


@over_both
def test_workers_of_an_earlier_start_are_not_heard(
    unlaunched: Unlaunched, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    executor, launcher = unlaunched
    ([config], address) = launcher.starts[0]
    late = EngineLink(context, address, config)
    executor.close()
    executor.start()
    late.send(WorkerFailed("of the first start", False))
    ([config], address) = launcher.starts[1]
    EngineLink(context, address, config).send(WorkerFailed("of the second start", False))
    assert next_event(executor) == WorkerLost("of the second start")


def connected_twice(
    context: zmq.Context[zmq.Socket[bytes]], launcher: NobodyLaunched
) -> tuple[EngineLink, zmq.Socket[bytes]]:
    """The only worker's connections: its own, and that for transfers."""
    ([config], address) = launcher.starts[0]
    link = context.socket(zmq.DEALER)
    link.setsockopt_string(zmq.IDENTITY, "kv-0")
    if config.curve is not None:
        encrypt_client(link, config.curve)
    link.connect(address)
    return EngineLink(context, address, config), link


def ready_worker() -> WorkerReady:
    sim = SimExecutor(SimConfig(kv_host_slots=5), clock=MonotonicClock())
    sim.start()
    (ready,) = sim.poll()
    assert isinstance(ready, WorkerReady)
    return ready


def poll_once_heard(executor: GroupExecutor) -> list[ExecutorEvent]:
    socket, _monitor = executor.pollables()
    assert zmq.zmq_poll([(socket, zmq.POLLIN)], 20_000), "nobody said anything"
    return executor.poll()


@over_both
@pytest.mark.parametrize("link_is_first", [True, False])
def test_a_worker_with_tiers_is_ready_once_it_has_connected_twice(
    unlaunched: Unlaunched, context: zmq.Context[zmq.Socket[bytes]], link_is_first: bool
) -> None:
    executor, launcher = unlaunched
    worker, link = connected_twice(context, launcher)
    hello = partial(link.send, msgspec.msgpack.encode(TransferLink()))
    sends = [hello, partial(worker.send, ready_worker())]
    first, second = sends if link_is_first else reversed(sends)
    first()
    assert poll_once_heard(executor) == []
    second()
    assert next_event(executor) == ready_worker()


@pytest.mark.parametrize("unlaunched", ["ipc"], indirect=True)
@pytest.mark.parametrize(
    "message", [WorkerFailed("nonsense", True), StepResult(0, [], []), ready_worker()]
)
def test_a_link_does_not_speak_for_its_rank(
    unlaunched: Unlaunched, context: zmq.Context[zmq.Socket[bytes]], message: msgspec.Struct
) -> None:
    executor, launcher = unlaunched
    _, link = connected_twice(context, launcher)
    link.send(msgspec.msgpack.encode(message))
    (loss,) = poll_once_heard(executor)
    assert isinstance(loss, WorkerLost)
    assert "sent what is not a message" in loss.reason
    assert loss.suspicion == 0


# ---- traces


def trace_session(directory: Path) -> TraceSession:
    return TraceSession(level=TraceLevel.E2E, directory=str(directory), run="r")


def roles(directory: Path) -> list[str]:
    return sorted(fragment.header.role for fragment in read_fragments(directory))


def test_all_ranks_trace_and_know_the_time_of_an_engine_on_another_host(
    make_executor: MakeExecutor, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    executor = make_executor("obeys", SQUARE)
    is_between_hosts = request.node.callspec.params["make_executor"] == "tcp"
    assert isinstance(next_event(executor), WorkerReady)
    executor.start_trace(trace_session(tmp_path / "t"))
    executor.submit(PLAN)  # waits until the clocks have been compared
    assert isinstance(next_event(executor), StepResult)
    executor.stop_trace()
    stopped = next_event(executor)
    assert isinstance(stopped, TraceStopped)
    assert sorted(stopped.problems) == [f"rank {rank} has a word to say." for rank in range(4)]
    assert roles(tmp_path / "t") == [f"worker rank {rank}" for rank in range(4)]
    for fragment in read_fragments(tmp_path / "t"):
        assert fragment.header.parent_uid == executor.tracer.process.uid
        assert len(fragment.clocks) == is_between_hosts
        for clock in fragment.clocks:
            assert clock["peer"] == executor.tracer.process.uid
            # The host is the same in truth, so all of what was measured is error.
            assert abs(clock["offset_ns"]) <= clock["round_trip_ns"] / 2 + 1
    executor.submit(msgspec.structs.replace(PLAN, step=1, freed_slots=[0]))
    assert isinstance(next_event(executor), StepResult)


def test_workers_that_start_while_tracing_is_on_trace_at_once(
    make_executor: MakeExecutor, tmp_path: Path
) -> None:
    executor = make_executor("obeys", PAIR)
    next_event(executor)
    executor.start_trace(trace_session(tmp_path / "t"))
    (pid, _) = pids(executor).values()
    os.kill(pid, signal.SIGKILL)
    assert isinstance(next_event(executor), WorkerLost)
    executor.start()
    assert isinstance(next_event(executor), WorkerReady)
    executor.stop_trace()
    assert isinstance(next_event(executor), TraceStopped)
    assert roles(tmp_path / "t").count("worker rank 1") >= 1
    successors = [
        it for it in read_fragments(tmp_path / "t") if it.header.pid in pids(executor).values()
    ]
    assert sorted(it.header.role for it in successors) == ["worker rank 0", "worker rank 1"]
    assert {it.header.parent_uid for it in successors} == {executor.tracer.process.uid}


def test_workers_that_are_still_starting_are_told_when_they_are_ready(
    make_executor: MakeExecutor, tmp_path: Path
) -> None:
    executor = make_executor("obeys")
    executor.start_trace(trace_session(tmp_path / "t"))
    executor.stop_trace()
    assert executor.poll() == [TraceStopped()]  # there is nothing to wait for
    executor.start_trace(trace_session(tmp_path / "t"))
    assert isinstance(next_event(executor), WorkerReady)
    executor.stop_trace()
    assert isinstance(next_event(executor), TraceStopped)
    assert roles(tmp_path / "t") == ["worker rank 0"]


def test_a_worker_lost_before_its_fragment_is_closed_is_waited_for_no_longer(
    make_executor: MakeExecutor, tmp_path: Path
) -> None:
    executor = make_executor("obeys")
    next_event(executor)
    executor.start_trace(trace_session(tmp_path / "t"))
    stop(pids(executor)["the worker"])
    executor.stop_trace()
    os.kill(pids(executor)["the worker"], signal.SIGKILL)
    assert isinstance(next_event(executor), WorkerLost)
    executor.stop_trace()
    assert executor.poll() == [TraceStopped()]


@pytest.mark.parametrize("unlaunched", ["ipc"], indirect=True)
def test_a_connection_that_is_no_workers_is_not_heard(
    unlaunched: Unlaunched, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    executor, launcher = unlaunched
    ([_], address) = launcher.starts[0]
    stranger = context.socket(zmq.DEALER)
    stranger.setsockopt_string(zmq.IDENTITY, "7")
    stranger.connect(address)
    stranger.send(msgspec.msgpack.encode(WorkerFailed("nonsense", False)))
    assert poll_once_heard(executor) == []


@pytest.mark.parametrize("unlaunched", ["ipc"], indirect=True)
def test_a_message_in_parts_is_none(
    unlaunched: Unlaunched, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    executor, launcher = unlaunched
    _, link = connected_twice(context, launcher)
    link.send_multipart([b"a", msgspec.msgpack.encode(TransferLink())])
    (loss,) = poll_once_heard(executor)
    assert isinstance(loss, WorkerLost)
    assert "sent what is not a message" in loss.reason
