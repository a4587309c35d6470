# SPDX-License-Identifier: Apache-2.0
"""For all tests."""

import functools
import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import settings
from trace_writers import TraceWriters

from benchmarks.chaos.fuzz.kernels import load_kernels
from pagoda.cli.server_process import ServerProcess, server_process
from pagoda.telemetry.logging import LOG_FORMAT_ENV, LOG_LEVEL_ENV
from pagoda.worker.pinning import set_order_of_sums

pytest_plugins = ["tier_hooks"]

# How long an example takes says more about what else the machine does than about what is tested.
settings.register_profile("pagoda", deadline=None)
settings.load_profile("pagoda")

# Read when torch is loaded: its threads sleep when they wait, as in a worker, so tests stay fast on busy machines;
# products have the same bits with any number of threads.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
set_order_of_sums(os.environ)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--kernels",
        type=Path,
        metavar="DIRECTORY",
        help="test the kernels built there instead of the installed ones; worker processes use these still",
    )


def pytest_configure(config: pytest.Config) -> None:
    # A script that starts tests with `&` leaves SIGINT ignored, and so would every program that they start.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    directory: Path | None = config.getoption("kernels")
    if directory is not None:
        _load_kernels(directory)


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    """Whatever a test does to the log of this process, it is as before afterwards."""
    root, ours = logging.getLogger(), logging.getLogger("pagoda")
    before = (root.handlers[:], root.level, ours.level)
    environment = {name: os.environ.get(name) for name in (LOG_LEVEL_ENV, LOG_FORMAT_ENV)}
    yield
    for name, value in environment.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    root.handlers[:], level, our_level = before
    root.setLevel(level)
    ours.setLevel(our_level)


@pytest.fixture
def trace_writers() -> TraceWriters:
    """Trace threads that this test starts."""
    return TraceWriters()


def _load_kernels(directory: Path) -> None:
    try:
        load_kernels(directory)
    except ImportError as error:
        raise pytest.UsageError(f"--kernels: {error}") from None


@pytest.fixture(scope="session")
def shared_server() -> Iterator[Callable[..., ServerProcess]]:
    """Starts `pagoda serve` once for all tests that ask for these flags and do it no harm."""
    with ExitStack() as stack:

        @functools.cache
        def start(*flags: str) -> ServerProcess:
            return stack.enter_context(server_process(flags))

        yield start


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
