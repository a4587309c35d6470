# SPDX-License-Identifier: Apache-2.0
"""`GET /metrics` and `GET /metrics/vllm`: figures for Prometheus."""

from __future__ import annotations

import asyncio
import os
from typing import NamedTuple

from aiohttp import web

from pagoda.api.http.request_context import RequestContext
from pagoda.api.monitoring.request_metrics import RequestMetrics
from pagoda.api.service import Service
from pagoda.errors import EngineDeadError
from pagoda.fleet.adapters import MAX_LOADED
from pagoda.ipc.machine import memory_of
from pagoda.messages.frontend import EngineReady
from pagoda.messages.load import LoadReport, ProcessMemory

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Snapshot(NamedTuple):
    model_name: str
    requests: RequestMetrics
    longest_wait_s: float
    own_memory: tuple[ProcessMemory, ...]
    report: LoadReport | None
    """None while there is nothing that could report."""
    limits: EngineReady | None
    adapters: tuple[str, ...] = ()
    """Names of adapters that are loaded."""
    max_adapters: int = 0
    """Most adapters that may be; 0 where there are none, and none can come."""


async def metrics(context: RequestContext, *, aliases: bool = False) -> web.StreamResponse:
    """All metrics; with `aliases`, some of them again under vLLM's names, which its dashboards use."""
    snapshot = await _snapshot(context.service)

    def text() -> str:
        from pagoda.api.monitoring.exposition import (
            render,  # its library takes a tenth of a second to import
        )

        return render(snapshot, aliases=aliases or context.service.config.vllm_metrics)

    return context.text(await asyncio.to_thread(text), CONTENT_TYPE)  # streams go on meanwhile


async def _snapshot(service: Service) -> Snapshot:
    report, limits = None, None
    if service.generator is not None:
        try:
            report = await service.load()
            limits = service.ready_generator().endpoint.limits
        except EngineDeadError:
            pass  # what was counted of requests is still there
    known = None if service.fleet is None else service.fleet.adapters
    adapters = () if known is None else tuple(adapter.name for adapter in known)
    return Snapshot(
        service.config.served_model_name,
        service.request_metrics.copy(),
        service.tracker.longest_wait_ns() / 1e9,
        memory_of({"router" if service.is_router else "frontend": os.getpid()}),
        report,
        limits,
        adapters,
        MAX_LOADED if known is not None and known.allows_loading else len(adapters),
    )
