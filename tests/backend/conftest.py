from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cpu_cases import BACKENDS, backend_of


@pytest.fixture(autouse=True)
def _threads_restored() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=BACKENDS)
def ops(request: pytest.FixtureRequest) -> Any:
    return backend_of(request.param)
