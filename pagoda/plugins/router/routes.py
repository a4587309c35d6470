# SPDX-License-Identifier: Apache-2.0
"""The routes of a router's hosts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import msgspec
from aiohttp import web

from pagoda.api.errors import ApiError, unavailable
from pagoda.api.http.request_context import RequestContext
from pagoda.api.monitoring.info import figures
from pagoda.api.plugin import ApiPlugin
from pagoda.api.route import LOOK, OPERATE, Route
from pagoda.errors import EngineDeadError
from pagoda.messages.worker_config import Role

if TYPE_CHECKING:  # servers without hosts have the routes, too
    from pagoda.fleet.fleet import Fleet
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


class RoleBody(msgspec.Struct, forbid_unknown_fields=True):
    """A role for a host."""

    role: Role


async def change_host(context: RequestContext) -> web.StreamResponse:
    """The host has the role when this answers; what it has goes on there."""
    body = await context.parse(RoleBody)
    host_id = context.path_argument
    try:
        report = await _registry(context).set_role(host_id, body.role)
    except TimeoutError:
        raise ApiError(504, "The host did not change its role in time.") from None
    except EngineDeadError as error:
        raise ApiError(409, str(error)) from None
    if report is None:
        raise ApiError(404, f"There is no host {host_id[:200]!r}.", code="host_not_found")
    return context.json(_host(context, report))


async def show_role(context: RequestContext) -> web.StreamResponse:
    """The role for routers, and the roles that it may be given."""
    return _role(context, _own_fleet(context))


async def change_role(context: RequestContext) -> web.StreamResponse:
    """Routers send other requests from now on; what runs goes on."""
    body, fleet = await context.parse(RoleBody), _own_fleet(context)
    fleet.dispatcher.set_role(body.role)
    return _role(context, fleet)


def _role(context: RequestContext, fleet: Fleet) -> web.StreamResponse:
    limits = fleet.dispatcher.limits
    return context.json(
        {
            "object": "role",
            "role": limits.role,
            "roles": limits.roles,
            "num_requests": len(fleet.dispatcher.requests),
        }
    )


def _own_fleet(context: RequestContext) -> Fleet:
    """The fleet of a server that computes. Raises ApiError: 404, this is a router; 503, it is starting."""
    fleet = context.service.fleet
    if fleet is not None and fleet.is_router:
        raise ApiError(404, "A router has no role; its hosts have (GET /v1/hosts).")
    context.service.ready_generator()
    if fleet is None:
        raise unavailable("The server is starting.")
    return fleet


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
        "roles": report.roles,
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
            "DELETE": Route(dismiss_host, "Lets a host of a router go.", OPERATE, statuses=(404,)),
            "PATCH": Route(
                change_host,
                "Gives a host of a router another role.",
                OPERATE,
                RoleBody,
                statuses=(404, 409, 504),
            ),
        },
        "/v1/role": {
            "GET": Route(show_role, "The role of this host.", LOOK, statuses=(404,)),
            "PATCH": Route(
                change_role, "Gives this host another role.", OPERATE, RoleBody, statuses=(404,)
            ),
        },
    },
    flags="pagoda.plugins.router.flags:JoinFlags",
)
