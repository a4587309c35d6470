# SPDX-License-Identifier: Apache-2.0
"""Flags of a router that picks endpoints for gateways."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter
from cyclopts.validators import Number

from pagoda.errors import ConfigError
from pagoda.ipc.addresses import parse_address
from pagoda.ipc.tls import TlsFiles
from pagoda.plugins.epp.server import PickerOptions


@Parameter(name="*", group=Group("Endpoint picker", sort_key=28))
@dataclass(frozen=True, kw_only=True)
class PickerFlags:
    """The router as an endpoint picker of the Gateway API's inference extension."""

    epp_listen: Annotated[str | None, Parameter(metavar="HOST:PORT")] = None
    """The address at which gateways ask for a host, over gRPC; of pagoda route alone."""
    epp_target_port: Annotated[int, Parameter(validator=Number(gte=1, lte=65535))] = 8000
    """The port of the hosts' own API, to which gateways send requests."""
    epp_certfile: Path | None = None
    """A PEM file with the certificate of --epp-listen; without it gRPC is not encrypted."""
    epp_keyfile: Path | None = None
    """The PEM file of its key, if that is not in the same file."""

    @contextmanager
    def opened(self) -> Iterator[PickerOptions]:
        """Gives the options. Raises ConfigError: a flag has an impossible value, or grpcio is not installed."""
        files = TlsFiles(
            self.epp_certfile,
            self.epp_keyfile,
            None,
            ("--epp-certfile", "--epp-keyfile", "--epp-certfile"),
        )
        files.check()
        if self.epp_listen is None:
            if files.paths:
                raise ConfigError("--epp-certfile needs --epp-listen.")
            yield PickerOptions(None, self.epp_target_port, files)
            return
        try:
            import grpc  # noqa: F401  # with this flag alone
        except ImportError:
            raise ConfigError(
                "--epp-listen needs grpcio; install it with pip install 'pagoda-llm[epp]'."
            ) from None
        address = parse_address(self.epp_listen, "--epp-listen").replace("*", "0")
        yield PickerOptions(address, self.epp_target_port, files)
