from __future__ import annotations

import pytest

from pagoda.cli import output
from pagoda.cli.output import format_bytes


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


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536 * 1024, "1.50 MiB"),
        (1_192_099_840, "1.11 GiB"),
        (24 * 2**30, "24.0 GiB"),
        (5000 * 2**30, "5000 GiB"),
    ],
)
def test_amounts_are_written(amount: int, text: str) -> None:
    assert format_bytes(amount) == text
