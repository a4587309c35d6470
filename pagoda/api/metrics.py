"""`GET /metrics`: the engine's load in the text format of Prometheus, version 0.0.4.

Names end as those of vLLM do, so that its dashboards need a new prefix only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from aiohttp import web

from pagoda.api.call import Call
from pagoda.engine.messages import LoadReport

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_GAUGES = {
    "num_requests_running": ("num_running", "Requests that run."),
    "num_requests_waiting": ("num_waiting", "Requests that wait."),
    "num_requests_awaiting_kv": (
        "num_awaiting_kv",
        "Requests that wait for KV blocks from a tier below the device.",
    ),
    "num_tokens_pending": ("num_pending_tokens", "Prompt and output tokens not yet computed."),
    "kv_cache_blocks": ("num_blocks", "Blocks of the KV cache."),
    "kv_cache_free_blocks": ("num_free_blocks", "Blocks of it that are free or can be evicted."),
    "kv_leases": ("num_leases", "Requests whose KV is held for other engines."),
    "kv_leased_blocks": ("num_leased_blocks", "KV blocks of them."),
    "step_time_seconds": ("step_time_s", "Duration of a step, as a moving average."),
}
_COUNTERS = {
    "num_preemptions_total": ("num_preemptions", "Requests preempted for want of KV blocks."),
    "prefix_cache_queries_total": ("num_prompt_tokens", "Prompt tokens looked for in the cache."),
    "prefix_cache_hits_total": ("num_prefix_hit_tokens", "Prompt tokens found in the cache."),
    "kv_blocks_stored_total": ("num_blocks_stored", "KV blocks that later requests could find."),
    "kv_blocks_removed_total": (
        "num_blocks_removed",
        "KV blocks evicted, or lost with a worker, that could be found before.",
    ),
    "kv_leases_expired_total": (
        "num_leases_expired",
        "Requests whose KV was held for other engines, and not fetched in time.",
    ),
    "engine_steps_total": ("num_steps", "Steps finished."),
    "worker_restarts_total": ("num_worker_restarts", "Workers lost and started again."),
}
_BY_INDEX = {
    "expert_tokens_total": (
        "expert_tokens",
        "expert",
        "Tokens given to an expert, over all layers.",
    ),
    "expert_rank_tokens_total": (
        "expert_rank_tokens",
        "rank",
        "Tokens given to the experts of a rank, over all layers.",
    ),
}
_TIER_GAUGES = {
    "kv_tier_blocks": ("num_blocks", "KV blocks that a tier below the device holds."),
    "kv_tier_capacity_blocks": ("num_total_blocks", "KV blocks that it has room for."),
    "kv_tier_indexed": ("is_indexed", "Whether all that it holds is known."),
}
_TIER_COUNTERS = {
    "kv_tier_blocks_stored_total": ("num_stored", "KV blocks written to a tier."),
    "kv_tier_blocks_removed_total": ("num_removed", "KV blocks removed from a tier."),
    "kv_tier_blocks_loaded_total": ("num_loaded", "KV blocks loaded from a tier."),
    "kv_tier_blocks_failed_total": (
        "num_failed",
        "KV blocks that could not be written to a tier, or loaded from it.",
    ),
}


async def metrics(call: Call) -> web.StreamResponse:
    report = await call.service.ready_generator().endpoint.load()
    return call.text("\n".join([*_lines(report), ""]), CONTENT_TYPE)


def _lines(report: LoadReport) -> Iterator[str]:
    """A series for each replica: where one is started again, its counters alone begin anew."""
    yield from _head("replica_ready", "gauge", "Whether a replica computes.")
    for replica in report.replicas:
        yield f'pagoda_replica_ready{{replica="{replica.name}"}} {int(replica.state == "ready")}'
    reports = {
        replica.name: replica.report for replica in report.replicas if replica.report is not None
    }
    for kind, table in (("gauge", _GAUGES), ("counter", _COUNTERS)):
        for name, (field, help_text) in table.items():
            yield from _head(name, kind, help_text)
            for owner, own in reports.items():
                yield f'pagoda_{name}{{replica="{owner}"}} {getattr(own, field)}'
    if report.tiers:
        yield from _tier_lines(reports)
    for name, (field, label, help_text) in _BY_INDEX.items():
        if not getattr(report, field):
            continue
        yield from _head(name, "counter", help_text)
        for owner, own in reports.items():
            for number, value in enumerate(getattr(own, field)):
                yield f'pagoda_{name}{{replica="{owner}",{label}="{number}"}} {value}'


def _tier_lines(reports: Mapping[str, LoadReport]) -> Iterator[str]:
    for kind, table in (("gauge", _TIER_GAUGES), ("counter", _TIER_COUNTERS)):
        for name, (field, help_text) in table.items():
            yield from _head(name, kind, help_text)
            for owner, own in reports.items():
                for tier in own.tiers:
                    labels = f'replica="{owner}",tier="{tier.name}"'
                    yield f"pagoda_{name}{{{labels}}} {int(getattr(tier, field))}"


def _head(name: str, kind: str, help_text: str) -> Iterator[str]:
    yield f"# HELP pagoda_{name} {help_text}"
    yield f"# TYPE pagoda_{name} {kind}"
