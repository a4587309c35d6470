# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import pytest
from restored_threads import threads_restored

__all__ = ["threads_restored"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Gives `ops` all backends. Kernels are loaded here: pytest reads this file before it knows `--kernels`."""
    if "ops" in metafunc.fixturenames:
        from cpu_cases import BACKENDS

        metafunc.parametrize("ops", BACKENDS, indirect=True)


@pytest.fixture
def ops(request: pytest.FixtureRequest) -> Any:
    from cpu_cases import backend_of

    return backend_of(request.param)
