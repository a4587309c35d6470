# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from pagoda.api.auth.file_watch import WatchedFiles
from pagoda.api.auth.keys import ApiKey, ApiKeys, Scope, digest_of
from pagoda.api.auth.keys_file import changed_keys, new_key, read_keys
from pagoda.errors import ConfigError

DIGEST = digest_of("k")


def key(name: str, **fields: object) -> ApiKey:
    made = {"name": name, "sha256": digest_of(name), "scopes": ["answer"], **fields}
    return msgspec.convert(made, ApiKey)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys"


def write(path: Path, *lines: str, mode: int = 0o600) -> None:
    path.write_text("".join(f"{line}\n" for line in lines))
    path.chmod(mode)


def test_what_is_written_is_read(path: Path) -> None:
    first = key("a", scopes=["look", "answer"], weight=2, tokens_per_minute=100)
    with changed_keys(path) as keys:
        keys.append(first)
    with changed_keys(path) as keys:
        keys.append(key("b"))
    assert read_keys(path) == [first, key("b")]
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(path.parent.iterdir()) == [path]
    assert "null" not in path.read_text()


def test_a_change_that_fails_changes_nothing(path: Path) -> None:
    write(path, f'{{"name":"a","sha256":"{DIGEST}","scopes":[]}}')
    before = path.read_bytes()
    with suppress(ZeroDivisionError), changed_keys(path) as keys:
        keys.clear()
        raise ZeroDivisionError
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_changes_at_the_same_time_are_all_kept(path: Path) -> None:
    def add(name: str) -> None:
        with changed_keys(path) as keys:
            keys.append(key(name))

    names = [f"k{number}" for number in range(16)]
    threads = [threading.Thread(target=add, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(own.name for own in read_keys(path)) == sorted(names)


def test_keys_are_long_and_differ() -> None:
    made = {new_key() for _ in range(100)}
    assert len(made) == 100
    assert all(own.startswith("pagoda_") and len(own) == 50 for own in made)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "truncated"),
        ("\xff", "malformed|invalid"),
        ("[]", "Expected `object`"),
        ('{"name":"a","scopes":["answer"]}', "missing required field `sha256`"),
        (f'{{"name":"a","sha256":"{DIGEST}"}}', "missing required field `scopes`"),
        (f'{{"name":"a","sha256":"{DIGEST.upper()}","scopes":[]}}', r"\$.sha256"),
        (f'{{"name":"a b","sha256":"{DIGEST}","scopes":[]}}', r"\$.name"),
        (f'{{"name":"a","sha256":"{DIGEST}","scopes":["all"]}}', "Invalid enum value 'all'"),
        (f'{{"name":"a","sha256":"{DIGEST}","scopes":[],"rpm":1}}', "unknown field `rpm`"),
        (f'{{"name":"a","sha256":"{DIGEST}","scopes":[],"weight":0}}', r"\$.weight"),
        (f'{{"name":"a","sha256":"{DIGEST}","scopes":[],"tokens_per_minute":0}}', r"\$.tokens_per"),
    ],
)
def test_a_line_that_is_no_key_is_named(path: Path, line: str, problem: str) -> None:
    path.write_bytes(b"\n" + line.encode("latin-1"))
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=f"--api-keys-file: .*/keys line 2: .*({problem})"):
        read_keys(path)


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_may_write_is_refused(path: Path, mode: int) -> None:
    write(path, mode=mode)
    with pytest.raises(ConfigError, match=r"others may write to .*/keys; `chmod 600` it"):
        read_keys(path)


def test_a_file_that_all_may_read_is_warned_of(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(path, mode=0o640)
    assert read_keys(path) == []
    assert caplog.messages == []
    path.chmod(0o644)
    read_keys(path)
    [message] = caplog.messages
    assert "every user of this machine may read" in message


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to others")
def test_a_file_of_another_user_is_refused(path: Path) -> None:
    write(path)
    os.chown(path, 65534, 65534)
    with pytest.raises(ConfigError, match="must belong to the user of the server or to root"):
        read_keys(path)


def test_a_file_that_is_missing_or_none_is_refused(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*No such file"):
        read_keys(path)
    os.mkfifo(path)
    for none in (path, path.parent):
        with pytest.raises(ConfigError, match=r"cannot read .*it is not a regular file"):
            read_keys(none)


def test_a_changed_file_counts_and_a_broken_one_leaves_the_keys(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = ApiKeys(in_file=())
    with changed_keys(path) as listed:
        listed += [key("a"), key("b")]
    watched = WatchedFiles([path], lambda: keys.replace_file(read_keys(path)))
    assert keys.names == ("a", "b")
    with changed_keys(path) as listed:
        del listed[0]
    watched.look()
    assert keys.names == ("b",)
    for breaking in (lambda: write(path, "{"), lambda: path.chmod(0o666), path.unlink):
        caplog.clear()
        breaking()
        watched.look()
        watched.look()
        [message] = [it.message for it in caplog.records if it.levelname == "ERROR"]
        assert message.endswith("What was there before stays in force.")
        assert keys.names == ("b",)
    with changed_keys(path) as listed:
        listed.append(key("c", scopes=["operate"]))
    watched.look()
    assert keys.names == ("c",)
    found = keys.find("Bearer c")
    assert found is not None
    assert found.scopes == {Scope.OPERATE}
