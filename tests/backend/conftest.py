# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def _threads_restored() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Gives `ops` all backends. Kernels are loaded here: pytest reads this file before it knows `--kernels`."""
    if "ops" in metafunc.fixturenames:
        from cpu_cases import BACKENDS

        metafunc.parametrize("ops", BACKENDS, indirect=True)


@pytest.fixture
def ops(request: pytest.FixtureRequest) -> Any:
    from cpu_cases import backend_of

    return backend_of(request.param)
