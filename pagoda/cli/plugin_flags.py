# SPDX-License-Identifier: Apache-2.0
"""Flags that plugins add to `pagoda serve` and `pagoda route`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, make_dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Protocol

from cyclopts import Parameter

from pagoda.api.routes import PLUGINS
from pagoda.cli.cluster import HostFlags, ServerStart
from pagoda.errors import ConfigError
from pagoda.fleet.fleet import Entrance
from pagoda.kv.connector_plugin import find_connector, has_connector
from pagoda.llm.engine_options import Handoff


def _flags_of_plugins() -> type[Any]:
    """A dataclass that has the flags of each plugin in a field of its name."""
    found = {
        name.replace("-", "_"): resolve_name(plugin.flags)
        for name, plugin in PLUGINS.items()
        if plugin.flags
    }
    return make_dataclass(
        "Flags", [(name, kind, field(default=kind())) for name, kind in found.items()], frozen=True
    )


@Parameter(name="*")
@dataclass(frozen=True)
class PluginOptions(_flags_of_plugins()):  # type: ignore[misc]  # which ones is known when it is made
    """The flags of all plugins."""

    @property
    def of_hosts(self) -> HostFlags | None:
        """The flags by which this server is a host of others; None without the plugin that has them."""
        flags = (getattr(self, it.name) for it in fields(self))
        return next((it for it in flags if isinstance(it, HostFlags)), None)

    def entrance(self, server: ServerStart) -> Entrance | None:
        """The way by which other servers ask this one; None if no flag asks for one.
        Raises ConfigError: a flag lacks another, or its plugin."""
        if self.of_hosts is not None:
            return self.of_hosts.entrance(server)
        if server.cluster.port is not None:
            raise ConfigError("--advertise with a port needs the plugin router, which is not here.")
        return None


class ConnectorFlags(Protocol):
    """Flags of a connector between engines (`KVConnectorPlugin.options`)."""

    @property
    def role(self) -> str:
        """The role of this server, or `none`."""

    def config(
        self, *, cluster_key_file: Path | None, advertise: str, num_replicas: int
    ) -> Handoff | None:
        """None without a role. Raises ConfigError if a flag lacks another or has an impossible value."""


def _flags_of_connector() -> type[Any]:
    """A dataclass that has the flags of the connector between engines in a field, if there is one."""
    kinds = [resolve_name(find_connector().options)] if has_connector() else []
    flags = [("connector", kind, field(default=kind())) for kind in kinds]
    return make_dataclass("Flags", flags, frozen=True)


@Parameter(name="*")
@dataclass(frozen=True)
class ConnectorOptions(_flags_of_connector()):  # type: ignore[misc]  # as above
    """The flags of `pagoda serve` by which KV goes between engines."""

    def config(
        self, cluster_key_file: Path | None, advertise: Callable[[], str], num_replicas: int
    ) -> Handoff | None:
        """The same as `ConnectorFlags.config`; `advertise` is called with a role alone."""
        flags: ConnectorFlags | None = getattr(self, "connector", None)
        if flags is None:
            return None
        host = "" if flags.role == "none" else advertise()
        return flags.config(
            cluster_key_file=cluster_key_file, advertise=host, num_replicas=num_replicas
        )


@contextmanager
def opened(options: PluginOptions) -> Iterator[Mapping[type[Any], Any]]:
    """Gives what the flags name while a server runs, by its type.
    Raises ConfigError: a flag has an impossible value."""
    with ExitStack() as stack:
        named = [stack.enter_context(getattr(options, it.name).opened()) for it in fields(options)]
        yield {type(one): one for one in named}
