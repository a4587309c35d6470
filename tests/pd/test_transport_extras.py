"""NIXL and Mooncake promise the same, where they are installed.

In processes of their own, which end without taking the libraries down: they bring further libraries of their own,
not all of which survive that.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

_RUN = (
    "import os, sys, pytest; code = pytest.main(sys.argv[1:]); sys.stdout.flush(); os._exit(code)"
)


_EXPORT_ENDS = "not (test_closing_ends_a_read_under_way and export)"
"""UCX may end a process (`ucs_arbiter_group_is_empty`) that takes a door down while somebody reads; a worker does
so only when it ends itself."""


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("name", "chosen"), [("nixl", _EXPORT_ENDS), ("mooncake", "")])
def test_an_extra_keeps_the_promises_of_all_transports(name: str, chosen: str) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed: pip install 'pagoda-llm[{name}]'")
    contract = str(Path(__file__).parent / "test_transports.py")
    options = ["-v", "-rs", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", chosen]
    done = subprocess.run(
        [sys.executable, "-c", _RUN, contract, *options],
        env=os.environ | {"PAGODA_TEST_TRANSPORT": name},
        capture_output=True,
        text=True,
        timeout=220,
    )
    said = done.stdout[-8000:]
    reasons = [line for line in said.splitlines() if line.startswith("SKIPPED")]
    if reasons:
        pytest.skip(reasons[0])
    assert done.returncode == 0, said
    assert " passed" in said
