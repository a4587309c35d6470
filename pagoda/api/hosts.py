"""The hosts of a router: which there are, and how one is let go."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from pagoda.api.errors import ApiError
from pagoda.api.info import figures
from pagoda.api.request_context import Call
from pagoda.frontend.registry import HostReport


async def list_hosts(call: Call) -> web.StreamResponse:
    """All that are known, used or not."""
    reports = await call.service.require_registry().hosts()
    return call.json({"object": "list", "data": [_host(call, report) for report in reports]})


async def dismiss_host(call: Call) -> web.StreamResponse:
    """The host gets nothing new; it finishes what it has, and comes back only when it was started anew."""
    host_id = call.path_argument
    if not call.service.require_registry().dismiss(host_id):
        raise ApiError(404, f"There is no host {host_id[:200]!r}.", code="host_not_found")
    return call.json({"id": host_id, "object": "host", "state": "leaving"})


def _host(call: Call, report: HostReport) -> dict[str, Any]:
    return {
        "id": report.id or None,
        "object": "host",
        "address": report.address.removeprefix("tcp://"),
        "model": call.service.config.served_model_name,
        "role": report.role,
        "state": report.state,
        "reason": report.reason or None,
        "since": None if report.since is None else int(report.since),
        "num_requests": report.num_requests,
        "load": None if report.load is None else figures(report.load),
    }
