# SPDX-License-Identifier: Apache-2.0
"""Plugins of the API: they add routes, what these keep while a server runs, and lines of batches.

Plugins are objects of the entry-point group `pagoda.apis`; see docs/plugins.md. Routes are added to the table of
`pagoda.api.routes`. The core knows no plugin by name.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from pagoda.api.http.request_context import Caller
from pagoda.api.route import Route
from pagoda.api.service import PluginState, Service

Routes = Mapping[str, Mapping[str, Route]]
"""Routes by path and method. A `*` at the end takes the rest of the path."""


@dataclass(frozen=True)
class LineForm:
    """Answer to a line of a batch that names the URL of a route."""

    body: type[Any]
    """Type of the body of the line."""
    answer: Callable[[Caller, Any], Awaitable[dict[str, Any]]]
    """Answers a body. Raises what the route raises."""


class PluginFlags(Protocol):
    """Flags of a plugin."""

    def opened(self) -> AbstractContextManager[object]:
        """Gives what the flags name for as long as a server runs; the plugin finds it by its type
        (`ApiConfig.option`). Raises ConfigError: a flag has an impossible value."""


@dataclass(frozen=True, kw_only=True)
class ApiPlugin:
    """Additions of one plugin to every server."""

    routes: Routes = field(default_factory=dict)
    """No two plugins, and no plugin and the core, have the same path."""
    header: str = ""
    """Header by which clients of this API are known."""
    header_routes: Routes = field(default_factory=dict)
    """Routes that answer these clients on paths that others have."""
    line_forms: Mapping[str, LineForm] = field(default_factory=dict)
    """Lines of batches by URL."""
    state: Callable[[Service, Mapping[str, ApiPlugin]], PluginState] | None = None
    """Makes what the plugin keeps while a server runs, given all plugins by name; its routes find it by its type
    (`Service.state`)."""
    flags: str = ""
    """Module and name, as in `pagoda_x.flags:Flags`, of flags of `pagoda serve` and `pagoda route`: a frozen
    dataclass of `PluginFlags` with a default for every field. Commands alone import it."""
