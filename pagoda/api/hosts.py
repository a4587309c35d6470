"""The hosts of a router: which there are, and how one is let go."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from pagoda.api.errors import ApiError
from pagoda.api.info import figures
from pagoda.api.request_context import RequestContext
from pagoda.frontend.registry import HostReport


async def list_hosts(context: RequestContext) -> web.StreamResponse:
    """All that are known, used or not."""
    reports = await context.service.require_registry().hosts()
    return context.json({"object": "list", "data": [_host(context, report) for report in reports]})


async def dismiss_host(context: RequestContext) -> web.StreamResponse:
    """The host gets nothing new; it finishes what it has, and comes back only when it was started anew."""
    host_id = context.path_argument
    if not context.service.require_registry().dismiss(host_id):
        raise ApiError(404, f"There is no host {host_id[:200]!r}.", code="host_not_found")
    return context.json({"id": host_id, "object": "host", "state": "leaving"})


def _host(context: RequestContext, report: HostReport) -> dict[str, Any]:
    return {
        "id": report.id or None,
        "object": "host",
        "address": report.address.removeprefix("tcp://"),
        "model": context.service.config.served_model_name,
        "role": report.role,
        "state": report.state,
        "reason": report.reason or None,
        "since": None if report.since is None else int(report.since),
        "num_requests": report.num_requests,
        "load": None if report.load is None else figures(report.load),
    }
