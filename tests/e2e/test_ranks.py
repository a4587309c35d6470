# SPDX-License-Identifier: Apache-2.0
"""A model split over worker processes gives the same tokens when a rank is killed, on one host and on two."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
import zmq

import pagoda
from pagoda.engine.core import EngineCore
from pagoda.executor.group import GroupExecutor
from pagoda.executor.launcher import Launcher, LocalLauncher, LocalWorkers
from pagoda.ipc.clock import MonotonicClock
from pagoda.messages.engine_config import EngineConfig
from pagoda.messages.frontend import GenerateRequest, Grammar, Work
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.worker_config import WorkerConfig
from pagoda.parallel.config import ParallelConfig

EMBEDDED = Path(pagoda.__file__).parent / "checkpoints" / "pagoda_tiny"
SQUARE = ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2)
OWN_REQUESTS = ParallelConfig(tensor_parallel_size=2, dp_attention=True)
MAX_TOKENS = 48
REQUESTS = [
    GenerateRequest(
        request_id=f"r{index}",
        prompt_token_ids=[40 + 3 * index + n for n in range(5 + 7 * index)],
        work=Work(
            SamplingParams(
                temperature=index % 2 / 2, seed=index, max_tokens=MAX_TOKENS, ignore_eos=True
            )
        ),
        grammar=Grammar("regex", "[a-z ]{1,1000}") if index % 4 == 3 else None,
    )
    for index in range(8)
]


class TwoHosts:
    """A launcher that gives the ranks of a stage different addresses, as on different hosts."""

    first_word_s = 60.0

    def launch(self, configs: Sequence[WorkerConfig], address: str) -> LocalWorkers:
        placed = [
            msgspec.structs.replace(config, bind_host=f"127.0.0.{1 + config.place.tp}")
            for config in configs
        ]
        return LocalLauncher().launch(placed, address)


class Replica:
    """An engine in this process over real workers."""

    def __init__(self, parallel: ParallelConfig, launcher: Launcher, address: str) -> None:
        worker = WorkerConfig(
            model=str(EMBEDDED),
            dtype="float32",
            max_model_len=128,
            num_blocks=64,
            max_num_seqs=8,
            num_threads=1,
            parallel=parallel,
            workers_on_host=parallel.replica_size,
        )
        clock = MonotonicClock()
        self.executor = GroupExecutor(
            worker, launcher, address=address, step_timeout_s=60.0, clock=clock
        )
        config = EngineConfig(worker=worker, max_num_seqs=8, max_num_batched_tokens=64)
        self._core = EngineCore(config, self.executor, clock)
        while self._core.ready is None:
            self._wait()

    def answer(self, victims: Sequence[str] = ()) -> list[list[int]]:
        """Returns the tokens of all requests; `victims` are killed one after the other meanwhile."""
        tokens: dict[str, list[int]] = {request.request_id: [] for request in REQUESTS}
        for request in REQUESTS:
            self._core.add(request)
        total = len(REQUESTS) * MAX_TOKENS
        due = [(total * (i + 1) // (len(victims) + 1), name) for i, name in enumerate(victims)]
        running = set(tokens)
        while running:
            for chunk in self._core.step():
                assert chunk.error is None
                tokens[chunk.request_id] += chunk.token_ids
                if chunk.finish_reason is not None:
                    running.discard(chunk.request_id)
            workers = self.executor.workers
            if due and sum(map(len, tokens.values())) >= due[0][0] and workers is not None:
                assert isinstance(workers, LocalWorkers)
                os.kill(workers.pids[due.pop(0)[1]], signal.SIGKILL)
            if running:
                self._wait()
        assert self._core.load().num_worker_restarts == len(victims)
        return list(tokens.values())

    def _wait(self) -> None:
        sources = [(source, zmq.POLLIN) for source in self.executor.pollables()]
        zmq.zmq_poll(sources, 1000 if sources else 10)
        if self._core.ready is None:
            self._core.step()

    def close(self) -> None:
        self._core.close()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[list[int]]]:
    """Tokens of one device."""
    directory = tmp_path_factory.mktemp("one")
    replica = Replica(ParallelConfig(), LocalLauncher(), f"ipc://{directory / 'w'}")
    yield replica.answer()
    replica.close()


@pytest.mark.parametrize(
    ("parallel", "launcher", "address", "victim"),
    [
        (SQUARE, LocalLauncher(), None, "worker pp0 tp1"),
        (SQUARE, TwoHosts(), "tcp://127.0.0.1", "worker pp1 tp0"),
        (OWN_REQUESTS, LocalLauncher(), None, "worker pp0 tp1"),
        (OWN_REQUESTS, TwoHosts(), "tcp://127.0.0.1", "worker pp0 tp0"),
    ],
    ids=["one host", "two hosts", "requests of its own", "requests of its own, two hosts"],
)
def test_a_rank_is_killed(
    parallel: ParallelConfig,
    launcher: Launcher,
    address: str | None,
    victim: str,
    expected: list[list[int]],
    tmp_path: Path,
) -> None:
    replica = Replica(parallel, launcher, address or f"ipc://{tmp_path / 'w'}")
    try:
        assert replica.answer([victim]) == expected
    finally:
        replica.close()
