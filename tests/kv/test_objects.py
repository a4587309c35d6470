"""The format of objects: nothing but the right bytes under the right key passes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagoda.errors import ConfigError
from pagoda.kv import objects
from pagoda.kv.block_keys import root_key
from pagoda.kv.objects import (
    HEADER_BYTES,
    MANIFEST_NAME,
    Manifest,
    ObjectError,
    object_bytes,
    object_name,
    open_directory,
    parse_name,
    read_manifest,
)

ReadOnly = Callable[[Path], AbstractContextManager[None]]
KEY = bytes(range(32))
PAYLOAD_BYTES = 100


def sealed(key: bytes = KEY, payload_bytes: int = PAYLOAD_BYTES) -> bytearray:
    buffer = bytearray(object_bytes(payload_bytes))
    objects.payload(memoryview(buffer), payload_bytes)[:] = bytes(
        number % 251 for number in range(payload_bytes)
    )
    objects.seal(memoryview(buffer), key, payload_bytes)
    return buffer


def check(buffer: bytearray, key: bytes = KEY, payload_bytes: int = PAYLOAD_BYTES) -> None:
    objects.check(memoryview(buffer), key, payload_bytes)


def test_a_sealed_object_is_good() -> None:
    check(sealed())


def test_objects_are_headers_and_payloads_in_units() -> None:
    assert object_bytes(1) == object_bytes(4096 - HEADER_BYTES) == 4096
    assert object_bytes(4096 - HEADER_BYTES + 1) == 8192


@pytest.mark.parametrize("offset", range(HEADER_BYTES + PAYLOAD_BYTES))
def test_any_flipped_bit_of_header_or_payload_is_found(offset: int) -> None:
    buffer = sealed()
    buffer[offset] ^= 1 << offset % 8
    with pytest.raises(ObjectError):
        check(buffer)


@pytest.mark.parametrize(
    ("offset", "problem"),
    [
        (0, "no KV object"),
        (8, "version 3, not 1"),
        (12, "102 bytes of payload, not 100"),
        (20, "another key, 0201"),
        (52, "checksum"),
        (60, "checksum"),
        (HEADER_BYTES, "checksum"),
        (HEADER_BYTES + PAYLOAD_BYTES - 1, "checksum"),
    ],
)
def test_each_field_is_said_to_be_wrong(offset: int, problem: str) -> None:
    buffer = sealed()
    buffer[offset] ^= 2
    with pytest.raises(ObjectError, match=problem):
        check(buffer)


@given(st.binary(min_size=32, max_size=32))
def test_names_and_keys_are_the_same(key: bytes) -> None:
    fan_out, name = object_name(key).split("/")
    assert parse_name(fan_out, name) == key


@pytest.mark.parametrize(
    ("fan_out", "name"),
    [
        ("00", "0" * 61),
        ("0", "0" * 63),
        ("00", "0" * 61 + "g"),
        ("00", "A" * 62),
        ("00", "٠" * 62),
        ("00", " " * 62),
        ("", "0" * 64),
        ("00", ".tmp-0123456789abcdef"),
        ("lost+found", "0" * 54),
    ],
)
def test_other_names_are_of_no_key(fan_out: str, name: str) -> None:
    assert parse_name(fan_out, name) is None


def test_keys_are_those_of_blocks() -> None:
    assert root_key(16) == hashlib.sha256(f"{objects.KEY_VERSION}:16:".encode()).digest()


def test_the_digest_is_over_all_that_bytes_depend_on(manifest: Manifest) -> None:
    digests = {manifest.digest}
    for field in msgspec.structs.fields(Manifest):
        value = getattr(manifest, field.name)
        other = value + 1 if isinstance(value, int) else f"{value}, but another"
        changed = msgspec.structs.replace(manifest, **{field.name: other})
        if field.name == "model":
            assert changed.digest == manifest.digest
        else:
            digests.add(changed.digest)
    assert len(digests) == len(msgspec.structs.fields(Manifest))


def test_the_digest_stays_what_it_is(manifest: Manifest) -> None:
    # Directories of earlier versions would be lost without a word otherwise.
    fields = json.loads(msgspec.json.encode(manifest))
    del fields["model"]
    canonical = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    assert manifest.digest == hashlib.sha256(canonical.encode()).hexdigest()


def test_a_directory_is_made_once_and_for_this_user_alone(
    tmp_path: Path, manifest: Manifest
) -> None:
    root = tmp_path / "not" / "there"
    directory = open_directory(root, manifest)
    assert directory == root / manifest.digest
    assert directory.stat().st_mode & 0o777 == 0o700
    assert read_manifest(directory) == manifest
    renamed = msgspec.structs.replace(manifest, model="another name")
    assert open_directory(root, renamed) == directory
    assert read_manifest(directory) == manifest
    assert [path.name for path in directory.iterdir()] == [MANIFEST_NAME]


def test_a_file_is_no_directory(tmp_path: Path, manifest: Manifest) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file is to hold KV blocks, but is not a directory\.$"):
        open_directory(tmp_path / "file", manifest)
    with pytest.raises(ConfigError, match=r"cannot be kept in .*/file/below: Not a directory\.$"):
        open_directory(tmp_path / "file" / "below", manifest)


def test_the_directory_of_one_model_is_refused(tmp_path: Path, manifest: Manifest) -> None:
    directory = open_directory(tmp_path, manifest)
    with pytest.raises(ConfigError, match=rf"name the one above it, {tmp_path}\.$"):
        open_directory(directory, manifest)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b'{"model": "m"}',
        b'{"model": "\xff"}',
        b'{"unknown": ' + b"[" * 10_000,
        b"\0" * 1000,
    ],
)
def test_a_manifest_that_nobody_understands_is_refused(
    tmp_path: Path, manifest: Manifest, content: bytes
) -> None:
    directory = open_directory(tmp_path, manifest)
    (directory / MANIFEST_NAME).write_bytes(content)
    assert read_manifest(directory) is None
    with pytest.raises(ConfigError, match=rf"cannot be read; `pagoda kv clear {tmp_path}` removes"):
        open_directory(tmp_path, manifest)


@pytest.mark.parametrize(
    ("field", "length"),
    [
        ("payload_bytes", 0),
        ("block_size", 0),
        ("payload_bytes", -(10**12)),
        ("payload_bytes", 2**41),
    ],
)
def test_a_manifest_of_impossible_lengths_is_not_understood(
    tmp_path: Path, manifest: Manifest, field: str, length: int
) -> None:
    directory = open_directory(tmp_path, manifest)
    nothing = msgspec.structs.replace(manifest, **{field: length})
    (directory / MANIFEST_NAME).write_bytes(msgspec.json.encode(nothing))
    assert read_manifest(directory) is None


def test_the_manifest_of_another_model_is_refused(tmp_path: Path, manifest: Manifest) -> None:
    other = msgspec.structs.replace(manifest, model="other-model", model_digest="another")
    directory = open_directory(tmp_path, manifest)
    (directory / MANIFEST_NAME).write_bytes(msgspec.json.encode(other))
    with pytest.raises(ConfigError, match="is that of other blocks, of other-model"):
        open_directory(tmp_path, manifest)


def test_a_directory_that_others_can_write_in_is_refused(
    tmp_path: Path, manifest: Manifest
) -> None:
    directory = open_directory(tmp_path, manifest)
    for mode in (0o777, 0o770, 0o702):
        directory.chmod(mode)
        with pytest.raises(
            ConfigError, match=rf"can be written by other users.*chmod 700 {directory}"
        ):
            open_directory(tmp_path, manifest)
    directory.chmod(0o755)
    assert open_directory(tmp_path, manifest) == directory


def test_a_directory_of_another_user_is_refused(
    tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_directory(tmp_path, manifest)
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    with pytest.raises(
        ConfigError, match=r"belongs to another user, .*; name a directory of your own\.$"
    ):
        open_directory(tmp_path, manifest)


def test_a_link_in_place_of_a_directory_is_refused(tmp_path: Path, manifest: Manifest) -> None:
    elsewhere = open_directory(tmp_path / "elsewhere", manifest)
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv" / manifest.digest).symlink_to(elsewhere)
    with pytest.raises(ConfigError, match="but is not a directory"):
        open_directory(tmp_path / "kv", manifest)


def test_a_directory_without_permission_is_refused(
    tmp_path: Path, manifest: Manifest, read_only: ReadOnly
) -> None:
    with read_only(tmp_path), pytest.raises(ConfigError, match=rf"cannot be kept in {tmp_path}: "):
        open_directory(tmp_path, manifest)
    open_directory(tmp_path, manifest)
    with read_only(tmp_path), pytest.raises(ConfigError, match=rf"cannot be kept in {tmp_path}: "):
        open_directory(tmp_path, manifest)
