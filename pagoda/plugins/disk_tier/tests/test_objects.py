# SPDX-License-Identifier: Apache-2.0
"""Objects: nothing but the right bytes under the right key passes, and what is read is what was written."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tables import each_row

from pagoda.errors import ConfigError
from pagoda.plugins.disk_tier import objects
from pagoda.plugins.disk_tier.objects import (
    ALIGNMENT,
    HEADER_BYTES,
    MANIFEST_NAME,
    Manifest,
    ObjectError,
    ObjectFiles,
    ObjectUnreadableError,
    object_bytes,
    object_name,
    open_directory,
    open_in_time,
    parse_name,
    read_manifest,
)

ReadOnly = Callable[[Path], AbstractContextManager[None]]
KEY = bytes(range(32))
OTHER = bytes(reversed(KEY))
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


def test_objects_are_headers_and_payloads_in_units() -> None:
    assert object_bytes(1) == object_bytes(4096 - HEADER_BYTES) == 4096
    assert object_bytes(4096 - HEADER_BYTES + 1) == 8192


@each_row("offset", range(HEADER_BYTES + PAYLOAD_BYTES))
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
        *(("00", name) for name in ("0" * 61, "0" * 61 + "g", "A" * 62, "٠" * 62, " " * 62)),
        *(("0", "0" * 63), ("", "0" * 64), ("lost+found", "0" * 54)),
        ("00", ".tmp-0123456789abcdef"),
    ],
)
def test_other_names_are_of_no_key(fan_out: str, name: str) -> None:
    assert parse_name(fan_out, name) is None


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
    assert fields.pop("kv_groups") == []  # earlier versions knew none
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
    directory.chmod(0o755)  # others can only read
    assert open_directory(root, manifest) == directory


def make_file(root: Path, _: Manifest) -> None:
    root.write_text("")


def name_one_model(root: Path, manifest: Manifest) -> Path:
    return open_directory(root, manifest)


def put_another_manifest(root: Path, manifest: Manifest) -> None:
    other = msgspec.structs.replace(manifest, model="other-model", model_digest="another")
    (open_directory(root, manifest) / MANIFEST_NAME).write_bytes(msgspec.json.encode(other))


def link_elsewhere(root: Path, manifest: Manifest) -> None:
    root.mkdir()
    (root / manifest.digest).symlink_to(open_directory(root.parent / "elsewhere", manifest))


def open_to_others(mode: int) -> Callable[[Path, Manifest], None]:
    def change(root: Path, manifest: Manifest) -> None:
        open_directory(root, manifest).chmod(mode)

    return change


@pytest.mark.parametrize(
    ("prepare", "sentence"),
    [
        (make_file, r"kept in .*kv, which is not a directory\.$"),
        (lambda *_: Path(__file__) / "kv", r"cannot be kept in .*/kv: Not a directory\.$"),
        (name_one_model, r"name the one above it, .*/kv\.$"),
        (put_another_manifest, "is that of other blocks, of other-model"),
        (link_elsewhere, "which is not a directory"),
        *((open_to_others(mode), r"by other users.*`chmod 700 .*/kv/") for mode in (0o770, 0o702)),
    ],
)
def test_a_directory_that_cannot_be_used_is_refused(
    tmp_path: Path,
    manifest: Manifest,
    prepare: Callable[[Path, Manifest], Path | None],
    sentence: str,
) -> None:
    root = prepare(tmp_path / "kv", manifest) or tmp_path / "kv"
    with pytest.raises(ConfigError, match=sentence):
        open_directory(root, manifest)


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{", b"null", b'{"model": "m"}', b'{"model": "\xff"}', b"\0" * 1000),
        b'{"unknown": ' + b"[" * 10_000,
        *({"payload_bytes": size} for size in (0, -1, 2**41)),
        {"block_size": 0},
    ],
)
def test_a_manifest_that_nobody_understands_is_refused(
    tmp_path: Path, manifest: Manifest, content: bytes | dict[str, int]
) -> None:
    directory = open_directory(tmp_path, manifest)
    if isinstance(content, dict):
        content = msgspec.json.encode(msgspec.structs.replace(manifest, **content))
    (directory / MANIFEST_NAME).write_bytes(content)
    assert read_manifest(directory) is None
    with pytest.raises(ConfigError, match=rf"cannot be read; `pagoda kv clear {tmp_path}` removes"):
        open_directory(tmp_path, manifest)


def test_a_directory_of_another_user_is_refused(
    tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_directory(tmp_path, manifest)
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    sentence = r"belongs to another user, .*; name a directory of your own\.$"
    with pytest.raises(ConfigError, match=sentence):
        open_directory(tmp_path, manifest)


@pytest.mark.parametrize("is_there", [False, True])
def test_a_directory_without_permission_is_refused(
    tmp_path: Path, manifest: Manifest, read_only: ReadOnly, is_there: bool
) -> None:
    if is_there:
        open_directory(tmp_path, manifest)
    with read_only(tmp_path), pytest.raises(ConfigError, match=rf"cannot be kept in {tmp_path}: "):
        open_directory(tmp_path, manifest)


# ---- objects on a real disk


def content(files: ObjectFiles, number: int) -> bytes:
    return number.to_bytes(8) * (files.payload_bytes // 8)


def write(files: ObjectFiles, key: bytes = KEY, number: int = 1) -> None:
    buffer = files.new_buffer()
    files.payload(buffer)[:] = content(files, number)
    files.write(key, buffer)


def read(files: ObjectFiles, key: bytes = KEY) -> bytes:
    buffer = files.new_buffer()
    files.read(key, buffer)
    return bytes(files.payload(buffer))


def path_of(files: ObjectFiles, key: bytes = KEY) -> Path:
    return files.directory / object_name(key)


def temporaries(files: ObjectFiles) -> list[Path]:
    return list(files.directory.rglob(".tmp-*"))


def test_what_was_written_is_read(files: ObjectFiles) -> None:
    write(files)
    write(files, OTHER, 2)
    assert read(files) == content(files, 1)
    assert read(files, OTHER) == content(files, 2)
    assert path_of(files).stat().st_size == files.object_bytes
    assert not temporaries(files)


def test_a_file_system_that_refuses_direct_io_is_used_without(
    files: ObjectFiles, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def refuse(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return opened(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)
    plain = ObjectFiles(files.directory, manifest)
    assert not plain.direct
    write(plain)
    monkeypatch.undo()
    assert read(plain) == read(files) == content(files, 1)


@pytest.mark.parametrize("length", [0, HEADER_BYTES, 4096, 12_287, 12_289])
def test_an_object_of_another_length_is_an_error(files: ObjectFiles, length: int) -> None:
    write(files)
    os.truncate(path_of(files), length)
    with pytest.raises(ObjectError, match=f"it has {length} bytes, not 12288") as caught:
        read(files)
    assert not isinstance(caught.value, ObjectUnreadableError)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_an_object_that_somebody_else_put_there_is_an_error(files: ObjectFiles) -> None:
    write(files)
    os.chown(path_of(files), 65534, -1)
    with pytest.raises(ObjectError, match="belongs to another user"):
        read(files)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM, errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("call", ["open", "preadv"])
def test_what_the_system_cannot_read_now_is_not_called_bad(
    files: ObjectFiles, monkeypatch: pytest.MonkeyPatch, number: int, call: str
) -> None:
    write(files)

    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(ObjectUnreadableError, match=os.strerror(number)):
            read(files)
    assert read(files) == content(files, 1)


def make_link(path: Path) -> None:
    path.symlink_to("/dev/zero")


def make_file_above(path: Path) -> None:
    path.parent.rmdir()
    path.parent.touch()


@pytest.mark.parametrize(
    "make", [Path.mkdir, os.mkfifo, make_link, make_file_above, lambda _: None]
)
def test_what_is_no_file_is_bad_and_nobody_waits_for_it(
    files: ObjectFiles, make: Callable[[Path], None]
) -> None:
    path = path_of(files)
    path.parent.mkdir()
    make(path)
    with pytest.raises(ObjectError) as caught:
        read(files)
    if make not in (Path.mkdir, os.mkfifo):  # what direct I/O cannot open is not known to be bad
        assert not isinstance(caught.value, ObjectUnreadableError)
    write(files)  # in place of a link or a pipe; a directory, or a file above, gets another name
    assert read(files) == content(files, 1)
    was_in_the_way = make in (Path.mkdir, make_file_above)
    assert len(list(files.directory.rglob("aside-*"))) == was_in_the_way
    assert not temporaries(files)


def test_reads_and_writes_in_parts_go_on(
    files: ObjectFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_whole, whole = os.pwritev, os.preadv
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", lambda fd, data, at: write_whole(fd, [data[0][:4096]], at))
        write(files)
    sizes = iter([4096, 4097, 4096])

    def part(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        assert offset % 4096 == 0
        return whole(descriptor, [buffers[0][: next(sizes)]], offset)

    buffered = ObjectFiles(files.directory, files.manifest)
    buffered.direct = 0
    monkeypatch.setattr(os, "preadv", part)
    assert read(buffered) == content(files, 1)
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with pytest.raises(ObjectError, match="only a part"):
        read(buffered)


def test_a_read_notes_the_use_but_not_every_time(files: ObjectFiles) -> None:
    write(files)
    path = path_of(files)
    long_ago = time.time() - 3600
    os.utime(path, (long_ago, long_ago))
    read(files)
    noted = path.stat().st_mtime
    assert noted > long_ago + 3000
    os.utime(path, (noted - 30, noted - 30))
    read(files)
    assert path.stat().st_mtime == pytest.approx(noted - 30)


def test_a_segment_that_steps_read_stays_young(files: ObjectFiles) -> None:
    write(files)
    os.utime(path_of(files), (5000, 5000))
    files.read_part(KEY, 0, files.new_buffer()[:ALIGNMENT])
    assert path_of(files).stat().st_mtime > 5000


def test_to_inspect_an_object_or_to_find_it_bad_is_no_use_of_it(files: ObjectFiles) -> None:
    write(files, OTHER)
    os.utime(path_of(files, OTHER), (5000, 5000))
    files.read(OTHER, files.new_buffer(), is_use=False)
    path_of(files).parent.mkdir()
    path_of(files, OTHER).rename(path_of(files))
    with pytest.raises(ObjectError, match="another key"):
        read(files)
    assert path_of(files).stat().st_mtime == 5000


def test_a_directory_that_was_removed_is_made_again(files: ObjectFiles) -> None:
    write(files)
    subprocess.run(["rm", "-r", str(files.directory.parent)], check=True)
    with pytest.raises(ObjectError):
        read(files)
    write(files, OTHER, 3)
    assert read(files, OTHER) == content(files, 3)
    assert open_directory(files.directory.parent, files.manifest) == files.directory


def test_read_only_objects_are_read_and_none_is_written(
    files: ObjectFiles, read_only: ReadOnly
) -> None:
    write(files)
    with read_only(files.directory):
        assert read(files) == content(files, 1)
        with pytest.raises(ObjectError):
            write(files, OTHER)
    assert not path_of(files, OTHER).exists()


@pytest.mark.parametrize("size", [0, 1, 4096, 8192, 12_287])
def test_a_write_that_breaks_off_leaves_nothing(files: ObjectFiles, size: int) -> None:
    write(files, OTHER)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        with pytest.raises(ObjectError):
            write(files)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not temporaries(files)
    with pytest.raises(ObjectError, match="not there"):
        read(files)
    write(files)
    assert read(files) == content(files, 1)


def test_threads_share_the_files_and_readers_see_whole_objects(files: ObjectFiles) -> None:
    write(files)
    stop = threading.Event()

    def keep_writing(number: int) -> None:
        while not stop.is_set():
            write(files, number=number)

    writers = [threading.Thread(target=keep_writing, args=(number,)) for number in (1, 2)]
    for writer in writers:
        writer.start()
    allowed = {content(files, 1), content(files, 2)}
    seen = {read(files) for _ in range(200)}
    stop.set()
    for writer in writers:
        writer.join()
    assert seen <= allowed
    assert not temporaries(files)


_KEEP_WRITING = """
import sys
from pathlib import Path
import msgspec
from pagoda.plugins.disk_tier.objects import Manifest, ObjectFiles

