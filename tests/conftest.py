"""For all tests."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings

# How long an example takes says more about what else the machine does than about what is tested.
settings.register_profile("pagoda", deadline=None)
settings.load_profile("pagoda")

# Read when torch is loaded: its threads sleep when they wait, as in a worker, so tests stay fast on busy machines.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--kernels",
        type=Path,
        metavar="DIRECTORY",
        help="test the kernels built there instead of the installed ones; worker processes use these still",
    )


def pytest_configure(config: pytest.Config) -> None:
    directory: Path | None = config.getoption("kernels")
    if directory is not None:
        _load_kernels(directory)


def _load_kernels(directory: Path) -> None:
    """Loads the module under its own name, so that whoever imports it later gets this one."""
    import torch  # noqa: F401 - it brings the OpenMP library that the kernels share

    path = next(directory.glob("_native*.so"), None)
    if path is None:
        raise pytest.UsageError(f"--kernels: there is no _native*.so in {directory}.")
    spec = importlib.util.spec_from_file_location("pagoda.backend._native", path)
    if spec is None or spec.loader is None:
        raise pytest.UsageError(f"--kernels: Python cannot load {path}.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)


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
