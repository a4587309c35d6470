"""For all tests."""

import os

import pytest

# Read when torch is loaded: its threads sleep when they wait, as in a worker, so tests stay fast on busy machines.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@pytest.fixture(scope="module", params=["reference", "cpu"])
def backend(request: pytest.FixtureRequest) -> str:
    """Every backend that this machine has."""
    from pagoda.errors import ConfigError
    from pagoda.worker.backends import choose_backend

    try:
        choose_backend(request.param)
    except ConfigError as error:
        pytest.skip(str(error))
    return str(request.param)
