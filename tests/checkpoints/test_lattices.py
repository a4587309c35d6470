# SPDX-License-Identifier: Apache-2.0
"""The file of lattices is what ggml's package makes of its own."""

from __future__ import annotations

from pagoda.checkpoints.lattices import FILE, IN_FILE, planes
from tools.lattices import planes_of_package


def test_the_points_are_those_of_the_package() -> None:
    assert [planes(lattice) for lattice in IN_FILE] == [planes_of_package(it) for it in IN_FILE]
    assert FILE.stat().st_size == sum(2 * lattice.points for lattice in IN_FILE)
