# SPDX-License-Identifier: Apache-2.0
"""Load reports: the load and the counters of an engine, a replica or a fleet."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice
from typing import Annotated

import msgspec
from msgspec import Meta

from pagoda.messages.figures import added, counter, gauge, merged
from pagoda.messages.ranges import MAX_ITEMS, Count, Name, Seconds

STEP_TOKEN_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Upper bounds, in tokens, of the classes in which `StepTotals.by_tokens` counts steps."""
STEP_SEQUENCE_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
MAX_TIERS = 64


def _largest(values: Sequence[float]) -> float:
    return max(values, default=0.0)


def _concatenated(values: Sequence[tuple[ProcessMemory, ...]]) -> tuple[ProcessMemory, ...]:
    return tuple(islice(chain.from_iterable(values), MAX_ITEMS))


def _merged_steps(values: Sequence[StepTotals]) -> StepTotals:
    return StepTotals(*map(added, zip(*map(msgspec.structs.astuple, values), strict=True)))


def _merged_tiers(values: Sequence[tuple[TierLoad, ...]]) -> tuple[TierLoad, ...]:
    """One tier of each name, in the order of first appearance."""
    tiers: dict[str, list[TierLoad]] = {}
    for tier in chain.from_iterable(values):
        tiers.setdefault(tier.name, []).append(tier)
    return tuple(map(_merged_tier, islice(tiers.values(), MAX_TIERS)))


def _merged_tier(tiers: Sequence[TierLoad]) -> TierLoad:
    tier = merged(tiers)
    if not tier.is_shared:
        return tier
    return msgspec.structs.replace(
        tier,
        num_blocks=max(one.num_blocks for one in tiers),
        num_total_blocks=max(one.num_total_blocks for one in tiers),
    )


class StepTotals(msgspec.Struct, frozen=True, array_like=True):
    """Counts of finished steps, and the seconds that each phase of steps took (`PHASES`), since the start.

    The engine schedules, submits and updates; workers prepare inputs, run the model forward and sample.
    """

    num_tokens: Count = 0
    """Tokens computed: of prompts and answers, with those that were computed again."""
    num_sequences: Count = 0
    """Each sequence counts once in each step."""
    by_tokens: Annotated[list[Count], Meta(max_length=len(STEP_TOKEN_BOUNDS) + 1)] = []
    """Steps by tokens: a count for each of `STEP_TOKEN_BOUNDS`, and one above; empty before the first step."""
    by_sequences: Annotated[list[Count], Meta(max_length=len(STEP_SEQUENCE_BOUNDS) + 1)] = []
    """Steps by their number of sequences (`STEP_SEQUENCE_BOUNDS`)."""
    schedule_s: Seconds = 0.0
    submit_s: Seconds = 0.0
    wait_s: Seconds = 0.0
    """Time from handing a plan over until its result, without computing."""
    prepare_s: Seconds = 0.0
    forward_s: Seconds = 0.0
    sample_s: Seconds = 0.0
    update_s: Seconds = 0.0
    idle_s: Seconds = 0.0
    """Time for which the worker that samples had no plan, or waited for the stage before."""


PHASES = {
    name.removesuffix("_s"): name for name in StepTotals.__struct_fields__ if name.endswith("_s")
}
"""The field of `StepTotals` that holds the seconds of a phase, by the name of the phase."""


class ProcessMemory(msgspec.Struct, frozen=True, array_like=True):
    """The memory of one process on its host."""

    role: Name
    """The part of the server, for example `engine dp0` or `worker dp0 tp1 pp0`."""
    pid: Count
    resident_bytes: Count
    """Memory that several processes share counts in each."""


