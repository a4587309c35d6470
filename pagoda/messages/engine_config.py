# SPDX-License-Identifier: Apache-2.0
"""The configuration of an engine: one frozen value, checked once, written as msgpack to the process."""

from __future__ import annotations

import msgspec

from pagoda.faults.injector import FaultPlan
from pagoda.messages.kv_groups import KVGroup
from pagoda.messages.sampling_params import DEFAULT_MAX_LOGPROBS
from pagoda.messages.speculation import OFF, SpeculativeConfig
from pagoda.messages.tracing import StartTrace
from pagoda.messages.transfers import TierPlace
from pagoda.messages.worker_config import CurveKeys, KVTierConfig, Role, WorkerConfig


class KVTiersConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Places for blocks besides the device; at least one has room."""

    host_bytes: int = 0
    """Memory of all workers of all replicas together; each has an equal part of it."""
    further: dict[str, KVTierConfig] = {}
    """Tiers of plugins by name, nearest first."""


class HandoffConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Part of an engine in prefill/decode handoff; that of its workers is `WorkerConfig.kv_handoff`."""

    role: Role
    """All that the engine can do."""
    first_role: Role | None = None
    """The part of it that the engine does until it is told otherwise; None for all."""
    host: str
    """The address of this host at which other engines reach it."""
    port: int = 0
    """Port of the first replica's listener; each further replica takes the next one. 0 takes free ports."""
    keys: CurveKeys
    lease_s: float = 30.0
    """Seconds for which KV is held for an engine that says nothing."""


class SimConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Cost model: a step takes `base_s + max(floor_s, per_token_s * tokens)` s and what its
    requests add, a transfer `per_transferred_block_s * blocks` s.

    Steps and transfers do not slow each other down.
    """

    base_s: float = 0.0
    per_token_s: float = 0.0
    floor_s: float = 0.0
    """The least that the tokens of a step take together: the time to read all weights."""
    per_sequence_s: float = 0.0
    """Seconds for each request in a step."""
    per_context_token_s: float = 0.0
    """Seconds for each token in front of those that a step computes, of all its requests."""
    per_pair_s: float = 0.0
    """Seconds for each pair of a token that a step computes and one in front of it, of requests with several."""
    per_transferred_block_s: float = 0.0
    shares_link: bool = False
    """True if transfers follow one another on one link; else each is as fast as if it were alone."""
    per_cold_block_s: float = 0.0
    """Seconds by which a block that a step reads below the device makes it longer."""
    segment_tokens: int = 0
    """Tokens of a segment of KV that may lie below the device; 0 where none may."""
    num_blocks: int = 8192
    block_size: int = 16
    max_model_len: int = 131072
    vocab_size: int = 512
    kv_groups: tuple[KVGroup, ...] = ()
    """KV groups of the model; empty for one that keeps all."""
    kv_host_slots: int = 0
    max_proposals: int = 0
    """The most tokens that its drafter proposes, of which each is right with probability `proposal_share`."""
    proposal_share: float = 0.8
    kv_places: tuple[TierPlace, ...] = ()
    answers_by_seed: bool = False
    """True if the seed of a request is the length of its answer, of equal tokens; the last one is 0."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One engine: a scheduler over one model replica. None switches a part off."""

    worker: WorkerConfig
    executor: str = "local"
    """`local` (worker processes), `ray` (workers on a cluster) or `sim` (a cost model, no weights)."""
    ray_address: str | None = None
    """Address of the cluster, `host:port`; None takes `RAY_ADDRESS`, or the cluster that this host has joined."""
    sim: SimConfig = SimConfig()
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    long_prefill_token_threshold: int = 0
    """The most tokens of one prompt in a step; 0 for no such limit. Encoders compute prompts whole."""
    max_num_waiting: int = 4096
    max_num_waiting_tokens: int | None = None
    """Prompt tokens of requests that wait and have not begun; None derives them
    from the KV cache (`pagoda.engine.assembly.QueueLimits`)."""
    max_logprobs: int = DEFAULT_MAX_LOGPROBS
    enable_prefix_caching: bool = True
    speculation: SpeculativeConfig = OFF
    kv_events: str | None = None
    """`tcp://HOST:PORT` where events of cached blocks are published (`pagoda.kv.publishing`)."""
    kv_tiers: KVTiersConfig | None = None
    handoff: HandoffConfig | None = None
    fail_on_load_failure: bool = False
    """True if a request fails when KV that was found for it, or is said to be at its source, cannot be loaded;
    False computes the KV."""
    engine_timeout_s: float = 30.0
    """Seconds of silence after which the frontend kills an engine that owes an answer, and starts another."""
    worker_timeout_s: float = 15.0
    """Seconds of silence after which the process of a worker counts as stopped, and is replaced."""
    step_timeout_s: float = 300.0
    worker_start_timeout_s: float = 600.0
    """Seconds without progress after which workers that start are killed and started again."""
    trace: StartTrace | None = None
    faults: FaultPlan | None = None
    """Faults that a test injects into the engine; its workers have their own."""
