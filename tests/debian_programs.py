# SPDX-License-Identifier: Apache-2.0
"""Programs of Debian that tests use: those of this machine, else fetched, and nothing is installed."""

from __future__ import annotations

import atexit
import fcntl
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

_FETCH_TIMEOUT_S = 30
_APT = (
    *("apt-get", "--quiet", "--option=Acquire::Retries=0"),
    *(f"--option=Acquire::{scheme}::Timeout=3" for scheme in ("http", "https")),
)
"""Gives up soon where nothing can be reached."""


@functools.cache
def debian_program(name: str, *, package: str) -> str:
    """The path of a program, which is in that package; skips the test where there is none and none can be had."""
    found = shutil.which(name)
    if found is not None:
        return found
    if shutil.which("apt-get") is None:
        pytest.skip(f"there is no {name}, and no apt-get to fetch it with")
    directory = tempfile.mkdtemp(prefix=f"pagoda-{name}-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    with open(__file__, "rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process of the test run may do the same
        problem = _fetch(directory, package)
    if problem:
        pytest.skip(f"there is no {name}, and {package} cannot be fetched ({problem})")
    return f"{directory}/usr/bin/{name}"


def _fetch(directory: str, package: str) -> str:
    """Why the package is not in `directory` now; empty if it is."""
    problem = _run(directory, *_APT, "download", package)
    if problem and os.geteuid() == 0:
        problem = _run(directory, *_APT, "--error-on=any", "update")
        problem = problem or _run(directory, *_APT, "download", package)
    for archive in Path(directory).glob("*.deb"):
        return _run(directory, "dpkg-deb", "--extract", archive.name, ".")
    return problem


def _run(directory: str, *command: str) -> str:
    """The last line of what went wrong; empty if nothing did."""
    try:
        done = subprocess.run(
            command, cwd=directory, capture_output=True, text=True, timeout=_FETCH_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return f"{command[0]} takes longer than {_FETCH_TIMEOUT_S} s"
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no reason"])[-1]
