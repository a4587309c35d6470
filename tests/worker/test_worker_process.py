# SPDX-License-Identifier: Apache-2.0
"""The worker as a process, over a real socket."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import zmq
from family_models import make_model
from tiny_models import continuation, save_model

import pagoda
from pagoda.ipc.codec import Codec
from pagoda.ipc.lifeline import ChildProcess
from pagoda.ipc.machine import available_cores
from pagoda.messages.frontend import Work
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.worker import (
    SlotStart,
    StepPlan,
    StepResult,
    WorkerFailed,
    WorkerMessage,
    WorkerProgress,
    WorkerReady,
)
from pagoda.messages.worker_config import WorkerConfig
from pagoda.parallel.config import ParallelConfig
from pagoda.worker.pinning import part_of_cores

EMBEDDED = Path(pagoda.__file__).parent / "checkpoints" / "pagoda_tiny"
SAMPLING = SamplingParams(temperature=0, seed=0, max_tokens=64)


class _Worker:
    def __init__(self, directory: Path, config: WorkerConfig) -> None:
        address = f"ipc://{directory}/worker"
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVTIMEO, 60_000)
        self._socket.bind(address)
        self._codec = Codec[WorkerMessage](WorkerMessage)
        encoded = msgspec.msgpack.encode(config)
        self.child = ChildProcess("pagoda.worker.main", [address], config=encoded)

    def receive(self) -> WorkerMessage:
        """Returns the next message that is neither about transfers nor a sign of progress."""
        while True:
            identity, payload = self._socket.recv_multipart()
            if identity == b"0":
                message = self._codec.decode(payload)
                if not isinstance(message, WorkerProgress):
                    return message

    def ready(self) -> WorkerReady:
        ready = self.receive()
        assert isinstance(ready, WorkerReady)
        return ready

    def send(self, plan: StepPlan) -> None:
        self._socket.send_multipart([b"0", msgspec.msgpack.encode(plan)])

    def step(self, plan: StepPlan) -> StepResult:
        self.send(plan)
        result = self.receive()
        assert isinstance(result, StepResult)
        return result

    def close(self) -> None:
        self.child.close()
        self._context.destroy()


Start = Callable[..., _Worker]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a worker on one thread, of the embedded model unless the fields say otherwise."""
    started: list[_Worker] = []

    def start(**fields: Any) -> _Worker:
        config = WorkerConfig(**{"model": str(EMBEDDED), "num_threads": 1} | fields)
        started.append(_Worker(tmp_path, config))
        return started[-1]

    yield start
    for worker in started:
        worker.close()


def test_answers_plans_that_run_ahead(tmp_path: Path, backend: str, start: Start) -> None:
    model = save_model("qwen3", tmp_path)
    worker = start(model=str(tmp_path), backend=backend, max_model_len=256)
    ready = worker.ready()
    assert (ready.max_model_len, ready.vocab_size, ready.block_size) == (256, 320, 16)
    assert ready.num_blocks == 256 * 256 // 16  # all that 256 sequences of 256 tokens could use
    assert ready.summary.startswith(backend)
    assert ", 1 thread, float32, " in ready.summary

    os.kill(worker.child.pid, signal.SIGINT)  # Ctrl-C in the terminal is for the parent to handle
    prompt = [random.Random(0).randrange(320) for _ in range(20)]
    slot = SlotStart(3, prompt, len(prompt), 0, [[5, 2]], Work(SAMPLING))
    worker.send(StepPlan(0, [3], [15], [slot]))
    worker.send(StepPlan(1, [3], [5]))
    for step in range(2, 10):  # each counts on a token that has not been seen
        worker.send(StepPlan(step, [3], [1]))
    results = [worker.receive() for _ in range(10)]
    assert all(isinstance(result, StepResult) for result in results)
    assert [result.step for result in results if isinstance(result, StepResult)] == list(range(10))
    tokens = [t for r in results if isinstance(r, StepResult) for (t,) in r.token_ids]
    assert tokens == continuation(model, prompt, 9)


