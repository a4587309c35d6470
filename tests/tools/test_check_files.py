# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tools import check_files
from tools.check_files import (
    LICENSE,
    MAX_LINES,
    Offence,
    check_elapsed,
    check_private,
    check_sleeps,
    check_unique,
)


def _messages(check: Callable[[ast.Module], Iterator[Offence]], source: str) -> list[str]:
    return [offence.message for offence in check(ast.parse(source))]


def test_a_long_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "long.py").write_text(f"# {LICENSE}\n" + "pass\n" * (MAX_LINES + 1))
    (tmp_path / "short.js").write_text(f"// {LICENSE}\n" + ";\n" * MAX_LINES)
    assert check_files.main([str(tmp_path)]) == 1
    assert f"long.py:{MAX_LINES + 1}: {MAX_LINES + 1} lines" in capsys.readouterr().out
    assert check_files.main([str(tmp_path / "short.js")]) == 0
    (tmp_path / "node_modules").mkdir()
    (tmp_path / "long.py").rename(tmp_path / "node_modules" / "others.py")
    assert check_files.main([str(tmp_path)]) == 0


SOURCES = {
    "a.py": ('"""A."""\n', '# SPDX-License-Identifier: Apache-2.0\n"""A."""\n'),
    "a.pyi": ("a: int\n", "# SPDX-License-Identifier: Apache-2.0\na: int\n"),
    "run.py": ("#!/bin/x\npass\n", "#!/bin/x\n# SPDX-License-Identifier: Apache-2.0\npass\n"),
    "a.css": ("a {}\n", "/* SPDX-License-Identifier: Apache-2.0 */\na {}\n"),
    "a.h": ("// A.\n", "// SPDX-License-Identifier: Apache-2.0\n// A.\n"),
    "a.html": (
        "<!DOCTYPE html>\n<p>\n",
        "<!DOCTYPE html>\n<!-- SPDX-License-Identifier: Apache-2.0 -->\n<p>\n",
    ),
    "__init__.py": ("", ""),
}
"""Files without the line of the licence, and with it."""


def test_files_begin_with_their_licence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, (before, _) in SOURCES.items():
        (tmp_path / name).write_text(before)
    assert check_files.main([str(tmp_path)]) == 1
    said = capsys.readouterr().out.splitlines()
    assert len(said) == len(SOURCES) - 1
    for line in said:
        assert "SPDX-License-Identifier: Apache-2.0" in line
        assert line.endswith("is not the first line: --add-license writes it")
    for added in (6, 0):
        assert check_files.main(["--add-license", str(tmp_path)]) == 0
        assert capsys.readouterr().out.startswith(f"{added} files ")
    for name, (_, after) in SOURCES.items():
        assert (tmp_path / name).read_text() == after
    assert check_files.main([str(tmp_path)]) == 0


def test_the_line_of_the_licence_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "long.py"
    path.write_text("pass\n" * MAX_LINES)
    assert check_files.add_license(path)
    assert check_files.main([str(path)]) == 0


@pytest.mark.parametrize(
    ("name", "source", "refused"),
    [
        ("ipc/test_codec.py", "", False),
        ("ipc/test_codec_sizes.py", "", False),
        ("ipc/test_ipc_codec.py", "", False),
        ("ipc/test_noises.py", "", True),
        ("ipc/test_noises.py", '"""Sockets that lose messages."""', False),
        ("ipc/test_codec_2.py", "", True),
    ],
)
def test_a_test_is_named_after_a_module_or_says_what_it_tests(
    name: str, source: str, refused: bool, tmp_path: Path
) -> None:
    (tmp_path / "pagoda" / "ipc").mkdir(parents=True)
    (tmp_path / "pagoda" / "ipc" / "codec.py").touch()
    offences = list(check_files.check_name(Path("tests") / name, ast.parse(source), tmp_path))
    assert bool(offences) == refused


def test_private_names_of_others_are_refused() -> None:
    assert _messages(check_private, "from pagoda.ipc.codec import _encode\nqueue._items") == [
        "`_encode` is a private name",
        "`queue._items` is a private name",
    ]
    own = "class Rig:\n    def __init__(self): self._sent = []\n    def other(self, rig): rig._sent, rig.__dict__"
    assert _messages(check_private, own) == []


def test_fixed_sleeps_are_refused_and_polls_are_not() -> None:
    for source, amount in (
        ("time.sleep(0.5)", "0.5"),
        ("time.sleep(1.5 * rank)", "1.5 * rank"),
        ("await asyncio.sleep(CUT_S)", "CUT_S"),
        ("await asyncio.sleep(0.1, 'result')", "0.1"),
        ("sleep(2)", "2"),
    ):
        assert _messages(check_sleeps, source) == [
            f"sleeps for {amount} s: wait for what must happen"
        ]
    assert (
        _messages(
            check_sleeps,
            "while not done():\n    await asyncio.sleep(0.01)\nawait asyncio.sleep(0, 'result')",
        )
        == []
    )


def test_assertions_on_elapsed_time_are_refused() -> None:
    took = "began = time.perf_counter()\nrun()\ntook = time.perf_counter() - began\nassert took < 5"
    assert _messages(check_elapsed, took) == ["asserts how long something took"]
    assert _messages(check_elapsed, "began = time.time()\nassert time.time() - began < 1") == [
        "asserts how long something took"
    ]
    assert _messages(check_elapsed, "now = time.monotonic()\nassert patience(now) <= now + 3") == []


def test_counts_by_room(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "long.py").write_text(f"# {LICENSE}\n" + "pass\n" * 601)
    assert check_files.main(["--rooms", str(tmp_path)]) == 1
    assert capsys.readouterr().out == f"{tmp_path}: size 1\n"


def test_test_files_of_one_name_are_refused_where_they_are_collected_together() -> None:
    names = ["tests/api/test_a.py", "tests/kv/test_a.py", "tests/ui/test_a.py", "pagoda/a.py"]
    assert [name for name, _ in check_unique(names)] == ["tests/kv/test_a.py"]
