# SPDX-License-Identifier: Apache-2.0
"""The routes of a router's hosts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from aiohttp import web

from pagoda.api.errors import ApiError, unavailable
from pagoda.api.http.request_context import RequestContext
from pagoda.api.monitoring.info import figures
from pagoda.api.plugin import ApiPlugin
from pagoda.api.route import LOOK, OPERATE, Route

if TYPE_CHECKING:  # servers without hosts have the routes, too
    from pagoda.plugins.router.members import HostMembers
    from pagoda.plugins.router.registry import HostReport, Registry


async def list_hosts(context: RequestContext) -> web.StreamResponse:
    """All that are known, used or not."""
    reports = await _registry(context).hosts()
    return context.json({"object": "list", "data": [_host(context, report) for report in reports]})


async def dismiss_host(context: RequestContext) -> web.StreamResponse:
    """The host gets nothing new; it finishes what it has, and comes back only when it was started anew."""
    host_id = context.path_argument
    if not _registry(context).dismiss(host_id):
        raise ApiError(404, f"There is no host {host_id[:200]!r}.", code="host_not_found")
    return context.json({"id": host_id, "object": "host", "state": "leaving"})


def _registry(context: RequestContext) -> Registry:
    """Raises ApiError: 404, this is no router; 503, it is starting."""
    fleet = context.service.fleet
    if fleet is not None and not fleet.is_router:
        raise ApiError(404, "This server has no hosts; a router (pagoda route) has.")
    registry = None if fleet is None else cast("HostMembers", fleet.members).registry
    if registry is None:
        raise unavailable("The router is starting.")
    return registry


def _host(context: RequestContext, report: HostReport) -> dict[str, Any]:
    return {
        "id": report.id or None,
        "object": "host",
        "address": report.address.removeprefix("tcp://"),
        "model": report.place.pool or context.service.config.served_model_name,
        "role": report.role,
        "region": report.place.region or None,
        "price": report.place.price,
        "round_trip_ms": None if report.round_trip_s is None else 1e3 * report.round_trip_s,
        "state": report.state,
        "reason": report.reason or None,
        "since": None if report.since is None else int(report.since),
        "num_requests": report.num_requests,
        "load": None if report.load is None else figures(report.load),
    }


API = ApiPlugin(
    routes={
        "/v1/hosts": {"GET": Route(list_hosts, "The hosts of a router.", LOOK, statuses=(404,))},
        "/v1/hosts/*": {
            "DELETE": Route(dismiss_host, "Lets a host of a router go.", OPERATE, statuses=(404,))
        },
    },
    flags="pagoda.plugins.router.flags:JoinFlags",
)