class LoadReport(msgspec.Struct, frozen=True, kw_only=True, tag="load_report"):
    """The load of an engine, or of all replicas behind a dispatcher, and what they have counted.

    Sums over replicas, `/load`, `/metrics` and docs/metrics.md (`make docs`) follow from the declarations.
    """

    num_running: Annotated[
        Count, gauge("num_requests_running", "Requests that run.", vllm=("num_requests_running",))
    ] = 0
    num_waiting: Annotated[
        Count, gauge("num_requests_waiting", "Requests that wait.", vllm=("num_requests_waiting",))
    ] = 0
    num_awaiting_kv: Annotated[
        Count,
        gauge(
            "num_requests_awaiting_kv",
            "Requests that wait for KV blocks from a tier below the device.",
            vllm=("num_requests_waiting",),
        ),
    ] = 0
    num_pending_tokens: Annotated[
        Count, gauge("num_tokens_pending", "Prompt and output tokens not yet computed.")
    ] = 0
    num_blocks: Annotated[Count, gauge("kv_cache_blocks", "Blocks of the KV cache.")] = 0
    num_free_blocks: Annotated[
        Count,
        gauge("kv_cache_free_blocks", "Blocks of the KV cache that are free or can be evicted."),
    ] = 0
    planned_memory_bytes: Annotated[
        Count,
        gauge(
            "worker_planned_memory_bytes",
            "Memory that the workers reckoned to take before they took any.",
        ),
    ] = 0
    taken_memory_bytes: Annotated[
        Count,
        gauge(
            "worker_taken_memory_bytes",
            "Memory that the workers' weights took, and that the largest step, KV and other tables take at most.",
        ),
    ] = 0
    draft_index_bytes: Annotated[
        Count,
        gauge(
            "spec_decode_index_bytes",
            "Memory of the engine at most in which drafts are looked up (ngram, suffix).",
        ),
    ] = 0
    num_cached_blocks: Annotated[Count, gauge()] = 0
    """Free blocks that a later request may find."""
    num_leases: Annotated[
        Count, gauge("kv_leases", "Requests whose KV is held for other engines.")
    ] = 0
    num_wanted_leases: Annotated[Count, gauge()] = 0
    """Leases that another engine has asked for and is not done with."""
    num_leased_blocks: Annotated[
        Count, gauge("kv_leased_blocks", "KV blocks that are held for other engines.")
    ] = 0
    step_time_s: Annotated[
        Seconds,
        gauge("step_time_seconds", "Duration of a step, as a moving average.", merge=_largest),
    ] = 0.0
    stalled_for_s: Annotated[
        Seconds,
        gauge(
            "stalled_seconds",
            "How long no step has finished although there is work; 0 when idle.",
            merge=_largest,
        ),
    ] = 0.0
    num_prompt_tokens: Annotated[
        Count,
        counter(
            "prompt_tokens_total",
            "Prompt tokens of requests that were admitted.",
            vllm=("prompt_tokens_total",),
        ),
        counter(
            "prefix_cache_queries_total",
            "Prompt tokens looked for in the cache.",
            vllm=("prefix_cache_queries_total", "gpu_prefix_cache_queries_total"),
        ),
    ] = 0
    num_prefix_hit_tokens: Annotated[
        Count,
        counter(
            "prefix_cache_hits_total",
            "Prompt tokens found in the cache.",
            vllm=("prefix_cache_hits_total", "gpu_prefix_cache_hits_total"),
        ),
    ] = 0
    num_generated_tokens: Annotated[
        Count,
        counter("generated_tokens_total", "Tokens sampled.", vllm=("generation_tokens_total",)),
    ] = 0
    num_cold_segments: Annotated[
        Count,
        counter(
            "kv_cold_segments_total",
            "Segments of running requests that went to tiers below the device, or were found there.",
        ),
    ] = 0
    num_lost_segments: Annotated[
        Count,
        counter(
            "kv_lost_segments_total",
            "Times that a running request's segments in tiers could not be read.",
        ),
    ] = 0
    num_streamed_bytes: Annotated[
        Count,
        counter(
            "kv_streamed_bytes_total", "Bytes of KV that steps read in tiers below the device."
        ),
    ] = 0
    num_cold_blocks: Annotated[
        Count,
        gauge(
            "kv_cold_blocks",
            "Blocks in tiers below the device that running requests hold there.",
        ),
    ] = 0
    num_drafts: Annotated[
        Count,
        counter(
            "spec_decode_num_drafts_total",
            "Drafts that steps computed, of one request in one step each.",
            vllm=("spec_decode_num_drafts_total",),
        ),
    ] = 0
    num_draft_tokens: Annotated[
        Count,
        counter(
            "spec_decode_num_draft_tokens_total",
            "Tokens of these drafts.",
            vllm=("spec_decode_num_draft_tokens_total",),
        ),
    ] = 0
    num_accepted_tokens: Annotated[
        Count,
        counter(
            "spec_decode_num_accepted_tokens_total",
            "Tokens of these drafts that were right.",
            vllm=("spec_decode_num_accepted_tokens_total",),
        ),
    ] = 0
    accepted_per_position: Annotated[
        list[Count],
        Meta(max_length=MAX_ITEMS),
        counter(
            "spec_decode_num_accepted_tokens_per_pos_total",
            "Tokens of drafts that were right, by their places in drafts.",
            vllm=("spec_decode_num_accepted_tokens_per_pos_total",),
            label="position",
        ),
    ] = []
    num_preemptions: Annotated[
        Count,
        counter(
            "num_preemptions_total",
            "Requests preempted for want of KV blocks.",
            vllm=("num_preemptions_total",),
        ),
    ] = 0
    num_blocks_stored: Annotated[
        Count, counter("kv_blocks_stored_total", "KV blocks that later requests could find.")
    ] = 0
    num_blocks_removed: Annotated[
        Count,
        counter(
            "kv_blocks_removed_total",
            "KV blocks evicted, or lost with a worker, that could be found before.",
        ),
    ] = 0
    num_leases_expired: Annotated[
        Count,
        counter(
            "kv_leases_expired_total",
            "Requests whose KV was held for other engines, and not fetched in time.",
        ),
    ] = 0
    num_steps: Annotated[Count, counter("engine_steps_total", "Steps finished.")] = 0
    num_worker_restarts: Annotated[
        Count, counter("worker_restarts_total", "Workers lost and started again.")
    ] = 0
    num_engine_restarts: Annotated[Count, counter()] = 0
    """Engines behind a dispatcher that were lost, and started again if they could be."""
    expert_tokens: Annotated[
        list[Count],
        Meta(max_length=MAX_ITEMS),
        counter(
            "expert_tokens_total",
            "Tokens given to an expert, over all layers; of a prompt, the last layer takes the last token.",
            label="expert",
        ),
    ] = []
    expert_rank_tokens: Annotated[
        list[Count],
        Meta(max_length=MAX_ITEMS),
        counter(
            "expert_rank_tokens_total",
            "Tokens given to the experts of a rank, over all layers.",
            label="rank",
        ),
    ] = []
    """Counts by tensor-parallel rank; empty without expert parallelism."""
    steps: Annotated[StepTotals, counter(merge=_merged_steps)] = StepTotals()
    tiers: Annotated[
        tuple[TierLoad, ...], Meta(max_length=MAX_TIERS), counter(merge=_merged_tiers)
    ] = ()
    """Tiers below the device, nearest first; other engines, from which KV is fetched, are the last."""
    processes: Annotated[
        tuple[ProcessMemory, ...], Meta(max_length=MAX_ITEMS), gauge(merge=_concatenated)
    ] = ()
    is_worker_ready: bool = True
    """False while a lost worker is being replaced."""
    query_id: Count | None = None
    """The query that this report answers; None if the engine reports unasked."""
    replicas: Annotated[tuple[ReplicaLoad, ...], Meta(max_length=MAX_ITEMS)] = ()


class TierLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks of one tier, and its counters."""

    name: Name
    num_blocks: Annotated[
        Count, gauge("kv_tier_blocks", "KV blocks that a tier below the device holds.")
    ] = 0
    num_total_blocks: Annotated[
        Count, gauge("kv_tier_capacity_blocks", "KV blocks that a tier has room for.")
    ] = 0
    is_indexed: Annotated[
        bool, gauge("kv_tier_indexed", "Whether all that a tier holds is known.", merge=all)
    ] = True
    num_stored: Annotated[
        Count, counter("kv_tier_blocks_stored_total", "KV blocks written to a tier.")
    ] = 0
    num_removed: Annotated[
        Count, counter("kv_tier_blocks_removed_total", "KV blocks removed from a tier.")
    ] = 0
    num_loaded: Annotated[
        Count, counter("kv_tier_blocks_loaded_total", "KV blocks loaded from a tier.")
    ] = 0
    num_failed: Annotated[
        Count,
        counter(
            "kv_tier_blocks_failed_total",
            "KV blocks that could not be written to a tier, or loaded from it.",
        ),
    ] = 0
    is_shared: bool = False
    """True if engines on one host share the tier, so that its blocks count once."""


class ReplicaLoad(msgspec.Struct, frozen=True, kw_only=True):
    """One replica, as the dispatcher in front of it sees it."""

    name: Name
    """The address of a host, or the number of an engine, from 0."""
    state: Name
    """`starting`, `ready`, `degraded` (its worker is being replaced), `ejected` (slower or less reliable than
    other replicas, and given no new requests for a while) or `failed` (given up)."""
    num_requests: Count
    """Requests that were sent to the replica and have not ended."""
    weighed_tokens: Count
    """The remaining work of these requests, as policies weigh it."""
    num_losses: Count = 0
    """Engines lost: the replica's own, or those behind it."""
    model: Name = ""
    """Name of the pool of a router of several models."""
    report: LoadReport | None = None
    """The replica's report, its earlier engines included; None while it does not answer."""
