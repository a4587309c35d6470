# SPDX-License-Identifier: Apache-2.0
"""A server that tests share as long as they harm nobody."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pagoda.cli.server_process import ServerProcess


@pytest.fixture(scope="session")
def plain_url(shared_server: Callable[..., ServerProcess]) -> str:
    """Address of a server of the embedded model in float32 on one device: what others must answer, too."""
    return shared_server("--dtype", "float32", "--log-level", "warning").base_url
