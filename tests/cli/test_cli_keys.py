# SPDX-License-Identifier: Apache-2.0
"""Output of `pagoda keys`, and what it leaves in the file."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from pagoda.api.auth.keys import ApiKeys, Scope
from pagoda.api.auth.keys_file import read_keys
from pagoda.checkpoints.resolve import resolve_model
from pagoda.cli import main as command
from pagoda.cli.serve import ServerOptions


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys"


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = command.main(["keys", *map(str, arguments)])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_a_key_is_made_listed_and_revoked(capsys: pytest.CaptureFixture[str], path: Path) -> None:
    flags = ("--api-keys-file", path)
    code, made, _ = run(capsys, "add", "alice", *flags)
    assert code == 0
    limits = ("--weight", 2, "--requests-per-minute", 60, "--scope", "look", "--scope", "operate")
    _, second, _ = run(capsys, "add", "bob", *flags, *limits)
    keys = ApiKeys(in_file=read_keys(path))
    alice, bob = keys.find(f"Bearer {made}"), keys.find(f"Bearer {second}")
    assert alice is not None
    assert bob is not None
    assert (alice.name, alice.scopes) == ("alice", {Scope.ANSWER})
    assert (bob.name, bob.scopes) == ("bob", {Scope.LOOK, Scope.OPERATE})
    assert (bob.weight, bob.requests_per_minute, bob.tokens_per_minute) == (2, 60, None)
    assert made.strip() not in path.read_text()
    code, listed, _ = run(capsys, "list", *flags)
    assert code == 0
    assert [line.split() for line in listed.splitlines() if "alice" in line or "bob" in line] == [
        ["alice", "answer", "1", "-", "-", "-"],
        ["bob", "look", "operate", "2", "-", "60", "-"],
    ]
    assert run(capsys, "revoke", "alice", *flags)[0] == 0
    assert [key.name for key in read_keys(path)] == ["bob"]


def test_mistakes_are_one_sentence(capsys: pytest.CaptureFixture[str], path: Path) -> None:
    flags = ("--api-keys-file", path)
    run(capsys, "add", "alice", *flags)
    before = path.read_bytes()
    for arguments, problem in {
        ("add", "alice", *flags): "has a key alice; revoke it first",
        ("add", "a b", *flags): "NAME must be a letter and up to 31 letters",
        ("add", "carol", *flags, "--scope", "all"): "scope",
        ("revoke", "bob", *flags): "has no key bob",
        ("list", "--api-keys-file", path.parent / "none"): "No such file",
        ("add", "bob"): "--api-keys-file",
    }.items():
        code, printed, error = run(capsys, *arguments)
        assert (code, printed) == (2, ""), arguments
        assert problem in error
        assert error.count("\n") == 1
    assert path.read_bytes() == before


def test_the_file_may_stand_in_the_environment(
    capsys: pytest.CaptureFixture[str], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "PAGODA_API_KEYS_FILE", str(path))
    assert run(capsys, "add", "alice")[0] == 0
    assert [key.name for key in read_keys(path)] == ["alice"]


@pytest.mark.parametrize("words", [["--api-key", "a:=secret"], ["--api-key=a:=secret"], []])
def test_a_key_on_the_command_line_is_warned_of(
    words: list[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["pagoda", "serve", *words])
    config = ServerOptions(api_key=("a:=secret",)).config(resolve_model(None))
    assert config.api.api_keys.names == ("a",)
    assert any("list of processes" in message for message in caplog.messages) is bool(words)
    assert "secret" not in caplog.text
