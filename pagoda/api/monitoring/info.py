# SPDX-License-Identifier: Apache-2.0
"""The small routes: health, models, load, version and running answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
from aiohttp import web

from pagoda.api.answers.running_answers import running_answers
from pagoda.api.errors import ApiError, unavailable
from pagoda.api.http.request_context import RequestContext
from pagoda.fleet.endpoint import ReplicaState
from pagoda.messages.adapters import Adapter
from pagoda.messages.load import LoadReport, ReplicaLoad
from pagoda.messages.worker_config import Role
from pagoda.text.text_generator import TextGenerator
from pagoda.version import __version__

_KV_CONNECTOR = "NixlConnector"
"""The connector of vLLM whose `kv_transfer_params` a server with a role takes and gives."""


async def health_live(context: RequestContext) -> web.StreamResponse:
    return context.json({"status": "live"})


async def health_ready(context: RequestContext) -> web.StreamResponse:
    """The model makes progress; 503 if it does not, with the reason for those who have the API key."""
    context.service.ready_generator()
    if context.service.draining:
        raise unavailable("The server is shutting down.")
    health = await context.service.health()
    if not health.ready and not context.has_key:
        raise unavailable("The server is not ready.")
    if not health.ready:
        raise unavailable(f"{health.reason[:1].upper()}{health.reason[1:]}.")
    return context.json({"status": "ready"})


async def version(context: RequestContext) -> web.StreamResponse:
    return context.json({"version": __version__})


async def models(context: RequestContext) -> web.StreamResponse:
    return context.json({"object": "list", "data": all_models(context, _model)})


async def model(context: RequestContext) -> web.StreamResponse:
    return context.json(one_model(context, _model))


Describe = Callable[[RequestContext, str, TextGenerator], dict[str, Any]]
"""Description of the model or adapter of a name, as an API has it."""


def all_models(context: RequestContext, describe: Describe) -> list[dict[str, Any]]:
    """Each model by all its names, and the adapters."""
    found = context.service.names(context.client_request)
    return [_entry(context, *one, describe) for one in found]


def one_model(context: RequestContext, describe: Describe) -> dict[str, Any]:
    """The model or adapter that the path names. Raises ApiError: 404, it is not served here."""
    name = context.path_argument
    generator = context.service.named(name, context.client_request)
    return _entry(context, name, generator, generator.adapter, describe)


def _entry(
    context: RequestContext,
    name: str,
    generator: TextGenerator,
    adapter: Adapter | None,
    describe: Describe,
) -> dict[str, Any]:
    described = describe(context, name, generator)
    if adapter is None:
        return described
    parent = generator.name or context.service.config.served_model_name
    return {**described, "root": adapter.path, "parent": parent}


def longest_sequence(generator: TextGenerator) -> int | None:
    """Tokens of the longest sequence that a model takes; None for one of several that has had no host yet."""
    endpoint = generator.endpoint
    return None if endpoint.state is ReplicaState.STARTING else endpoint.limits.max_model_len


def _model(context: RequestContext, name: str, generator: TextGenerator) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": context.service.created,
        "owned_by": "pagoda",
        "root": generator.name or context.service.config.served_model_name,
        "parent": None,
        "max_model_len": longest_sequence(generator),
    }


async def server_info(context: RequestContext) -> web.StreamResponse:
    """The server in the words of SGLang and vLLM, for routers that look for it (smg, sglang-router)."""
    config = context.service.config
    limits = context.service.ready_generator().endpoint.limits
    role = limits.role
    modes = {Role.PREFILL: "prefill", Role.DECODE: "decode"}
    kv_roles = {Role.PREFILL: "kv_producer", Role.DECODE: "kv_consumer", Role.BOTH: "kv_both"}
    return context.json(
        {
            "model_path": config.served_model_name,
            "served_model_name": config.served_model_name,
            "version": __version__,
            "context_length": limits.max_model_len,
            "max_model_len": limits.max_model_len,
            "max_total_tokens": limits.num_blocks * limits.block_size,
            "max_num_seqs": limits.max_num_seqs,
            "max_running_requests": limits.max_num_seqs,
            "disaggregation_mode": modes.get(role, "null"),
            "kv_connector": _KV_CONNECTOR if role in kv_roles else None,
            "kv_role": kv_roles.get(role),
        }
    )


async def load(context: RequestContext) -> web.StreamResponse:
    """The load of the whole server and of each replica: requests, pending tokens, KV blocks."""
    report = await context.service.load()
    return context.json(
        {
            "draining": context.service.draining,
            **figures(report),
            "replicas": [_replica(replica) for replica in report.replicas],
        }
    )


def figures(report: LoadReport) -> dict[str, Any]:
    """The figures of an engine, or of all replicas of a dispatcher together."""
    inner = {"query_id", "replicas"}
    values = {name: getattr(report, name) for name in report.__struct_fields__ if name not in inner}
    processes = [msgspec.structs.asdict(process) for process in report.processes]
    return {**values, "steps": msgspec.structs.asdict(report.steps), "processes": processes}


def _replica(replica: ReplicaLoad) -> dict[str, Any]:
    return {
        "name": replica.name,
        **({"model": replica.model} if replica.model else {}),
        "state": replica.state,
        "num_requests": replica.num_requests,
        "weighed_tokens": replica.weighed_tokens,
        **({} if replica.report is None else figures(replica.report)),
    }


# ---- running answers


async def list_requests(context: RequestContext) -> web.StreamResponse:
    data = running_answers(context.running, context.service.tracker.clock_ns())
    return context.json({"object": "list", "total": len(context.running), "data": data})


async def cancel_request(context: RequestContext) -> web.StreamResponse:
    """Ends an answer by its id, or all answers to a request by its `X-Request-Id`.

    Whoever waits for an answer gets what there is so far. A client ends only answers to requests with its own API
    key, unless that has the scope for others: `X-Request-Id` is for clients to choose, and ids of answers begin
    with it.
    """
    generator = context.service.ready_generator()
    wanted = context.path_argument
    running = context.running
    found = [wanted] if wanted in running else []
    found += [r.request_id for r in running.values() if r.client_request.id == wanted]
    if not found:
        raise ApiError(
            404, f"There is no running request {wanted[:200]!r}.", code="request_not_found"
        )
    await asyncio.gather(*map(generator.endpoint.abort, found))
    return context.json({"id": wanted, "object": "request", "cancelled": found})
