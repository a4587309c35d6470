# SPDX-License-Identifier: Apache-2.0
"""`make test` runs tests that share a fixture in one process."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def shared() -> None:
    return None


@pytest.mark.usefixtures("shared")
def test_xdist_groups_tests_that_share_a_fixture(request: pytest.FixtureRequest) -> None:
    """pytest-xdist names the group in the test's id; some versions of pytest ignore that name."""
    if request.config.getoption("loadgroup", False):
        assert request.node.nodeid.endswith("@tests/test_groups.py")
