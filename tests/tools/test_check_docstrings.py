# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest

from tools.check_docstrings import ROOT, main, offence

REFUSED = '''"""Of a module."""
LIMIT = 3
"""How many there are."""


class Thing:
    """For things."""

    size: int
    """Its size."""

    def __init__(self) -> None:
        """Called once."""
        self.count = 0
        """Whether it counts."""
'''


@pytest.mark.parametrize(
    "text", ["Of a block.", "(With a lock)", "Those that wait.", "Whether it runs"]
)
def test_a_first_word_without_a_subject_is_refused(text: str) -> None:
    assert offence(text) is not None


@pytest.mark.parametrize(
    "text",
    ["Free blocks.", "Offers a block.", "Returns `None`.", "Information.", "A list.", "`of`s"],
)
def test_a_subject_or_a_verb_is_taken(text: str) -> None:
    assert offence(text) is None


def test_every_kind_of_docstring_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "refused.py"
    file.write_text(REFUSED)
    assert main([str(tmp_path)]) == 1
    printed = capsys.readouterr()
    lines = [line.removeprefix(f"{file}:").split(": ")[:2] for line in printed.out.splitlines()]
    assert lines == [
        ["1", '"Of a module."'],
        ["3", '"How many there are."'],
        ["7", '"For things."'],
        ["10", '"Its size."'],
        ["13", '"Called once."'],
        ["15", '"Whether it counts."'],
    ]
    assert "6 docstrings" in printed.err


def test_paths_that_are_fine_and_paths_that_are_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(ROOT / "tools" / "check_docstrings.py")]) == 0
    assert capsys.readouterr().out == ""
    assert main([str(tmp_path / "nowhere")]) == 2
    assert "There is no" in capsys.readouterr().err
