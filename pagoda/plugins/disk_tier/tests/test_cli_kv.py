# SPDX-License-Identifier: Apache-2.0
"""Output of `pagoda kv` for directories of KV blocks, and what it leaves in them."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from small_objects import small_manifest

from pagoda.cli import main as command
from pagoda.plugins.disk_tier import command as kv
from pagoda.plugins.disk_tier.objects import (
    MANIFEST_NAME,
    Manifest,
    ObjectError,
    ObjectFiles,
    object_name,
    open_directory,
    read_manifest,
)

Run = Callable[..., tuple[int, str, str]]
KEYS = [bytes([number % 3]) + bytes([number]) * 31 for number in range(9)]
MANIFEST = small_manifest(5000, model="first-model", dtype="bfloat16")
SECOND = msgspec.structs.replace(
    MANIFEST, model="second-model", model_digest="two", quantization="int8", tensor_parallel_size=2
)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `pagoda kv`; gives the exit code, and what was printed."""

    def run(*arguments: object) -> tuple[int, str, str]:
        code = command.main(["kv", *map(str, arguments)])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Nine blocks of one model, two of another."""
    put(tmp_path, MANIFEST, KEYS)
    put(tmp_path, SECOND, KEYS[:2])
    return tmp_path


def put(root: Path, manifest: Manifest, keys: list[bytes]) -> ObjectFiles:
    files = ObjectFiles(open_directory(root, manifest), manifest)
    for key in keys:
        files.write(key, files.new_buffer())
    return files


def path_of(root: Path, key: bytes, manifest: Manifest = MANIFEST) -> Path:
    return root / manifest.digest / object_name(key)


def damage(path: Path, offset: int = 4000) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(b"damage")


def leave_temporary(root: Path, name: str, age_s: float) -> Path:
    path = path_of(root, KEYS[0]).parent / name
    path.write_bytes(b"half")
    at = time.time() - age_s
    os.utime(path, (at, at))
    return path


def test_models_are_listed_with_what_they_take(run: Run, root: Path) -> None:
    for key in KEYS:
        os.utime(path_of(root, key), (10**9, 10**9))
    code, out, _ = run("ls", root)
    assert code == 0
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if "-model" in line}
    assert rows["first-model"] == [
        *(MANIFEST.digest[:8], "bfloat16", "float32", "-", "16"),
        *("9", "72.0", "KiB", time.strftime("%Y-%m-%d", time.localtime(10**9))),
    ]
    assert rows["second-model"][:7] == [
        SECOND.digest[:8],
        *["int8", "float32", "tp", "0/2", "16", "2"],
    ]
    assert rows["second-model"][-1].count(":") == 1  # today
    assert out.splitlines()[-1] == "11 blocks (88.0 KiB)."


def test_an_empty_model_and_files_of_killed_writers_are_listed(run: Run, tmp_path: Path) -> None:
    put(tmp_path, MANIFEST, KEYS[:1])
    put(tmp_path, SECOND, [])
    leave_temporary(tmp_path, ".tmp-old", 700)
    leave_temporary(tmp_path, ".tmp-new", 5)
    _, out, _ = run("ls", tmp_path)
    assert "never" in out
    assert out.splitlines()[-1] == "1 block (8.00 KiB) and 1 file of killed writers."


@pytest.mark.parametrize("name", ["ls", "verify", "clear"])
def test_other_directories_are_refused_in_a_sentence(run: Run, root: Path, name: str) -> None:
    (root / "file").write_text("mine")
    empty = root / "empty"
    (empty / ("a" * 64)).mkdir(parents=True)
    model = root / MANIFEST.digest
    for path, problem in [
        (empty, "holds no KV blocks: no directory in it has a manifest.json."),
        (root / "file", "is no directory."),
        (root / "none", "is no directory."),
        (model, f"is the directory of one model; name the one above it, {root}."),
    ]:
        assert run(name, path) == (2, "", f"pagoda: {path} {problem}\n")
    assert (root / "file").read_text() == "mine"


def test_damaged_blocks_are_named_with_the_reason(run: Run, root: Path) -> None:
    damage(path_of(root, KEYS[0]))
    os.truncate(path_of(root, KEYS[1]), 100)
    path_of(root, KEYS[2]).write_bytes(path_of(root, KEYS[3]).read_bytes())
    damage(path_of(root, KEYS[0], SECOND), offset=8)
    code, out, _ = run("verify", root)
    assert code == 1
    lines = out.splitlines()
    assert lines[-1] == "11 blocks checked, 4 damaged."
    assert set(lines[:-1]) == {
        f"{path_of(root, KEYS[0])}: its checksum is wrong",
        f"{path_of(root, KEYS[1])}: it has 100 bytes, not 8192",
        f"{path_of(root, KEYS[2])}: it is the object of another key, {KEYS[3].hex()[:16]}",
        f"{path_of(root, KEYS[0], SECOND)}: its format is version 1634558308, not 1",
    }
    assert run("verify", root)[0] == 1


def test_damaged_blocks_are_removed_if_asked(run: Run, root: Path) -> None:
    os.utime(path_of(root, KEYS[0]), (10**9, 10**9))
    damage(path_of(root, KEYS[4]))
    code, out, _ = run("verify", "--remove", root)
    assert (code, out.splitlines()[-1]) == (1, "11 blocks checked, 1 damaged and removed.")
    assert not path_of(root, KEYS[4]).exists()
    assert run("verify", "--remove", root) == (0, "10 blocks checked, none damaged.\n", "")
    assert path_of(root, KEYS[0]).stat().st_mtime == 10**9  # to check is not to use


def test_blocks_of_a_manifest_that_nobody_understands_are_not_checked(run: Run, root: Path) -> None:
    (root / SECOND.digest / MANIFEST_NAME).write_text("{}")
    code, out, _ = run("verify", root)
    assert code == 1
    assert out.splitlines() == [
        f"{root / SECOND.digest}: its manifest cannot be understood; not checked",
        "9 blocks checked, none damaged.",
    ]
    assert "unknown" in run("ls", root)[1]


def test_a_block_that_is_removed_during_the_check_is_not_damaged(
    run: Run, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = ObjectFiles.read

    def remove_and_read(
        files: ObjectFiles, key: bytes, buffer: memoryview, *, is_use: bool
    ) -> None:
        if key == KEYS[5]:
            (files.directory / object_name(key)).unlink(missing_ok=True)
        read(files, key, buffer, is_use=is_use)

    monkeypatch.setattr(ObjectFiles, "read", remove_and_read)
    assert run("verify", root) == (0, "10 blocks checked, none damaged.\n", "")


def test_clear_removes_all_blocks_and_what_was_made_for_them(run: Run, root: Path) -> None:
    leave_temporary(root, ".tmp-old", 700)
    (root / "notes").write_text("mine")
    assert run("clear", "--yes", root) == (0, "11 blocks removed.\n", "")
    assert [path.name for path in root.iterdir()] == ["notes"]


def test_clear_removes_one_model_by_name_or_directory(run: Run, root: Path) -> None:
    assert run("clear", "-y", "--model", "second-model", root)[1] == "2 blocks removed.\n"
    assert not (root / SECOND.digest).exists()
    assert path_of(root, KEYS[0]).exists()
    put(root, SECOND, KEYS[:3])
    assert run("clear", "-y", "--model", MANIFEST.digest[:8], root)[1] == "9 blocks removed.\n"
    assert path_of(root, KEYS[0], SECOND).exists()
    for model in ("third-model", ""):
        code, _, err = run("clear", "-y", "--model", model, root)
        assert code == 2
        assert "holds no KV blocks of a model" in err
    assert path_of(root, KEYS[0], SECOND).exists()


def test_clear_leaves_what_is_not_its_own(run: Run, root: Path) -> None:
    foreign = root / MANIFEST.digest / "00" / "notes.txt"
    foreign.write_text("mine")
    new = leave_temporary(root, ".tmp-new", 5)
    code, out, err = run("clear", "-y", "--model", "first-model", root)
    assert (code, out) == (0, "9 blocks removed.\n")
    assert f"{root / MANIFEST.digest} is still there" in err
    assert foreign.read_text() == "mine"
    assert new.exists()
    assert read_manifest(root / MANIFEST.digest) == MANIFEST


def test_clear_removes_a_directory_that_no_server_would_open(run: Run, root: Path) -> None:
    (root / SECOND.digest / MANIFEST_NAME).write_text("{")
    assert run("clear", "-y", root)[1] == "11 blocks removed.\n"
    open_directory(root, SECOND)


def test_clear_asks_first(run: Run, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, err = run("clear", root)
    assert code == 2
    assert "Nobody can confirm" in err
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    for answer in ("", "n", "what?"):
        monkeypatch.setattr("builtins.input", lambda answer=answer: answer)
        code, out, err = run("clear", root)
        assert (code, out) == (1, "")
        assert err == f"Remove 11 blocks (88.0 KiB) from {root}? [y/N] Nothing was removed.\n"
    assert path_of(root, KEYS[0]).exists()
    monkeypatch.setattr("builtins.input", lambda: "y")
    assert run("clear", root)[:2] == (0, "11 blocks removed.\n")


def test_a_writer_goes_on_while_its_directory_is_cleared(run: Run, root: Path) -> None:
    files = ObjectFiles(root / MANIFEST.digest, MANIFEST)
    assert run("clear", "-y", root)[0] == 0
    with pytest.raises(ObjectError, match="not there"):
        files.read(KEYS[0], files.new_buffer())
    files.write(KEYS[0], files.new_buffer())
    assert run("verify", root)[1] == "1 block checked, none damaged.\n"


def test_a_block_that_is_written_at_the_last_moment_keeps_its_manifest(
    run: Run, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = ObjectFiles(root / MANIFEST.digest, MANIFEST)
    shutil.rmtree(root / SECOND.digest)
    unlink = Path.unlink

    def unlink_and_write(path: Path, missing_ok: bool = False) -> None:
        unlink(path, missing_ok)
        if path.name == MANIFEST_NAME:
            (path.parent / "07").mkdir()
            files.write(b"\x07" * 32, files.new_buffer())

    monkeypatch.setattr(Path, "unlink", unlink_and_write)
    code, _, err = run("clear", "-y", root)
    assert code == 0
    assert "still there" in err
    assert run("verify", root)[1] == "1 block checked, none damaged.\n"


def test_what_cannot_be_read_is_a_sentence(
    run: Run, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str) -> list[object]:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(kv, "list_files", refuse)
    code, _, err = run("ls", root)
    assert code == 2
    assert err.startswith(f"pagoda: {root}/")
    assert err.endswith(": Permission denied.\n")
