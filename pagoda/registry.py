# SPDX-License-Identifier: Apache-2.0
"""The registry of plugins: objects that installed packages, Pagoda itself among them, name as entry points
(https://packaging.python.org/en/latest/specifications/entry-points/). None is imported before it is asked for."""

from __future__ import annotations

import importlib.metadata
from importlib.metadata import EntryPoint
from typing import TypeVar

from pagoda.errors import ConfigError

APIS = "pagoda.apis"
"""Group of `pagoda.api.plugin.ApiPlugin` objects."""
BACKENDS = "pagoda.backends"
"""Group of `pagoda.devices.BackendEntry` objects."""
COMMANDS = "pagoda.commands"
"""Group of `pagoda.cli.command.CommandPlugin` objects."""
EXECUTORS = "pagoda.executors"
"""Group of `pagoda.executor.plugin.ExecutorPlugin` objects."""
KV_CONNECTORS = "pagoda.kv_connectors"
"""Group of `pagoda.kv.connector_plugin.KVConnectorPlugin` objects."""
KV_PUBLISHERS = "pagoda.kv_publishers"
"""Group of `pagoda.kv.publishing.PublisherPlugin` objects."""
KV_TIERS = "pagoda.kv_tiers"
"""Group of `pagoda.kv.plugin.KVTierPlugin` objects."""
TRACE_MERGERS = "pagoda.trace_mergers"
"""Group of `pagoda.telemetry.plugin.TraceMerger` objects; `trace` is taken."""

T = TypeVar("T")


def registered(group: str) -> dict[str, list[EntryPoint]]:
    """The entry points of a group by name; several of one name have different values."""
    found: dict[str, list[EntryPoint]] = {}
    for point in importlib.metadata.entry_points(group=group):
        points = found.setdefault(point.name, [])
        # An editable installation may be found twice.
        if all(point.value != other.value for other in points):
            points.append(point)
    return found


def load_all(group: str, kind: type[T]) -> dict[str, T]:
    """All objects of a group by name, in the order of their names.

    Raises ConfigError: there are none, two have one name, or one cannot be imported or is of another type."""
    found = registered(group)
    if not found:
        raise ConfigError(
            f"nothing is registered as {group}, as Pagoda was installed by an older version; install it again."
        )
    return {name: _load(group, name, found[name], kind) for name in sorted(found)}


def load(group: str, name: str, kind: type[T]) -> T:
    """The object of one name. Raises ConfigError: there is none, or as `load_all`."""
    points = registered(group).get(name)
    if not points:
        raise ConfigError(
            f"{name} is not registered as {group}, as Pagoda was installed by an older version; install it again."
        )
    return _load(group, name, points, kind)


def _load(group: str, name: str, points: list[EntryPoint], kind: type[T]) -> T:
    if len(points) > 1:
        values = " and ".join(sorted(point.value for point in points))
        raise ConfigError(f"{name} of {group} is {values}; leave one of these packages installed.")
    try:
        loaded = points[0].load()
    except Exception as error:
        raise ConfigError(
            f"{name} of {group}, {points[0].value}, cannot be imported ({type(error).__name__}: {error})."
        ) from error
    if not isinstance(loaded, kind):
        raise ConfigError(f"{name} of {group}, {points[0].value}, is no {kind.__name__}.")
    return loaded
