"""Load reports: what an engine, a replica or a fleet says about its work."""

from __future__ import annotations

import msgspec

STEP_TOKEN_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Steps are counted by their tokens: those with up to so many, and more than one bound less."""
STEP_SEQUENCE_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class StepTotals(msgspec.Struct, frozen=True, array_like=True):
    """What steps computed and where their time went, since start."""

    num_tokens: int = 0
    """Computed: of prompts and answers, also those that were computed again."""
    num_sequences: int = 0
    """Each counts once in each step."""
    by_tokens: list[int] = []
    """Steps by how many tokens they had (`STEP_TOKEN_BOUNDS`); the last entry is of those above all bounds. Empty
    before the first step."""
    by_sequences: list[int] = []
    """The same by sequences (`STEP_SEQUENCE_BOUNDS`)."""
    schedule_s: float = 0.0
    """Seconds in which the engine made plans."""
    submit_s: float = 0.0
    """Seconds in which it handed them over."""
    wait_s: float = 0.0
    """Seconds from when plans were handed over until their results were there, without those of computing: steps
    wait for the one before, and messages are on their way."""
    prepare_s: float = 0.0
    """Seconds in which workers made inputs of plans."""
    forward_s: float = 0.0
    """Seconds in which they ran the model."""
    sample_s: float = 0.0
    """Seconds in which they chose tokens."""
    update_s: float = 0.0
    """Seconds in which the engine took results."""


class ProcessMemory(msgspec.Struct, frozen=True, array_like=True):
    """What one process takes of its host's memory."""

    role: str
    """Such as `engine dp0` or `worker dp0 tp1 pp0`."""
    pid: int
    resident_bytes: int
    """What several processes share counts in each."""


class LoadReport(msgspec.Struct, frozen=True, kw_only=True, tag="load_report"):
    """What a dispatcher and `/health` need to know about an engine."""

    num_running: int
    num_waiting: int
    num_pending_tokens: int
    """Prompt and output tokens not yet computed."""
    num_free_blocks: int
    """Free or evictable, on the device."""
    num_cached_blocks: int
    """Of these, how many hold what a later request may find."""
    num_blocks: int
    num_steps: int
    """Finished since start."""
    num_preemptions: int
    num_worker_restarts: int
    num_blocks_stored: int
    """KV blocks that later requests could find, since start."""
    num_blocks_removed: int
    """Of these, evicted or lost with a worker."""
    num_prefix_hit_tokens: int
    num_prompt_tokens: int
    """Prompt tokens admitted; hits over this is the hit rate."""
    step_time_s: float
    """Moving average."""
    stalled_for_s: float
    """Seconds since a step last finished while work was waiting; 0 when idle."""
    expert_tokens: list[int] = []
    """Tokens given to each expert since start; see `StepResult`."""
    expert_rank_tokens: list[int] = []
    """The same for each tensor-parallel rank that holds experts of its own; empty without expert parallelism."""
    is_worker_ready: bool = True
    """False while a lost worker is being replaced."""
    num_awaiting_kv: int = 0
    """Requests that wait for KV to be looked up or loaded; `num_waiting` does not count them."""
    tiers: tuple[TierLoad, ...] = ()
    """Below the device, nearest first; other engines, from which KV is fetched, are the last."""
    num_leases: int = 0
    """Requests whose KV is held for other engines."""
    num_wanted_leases: int = 0
    """Of these, those that another engine has asked for and is not done with."""
    num_leased_blocks: int = 0
    """Blocks of them; one of two requests counts twice."""
    num_leases_expired: int = 0
    """Since start: nobody fetched them, or said that they were fetched."""
    num_generated_tokens: int = 0
    """Sampled since start."""
    steps: StepTotals = StepTotals()
    num_engine_restarts: int = 0
    """Engines behind a dispatcher that were lost since it started, and started again if they could be."""
    processes: tuple[ProcessMemory, ...] = ()
    """Of the engine and of its workers on the same host; of what is behind a dispatcher, all."""
    query_id: int | None = None
    """Of the query that this answers; None when the engine reports by itself that `is_worker_ready` changed."""
    replicas: tuple[ReplicaLoad, ...] = ()
    """What a dispatcher adds up here, one by one; empty for an engine."""


class TierLoad(msgspec.Struct, frozen=True, kw_only=True):
    """How full one tier is, and what it has done since the start."""

    name: str
    num_blocks: int
    """That can be found in it."""
    num_total_blocks: int
    """That it has room for."""
    num_stored: int = 0
    num_removed: int = 0
    num_loaded: int = 0
    num_failed: int = 0
    """Blocks that should have been loaded or stored, and were not."""
    is_indexed: bool = True
    """False while it is still finding out what it holds."""
    is_shared: bool = False
    """Whether engines beside each other have it together, so that what is in it counts once."""


class ReplicaLoad(msgspec.Struct, frozen=True, kw_only=True):
    """One replica, as the dispatcher in front of it sees it."""

    name: str
    """The address of a host, or the number of an engine, from 0."""
    state: str
    """`starting`, `ready`, `degraded` (its worker is being replaced), `ejected` (it does worse than others,
    and gets nothing new for a while) or `failed` (given up)."""
    num_requests: int
    """Requests that were sent there and have not ended."""
    weighed_tokens: int
    """The work that these still are, as policies weigh it."""
    num_losses: int = 0
    """Of its engine, or of engines behind it."""
    report: LoadReport | None = None
    """Its own; None while it does not answer."""
