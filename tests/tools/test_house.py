# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest

from tools import house
from tools.house import Room, excesses, read_budgets, read_rooms, table


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A house with a file, two rooms and a plugin."""
    root = tmp_path / "pagoda"
    for name, text in {
        "errors.py": "pass\n",
        "api/app.py": "from pagoda.errors import PagodaError\nimport pagoda.kv.manager\n",
        "api/deep/er.py": "from pagoda import kv\nimport json\n",
        "kv/manager.py": "\n" * 7,
        "plugins/__init__.py": "",
        "plugins/page/files.py": "from pagoda.api import app\nfrom pagoda.plugins.ray import rank\n",
        "plugins/ray/rank.py": "if True:\n    from pagoda.kv.manager import KVManager\n",
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_rooms_have_lines_files_and_imports(root: Path) -> None:
    assert read_rooms(root) == [
        Room("(files)", 1, 1, ()),
        Room("api", 4, 2, ("(files)", "kv")),
        Room("kv", 7, 1, ()),
        Room("plugins", 0, 1, ()),
        Room("plugins/page", 2, 1, ("api", "plugins/ray")),
        Room("plugins/ray", 2, 1, ("kv",)),
    ]


def test_rooms_beyond_their_budgets_are_named(root: Path) -> None:
    budgets = {"(files)": 1, "api": 3, "kv": 7, "plugins": 0, "plugins/page": 5, "cli": 1}
    assert excesses(read_rooms(root), budgets) == [
        "api has 4 lines, 3 are allowed",
        "plugins/ray has no budget",
        "there is no room cli",
    ]


def test_the_table_sums_core_and_plugins(root: Path) -> None:
    lines = [line.split() for line in table(read_rooms(root))]
    assert ["core,", "all", "12", "5"] in lines
    assert ["plugins,", "all", "4", "2"] in lines
    assert ["plugins/page", "2", "1", "api", "plugins/ray"] in lines


def test_every_room_of_this_house_is_within_its_budget(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert house.main(["--check"]) == 0, capsys.readouterr().out
    monkeypatch.setattr(house, "read_budgets", lambda: read_budgets() | {"kv": 10})
    assert house.main(["--check"]) == 1
    assert "tools/house.toml: kv has " in capsys.readouterr().out
