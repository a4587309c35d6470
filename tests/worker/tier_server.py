# SPDX-License-Identifier: Apache-2.0
"""An engine in this process over worker processes, with tiers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import zmq
from replica import new_executor

from benchmarks.drafters import AlwaysPays
from pagoda.engine.core import EngineCore
from pagoda.ipc.clock import MonotonicClock
from pagoda.messages.engine_config import EngineConfig, KVTiersConfig
from pagoda.messages.frontend import GenerateRequest, Work
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.speculation import OFF, SpeculativeConfig
from pagoda.messages.worker_config import WorkerConfig
from pagoda.parallel.config import ParallelConfig

COUNT = 16
"""Tokens of an answer."""


class Server:
    """An engine over worker processes that has room for one long prompt and a half."""

    def __init__(
        self,
        directory: Path,
        parallel: ParallelConfig,
        num_blocks: int = 40,
        speculation: SpeculativeConfig = OFF,
        max_model_len: int = 256,
        max_num_batched_tokens: int = 64,
        **options: object,
    ) -> None:
        """All drafts of `speculation` are computed."""
        worker = WorkerConfig(
            model=str(directory / "model"),
            num_blocks=num_blocks,
            block_size=16,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=4,
            num_threads=1,
            parallel=parallel,
            workers_on_host=parallel.replica_size,
            drafter=speculation.drafter,
            **options,  # type: ignore[arg-type]
        )
        config = EngineConfig(
            worker=worker,
            max_num_seqs=4,
            max_num_batched_tokens=max_num_batched_tokens,
            speculation=speculation,
            kv_tiers=KVTiersConfig(
                host_bytes=worker.kv_host_bytes,
                further=worker.kv_tiers,
            ),
        )
        self.core = EngineCore(config, new_executor(worker, directory), MonotonicClock())
        while not self.core.is_worker_ready:
            self._wait()
            self.core.step()
        assert self.core.scheduler is not None
        if self.core.scheduler.batcher.speculator is not None:
            self.core.scheduler.batcher.speculator.costs = AlwaysPays()
        # Until the directory has been looked through, nothing is stored in it.
        while not all(tier.is_indexed for tier in self.core.load().tiers):
            self._wait()
            self.core.step()

    def _wait(self) -> None:
        sources = [(source, zmq.POLLIN) for source in self.core.pollables()]
        wakeup = self.core.next_wakeup()
        timeout_s = 60.0 if wakeup is None else max(0.0, wakeup - MonotonicClock().now())
        assert zmq.zmq_poll(sources, round(1000 * timeout_s)) or wakeup is not None, "no event"

    def ask(self, *prompts: list[int]) -> tuple[list[list[int]], int]:
        """Returns the answers to prompts that come together, and how many tokens of them were cached."""
        work = Work(SamplingParams(temperature=0, seed=0, max_tokens=COUNT))
        return self.ask_requests(
            [
                GenerateRequest(request_id=str(index), prompt_token_ids=prompt, work=work)
                for index, prompt in enumerate(prompts)
            ]
        )

    def ask_requests(self, requests: Sequence[GenerateRequest]) -> tuple[list[list[int]], int]:
        """Does what `ask` does, for requests of different ids.

        Before it returns, all blocks are where they are to be kept.
        """
        answers: dict[str, list[int]] = {request.request_id: [] for request in requests}
        num_cached: dict[str, int] = {}
        for request in requests:
            assert self.core.add(request) == []
        while len(num_cached) < len(requests):
            for chunk in self.core.step():
                assert chunk.error is None
                answers[chunk.request_id] += chunk.token_ids
                if chunk.finish_reason is not None:
                    num_cached[chunk.request_id] = chunk.num_cached_tokens
            if len(num_cached) < len(requests):
                self._wait()
        self._settle()
        return list(answers.values()), sum(num_cached.values())

    def ask_some(self, request: GenerateRequest, count: int) -> list[int]:
        """The first tokens of an answer, at least so many of them, which is not at its end then."""
        assert self.core.add(request) == []
        return self.go_on(request.request_id, count)

    def go_on(self, request_id: str, count: int) -> list[int]:
        """The next tokens of an answer, at least so many of them."""
        tokens: list[int] = []
        while len(tokens) < count:
            self._wait()
            for chunk in self.core.step():
                assert (chunk.request_id, chunk.finish_reason) == (request_id, None)
                tokens += chunk.token_ids
        return tokens

    def _settle(self) -> None:
        assert self.core.scheduler is not None
        tiers = self.core.scheduler.hooks.tiers  # type: ignore[attr-defined]
        while tiers.ledger.num_open:
            self._wait()
            assert self.core.step() == []

    def figure(self, tier: str) -> int:
        """Blocks that a tier has given back."""
        return next(it.num_loaded for it in self.core.load().tiers if it.name == tier)