manifest = msgspec.json.decode(sys.argv[2], type=Manifest)
files = ObjectFiles(Path(sys.argv[1]), manifest)
buffer = files.new_buffer()
for number in range(100_000):
    files.payload(buffer)[:] = number.to_bytes(8) * (files.payload_bytes // 8)
    files.write((number % 64).to_bytes(32), buffer)
    if number % 8 == 0:
        print(number, flush=True)
"""


@pytest.mark.parametrize("num_lines", [1, 3, 9])
def test_a_writer_that_is_killed_leaves_whole_objects_only(
    tmp_path: Path, manifest: Manifest, num_lines: int
) -> None:
    large = msgspec.structs.replace(manifest, payload_bytes=2**20)
    files = ObjectFiles(open_directory(tmp_path, large), large)
    command = [sys.executable, "-c", _KEEP_WRITING]
    command += [str(files.directory), msgspec.json.encode(large).decode()]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        for _ in range(num_lines):
            assert writer.stdout.readline()
        writer.send_signal(signal.SIGKILL)
    num_read = 0
    for slot in range(64):
        key = slot.to_bytes(32)
        if path_of(files, key).exists():
            payload = read(files, key)
            number = int.from_bytes(payload[:8])
            assert number % 64 == slot
            assert payload == content(files, number)
            num_read += 1
    assert num_read >= min(64, 8 * (num_lines - 1) + 1)


def test_a_disk_that_hangs_ends_the_first_start_and_no_later_one(
    tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(objects, "OPEN_TIMEOUT_S", 0.01)
    monkeypatch.setattr(objects, "open_directory", lambda *_: answers.wait())
    with pytest.raises(ConfigError, match=r"not answered for 0\.01 s; name another directory"):
        open_in_time(tmp_path, manifest, was_open=False)
    assert open_in_time(tmp_path, manifest, was_open=True) == tmp_path / manifest.digest
    answers.set()


def test_a_disk_that_answers_gives_the_directory_or_its_fault(
    tmp_path: Path, manifest: Manifest
) -> None:
    directory = open_in_time(tmp_path / "kv", manifest, was_open=False)
    assert (directory / objects.MANIFEST_NAME).is_file()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError):
        open_in_time(tmp_path / "file", manifest, was_open=True)
