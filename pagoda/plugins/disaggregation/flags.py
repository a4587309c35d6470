# SPDX-License-Identifier: Apache-2.0
"""Flags of the API: prefill servers that clients may name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter

from pagoda.cli.options import SERVER
from pagoda.plugins.disaggregation.handoffs import BootstrapHosts


@Parameter(name="*", group=SERVER)
@dataclass(frozen=True, kw_only=True)
class BootstrapFlags:
    """Prefill servers of SGLang's routers."""

    bootstrap_hosts: Annotated[
        tuple[str, ...], Parameter(metavar="HOST", negative=(), show_default=False)
    ] = ()
    """A prefill server that sglang-router's requests to this decode server may name; may be repeated. It is
    asked by https if this server has --ssl-certfile."""

    @contextmanager
    def opened(self) -> Iterator[BootstrapHosts]:
        """Gives the hosts."""
        yield BootstrapHosts(self.bootstrap_hosts)
