# SPDX-License-Identifier: Apache-2.0
"""Discoveries of other packages are found by the schemes of their URLs."""

from __future__ import annotations

from pathlib import Path

import pytest
from linked_hosts import KEYS

from pagoda.errors import ConfigError
from pagoda.ipc.tls import TlsFiles
from pagoda.plugins.router.discovery.choice import discovering, registering

FILES = TlsFiles(None, None, None, ("--a", "--b", "--c"))
PROGRAM = """
from pagoda.plugins.router.discovery.base import DiscoveryPlugin

IT = DiscoveryPlugin(lambda *given: ("discover", given), lambda *given: ("register", given))
"""


@pytest.fixture
def other_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other_discovery.py").write_text(PROGRAM)
    metadata = tmp_path / "other_discovery-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[pagoda.discoveries]\nmesh = other_discovery:IT\nbroken = other_discovery:NOTHING\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("other_package")
def test_a_url_of_another_package_is_its_own_to_read() -> None:
    url = "mesh://anywhere"
    assert discovering(url, "", KEYS, FILES) == ("discover", (url, "--discovery", FILES))
    assert registering(url, KEYS, FILES) == ("register", (url, "--join", FILES))
    with pytest.raises(ConfigError, match=r"broken of pagoda.discoveries, .* cannot be imported"):
        registering("broken://anywhere", KEYS, FILES)


def test_a_scheme_that_nobody_has_is_no_url() -> None:
    with pytest.raises(ConfigError, match="--join must be HOST:PORT"):
        registering("mesh://anywhere", KEYS)
    with pytest.raises(ConfigError, match=r"--discovery mesh:.* cannot be read"):
        discovering("mesh://anywhere", "", KEYS)(None)  # type: ignore[arg-type]
