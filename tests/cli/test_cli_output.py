# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from pagoda.cli import output


@pytest.mark.parametrize("hostile", ["\x1b]0;title\x07", "\x1b[2J", "\x9b2J"])
def test_control_characters_of_an_answer_are_not_obeyed(
    hostile: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    output.write_answer(f"a{hostile}b\n")
    shown = capsys.readouterr().out
    assert not set(shown) & {"\x1b", "\x07", "\x9b"}
    assert shown.startswith("a")
