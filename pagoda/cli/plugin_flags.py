# SPDX-License-Identifier: Apache-2.0
"""Flags that plugins add to `pagoda serve` and `pagoda route`."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, make_dataclass
from typing import Any

from cyclopts import Parameter

from pagoda.api.routes import PLUGINS


def _flags_of_plugins() -> type[Any]:
    """A dataclass that has the flags of each plugin in a field of its name."""
    found = {
        name.replace("-", "_"): pkgutil.resolve_name(plugin.flags)
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


@contextmanager
def opened(options: PluginOptions) -> Iterator[Mapping[type[Any], Any]]:
    """Gives what the flags name while a server runs, by its type.
    Raises ConfigError: a flag has an impossible value."""
    with ExitStack() as stack:
        named = [stack.enter_context(getattr(options, it.name).opened()) for it in fields(options)]
        yield {type(one): one for one in named}