def test_a_broken_request_is_logged_with_its_traceback(
    start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    worker = start()
    worker.ready()
    result = worker.step(
        StepPlan(0, [0], [1], [SlotStart(0, [10**6], 1, 0, [[0]], Work(SAMPLING))])
    )
    assert result.errors == {0: "this request broke a step; the server's log says why"}
    log = capfd.readouterr().err
    assert "ERROR   pagoda.worker.runner" in log
    assert "IndexError" in log


def test_a_user_error_is_one_sentence(tmp_path: Path, start: Start) -> None:
    worker = start(model=str(tmp_path / "nothing"))
    failed = worker.receive()
    assert isinstance(failed, WorkerFailed)
    assert failed.is_user_error
    assert failed.error == f"there is no model directory {tmp_path / 'nothing'}."
    assert worker.child.describe_end() == "exited with code 1"


def test_a_plan_that_does_not_fit_ends_the_worker_behind_its_last_result(
    start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    worker = start()
    worker.ready()
    worker.send(StepPlan(0, [0], [3], [SlotStart(0, [1, 2, 3], 3, 0, [[0]], Work(SAMPLING))]))
    worker.send(StepPlan(1, [], [], freed_slots=[7]))
    result = worker.receive()
    assert isinstance(result, StepResult)
    assert (result.slots, result.errors) == ([0], {})
    assert worker.child.describe_end() == "exited with code 1"
    log = capfd.readouterr().err
    assert "a step broke this worker" in log
    assert "Slot 7 is not in use" in log


def test_a_launch_that_ends_the_worker_comes_behind_the_result_before_it(
    tmp_path: Path,
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """On a device that computes by itself, and with states, which nothing can move on again."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    make_model("lfm2-bias").save_pretrained(tmp_path)
    worker = start(model=str(tmp_path), backend="cuda", max_num_seqs=4, max_model_len=64)
    groups = range(len(worker.ready().kv_groups))
    good, *unknown = (
        SlotStart(
            slot, prompt, len(prompt), 0, [[4 * slot + group] for group in groups], Work(SAMPLING)
        )
        for slot, prompt in enumerate(([1, 2], [320], [320]))
    )
    worker.send(StepPlan(0, [0], [2], [good]))
    worker.send(StepPlan(1, [0, 1, 2], [1, 1, 1], unknown))
    result = worker.receive()
    assert isinstance(result, StepResult)
    assert (result.slots, result.errors) == ([0], {})
    assert worker.child.describe_end() == "exited with code 1"
    log = capfd.readouterr().err
    assert "a step broke this worker" in log
    assert "IndexError" in log


def _run_a_large_step(worker: _Worker) -> None:
    """Large enough that all threads take part."""
    prompt = [token % 300 for token in range(512)]
    start = SlotStart(0, prompt, 512, 0, [list(range(512 // 16))], Work(SAMPLING))
    assert not worker.step(StepPlan(0, [0], [512], [start])).errors


def _cores_of_threads(pid: int) -> Counter[frozenset[int]]:
    """Number of threads by the set of cores that they may run on."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return Counter(frozenset(os.sched_getaffinity(int(task.name))) for task in tasks)


def test_pinned_threads_have_a_core_each(backend: str, start: Start) -> None:
    allowed = os.sched_getaffinity(0)
    options = {"num_threads": len(allowed), "pin_threads": True, "kv_host_bytes": 2**20}
    worker = start(backend=backend, **options)
    worker.ready()
    _run_a_large_step(worker)
    of_threads = _cores_of_threads(worker.child.pid)
    assert {core for cores in of_threads if len(cores) == 1 for core in cores} == allowed
    # Those that do not compute are free: the lifeline's, two of ZeroMQ, two for KV in host memory.
    assert len(allowed) == 1 or of_threads[frozenset(allowed)] >= 5


def test_pinning_leaves_the_number_of_threads_as_it_is(start: Start) -> None:
    count = available_cores()
    threads = f", {count} thread{'s' if count > 1 else ''}, "
    assert threads in start(num_threads=None, pin_threads=True).ready().summary


def test_a_named_device_is_a_part_of_the_cores(start: Start) -> None:
    allowed = os.sched_getaffinity(0)
    parallel = ParallelConfig(devices=("cpu:1",))
    worker = start(num_threads=None, parallel=parallel, workers_on_host=2)
    ready = worker.ready()
    assert os.sched_getaffinity(worker.child.pid) == part_of_cores(allowed, 1, 2)
    count = max(1, available_cores() // 2)
    assert f", {count} thread{'s' if count > 1 else ''}, " in ready.summary


def test_threads_are_free_and_share_one_openmp_library(backend: str, start: Start) -> None:
    worker = start(num_threads=None, backend=backend)
    worker.ready()
    _run_a_large_step(worker)
    assert set(_cores_of_threads(worker.child.pid)) == {frozenset(os.sched_getaffinity(0))}
    lines = Path(f"/proc/{worker.child.pid}/maps").read_text().splitlines()
    files = {Path(line.split(maxsplit=5)[5]) for line in lines if line.count("/")}
    openmp = [file.name for file in files if file.name.startswith(("libgomp", "libomp", "libiomp"))]
    assert len(openmp) == 1
    assert openmp[0].startswith("libgomp")


def test_ends_when_its_parent_hangs_up(start: Start) -> None:
    worker = start()
    worker.ready()
    process = psutil.Process(worker.child.pid)
    worker.child.close()
    assert not process.is_running()
    assert worker.child.describe_end() == "exited with code 0"
