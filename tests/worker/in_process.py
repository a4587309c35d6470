"""A whole engine around a real runner, in this process: scheduler, KV manager, model and sampler, no sockets."""

from __future__ import annotations

from pathlib import Path

from pagoda.engine.config import EngineConfig
from pagoda.engine.core import EngineCore
from pagoda.engine.messages import GenerateRequest, LoadReport, StepPlan, WorkerConfig
from pagoda.executor.base import ExecutorEvent
from pagoda.ipc.clock import VirtualClock
from pagoda.worker.loading import load_runner


class InProcessExecutor:
    """Runs every plan at once; as with a worker process, the next step is planned before its result is seen."""

    max_in_flight = 2

    def __init__(self, config: WorkerConfig) -> None:
        self._runner, self._ready = load_runner(config)
        self._events: list[ExecutorEvent] = []

    def start(self, num_blocks: int | None = None) -> None:  # noqa: ARG002 - never started again
        self._events.append(self._ready)

    def submit(self, plan: StepPlan) -> None:
        self._events.append(self._runner.step(plan))

    def poll(self) -> list[ExecutorEvent]:
        events, self._events = self._events, []
        return events

    def pollables(self) -> list[object]:
        return []

    def next_event_at(self) -> float | None:
        return None

    def close(self) -> None:
        pass


class InProcessEngine:
    """An engine that answers requests from first to last."""

    def __init__(
        self,
        directory: Path,
        *,
        max_model_len: int,
        num_blocks: int = 512,
        block_size: int = 16,
        max_num_batched_tokens: int = 2048,
        enable_prefix_caching: bool = False,
    ) -> None:
        worker = WorkerConfig(
            model=str(directory),
            max_model_len=max_model_len,
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=16,
            num_threads=1,
        )
        config = EngineConfig(
            worker=worker,
            max_num_seqs=16,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_prefix_caching=enable_prefix_caching,
        )
        self._core = EngineCore(config, InProcessExecutor(worker), VirtualClock())
        self._core.step()

    def answer(self, requests: list[GenerateRequest]) -> list[list[int]]:
        """The output tokens of requests that arrive together.

        Raises:
            RuntimeError: one of them failed.
        """
        tokens: dict[str, list[int]] = {}
        for request in requests:
            tokens[request.request_id] = []
            self._core.add(request)
        running = set(tokens)
        while running:
            for chunk in self._core.step():
                if chunk.error is not None:
                    raise RuntimeError(chunk.error)
                tokens[chunk.request_id] += chunk.token_ids
                if chunk.finish_reason is not None:
                    running.discard(chunk.request_id)
        return list(tokens.values())

    def load(self) -> LoadReport:
        return self._core.load()
