# SPDX-License-Identifier: Apache-2.0
"""The table of all routes: those of the core, and those that plugins add."""

from __future__ import annotations

from collections.abc import Mapping

from pagoda.api.core_routes import CORE_ROUTES
from pagoda.api.openapi import document
from pagoda.api.plugin import ApiPlugin, Routes
from pagoda.api.route import OPEN, Route
from pagoda.errors import ConfigError
from pagoda.registry import APIS, load_all


def _all_routes() -> Routes:
    """Raises ConfigError: a plugin has a path that the core or another plugin has."""
    table: dict[str, Mapping[str, Route]] = {
        **CORE_ROUTES,
        "/openapi.json": {
            "GET": Route(document(lambda: ROUTES), "This description of the routes.", OPEN)
        },
    }
    for name, plugin in PLUGINS.items():
        taken = table.keys() & plugin.routes.keys()
        if taken:
            raise ConfigError(
                f"the API {name} has the routes {', '.join(sorted(taken))}, which others have."
            )
        table |= plugin.routes
    return table


PLUGINS = load_all(APIS, ApiPlugin)
"""APIs besides the core, by name."""
ROUTES: Routes = _all_routes()
"""Routes by path and method. A `*` at the end takes the rest of the path."""


_BY_HEADER = [(it.header, it.header_routes) for it in PLUGINS.values() if it.header]


def methods_of(route: str, headers: Mapping[str, str]) -> Mapping[str, Route]:
    """The methods of a route for a client that sends such headers; none where there is no such route."""
    for header, routes in _BY_HEADER:
        if header in headers and route in routes:
            return routes[route]
    return ROUTES.get(route, {})


OPEN_PATHS = frozenset(
    path
    for path, methods in ROUTES.items()
    if all(route.scopes == OPEN for route in methods.values())
)
"""Routes that need no API key."""
