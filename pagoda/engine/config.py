"""What an engine is told at its start. One frozen value, checked once, written as msgpack to the process."""

from __future__ import annotations

import msgspec

from pagoda.engine.messages import SimConfig, WorkerConfig


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One engine: a scheduler over one model replica."""

    worker: WorkerConfig
    executor: str = "local"
    """`local` (worker processes), `ray` (workers on a cluster) or `sim` (a cost model, no weights)."""
    ray_address: str | None = None
    """Of the cluster, `host:port`; None takes `RAY_ADDRESS`, or the cluster that this host has joined."""
    sim: SimConfig = SimConfig()
    max_num_seqs: int = 256
    """The most requests that run at once."""
    max_num_batched_tokens: int = 2048
    """The token budget of one step."""
    max_num_waiting: int = 4096
    """Requests beyond this many waiting are refused."""
    enable_prefix_caching: bool = True
    step_timeout_s: float = 300.0
    """A worker that takes longer for one step is killed and started again."""
