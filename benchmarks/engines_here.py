# SPDX-License-Identifier: Apache-2.0
"""Engines in processes of this machine behind one router, and drawn requests that clients in this process ask."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pagoda.fleet.engine_client import EngineClient
from pagoda.fleet.policies import POLICIES, PolicyName
from pagoda.ipc.clock import MonotonicClock
from pagoda.llm.engine_options import EngineOptions, ExecutorOptions, ParallelOptions
from pagoda.messages.engine_config import EngineConfig
from pagoda.messages.frontend import EngineReady
from pagoda.messages.worker_config import Role
from pagoda.plugins.disaggregation.options import HandoffOptions
from pagoda.plugins.router.prefill_decode import PrefillDecodeRouter
from pagoda.plugins.simulate.clients import Clients
from pagoda.plugins.simulate.records import Records
from pagoda.plugins.simulate.workload import Workload, read_workload

ConfigOf = Callable[[Role], EngineConfig]
POLICY: PolicyName = "least-pending-tokens"
_REQUESTS = """
duration_s: {seconds}
rate: {rate}
prompt_tokens: {{mean: {prompt}, sigma: 0.7, most: {most_prompt}}}
output_tokens: {{mean: {answer}, sigma: 0.6, most: {most_answer}}}
"""
_FLAGS: Mapping[Role, Literal["none", "prefill", "decode", "both"]] = {
    Role.NONE: "none",
    Role.PREFILL: "prefill",
    Role.DECODE: "decode",
    Role.BOTH: "both",
}


@dataclass(frozen=True)
class Load:
    """Mean lengths of requests, in tokens."""

    prompt: int
    answer: int

    def drawn(self, rate: float, seconds: float, seed: int) -> Workload:
        """Requests that come for so many seconds, `rate` a second."""
        text = _REQUESTS.format(
            seconds=seconds,
            rate=rate,
            prompt=self.prompt,
            most_prompt=8 * self.prompt,
            answer=self.answer,
            most_answer=6 * self.answer,
        )
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "requests.yaml"
            path.write_text(text)
            return read_workload(path, seed, scale=1, num_requests=None)


def configs(engine: EngineOptions, model: str | None, folder: Path) -> tuple[ConfigOf, str]:
    """Configurations of engines by their roles, and the name of the model; `folder` gets the cluster's key."""
    executor = ExecutorOptions()
    files = executor.resolve(engine, model, ParallelOptions())
    key = folder / "key"
    key.write_text(secrets.token_hex())

    def config_of(role: Role) -> EngineConfig:
        options = HandoffOptions(role=_FLAGS[role])
        handoff = options.config(cluster_key_file=key, advertise="127.0.0.1", num_replicas=1)
        return executor.engine_config(engine, files.model, ParallelOptions(), handoff)

    return config_of, files.served_name


class Server:
    """Engines of these roles, which run between `start` and `close`."""

    def __init__(self, config_of: ConfigOf, roles: Sequence[Role]) -> None:
        self._engines = [EngineClient(config_of(role)) for role in roles]
        self._members = PrefillDecodeRouter(POLICIES[POLICY])
        self._generate = self._members.dispatcher.generate

    async def start(self) -> None:
        for engine in self._engines:
            await engine.start()
            self._members.add(engine.replica)

    async def close(self) -> None:
        await self._members.close()
        for engine in self._engines:
            await engine.close()

    @property
    def limits(self) -> EngineReady:
        return self._engines[0].replica.limits

    async def ask(self, workload: Workload) -> Records:
        """Records of clients who ask all of `workload`."""
        records = Records()
        clients = Clients(
            workload,
            self._generate,
            records,
            known_lengths=True,
            max_model_len=self.limits.max_model_len,
            on_done=lambda: None,
            clock=MonotonicClock(),
        )
        await clients.run()
        records.ended_at = clients.now()
        return records
