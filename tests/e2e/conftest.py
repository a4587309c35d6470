"""A server that tests share as long as they harm nobody."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pagoda.cli.server_process import server_process


@pytest.fixture(scope="session")
def plain_url() -> Iterator[str]:
    """Address of a server of the embedded model in float32 on one device: what others must answer, too."""
    with server_process(["--dtype", "float32", "--log-level", "warning"]) as server:
        yield server.base_url
