"""Objects on a real disk: what is read is what was written, or an error."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import msgspec
import pytest

from pagoda.kv.objects import (
    HEADER_BYTES,
    Manifest,
    ObjectError,
    ObjectFiles,
    ObjectUnreadableError,
    object_name,
    open_directory,
)

ReadOnly = Callable[[Path], AbstractContextManager[None]]
KEY = bytes(range(32))
OTHER = bytes(reversed(KEY))


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


@pytest.mark.parametrize("length", [0, 1, HEADER_BYTES, 4096, 10_000, 12_287, 12_289, 16_384])
def test_an_object_of_another_length_is_an_error(files: ObjectFiles, length: int) -> None:
    write(files)
    os.truncate(path_of(files), length)
    with pytest.raises(ObjectError, match=f"it has {length} bytes, not 12288"):
        read(files)


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


def test_what_is_bad_or_not_there_is_not_called_unreadable(files: ObjectFiles) -> None:
    write(files)
    damaged, link, below_a_file = bytes([1]) * 32, bytes([2]) * 32, bytes([3]) * 32
    write(files, damaged)
    os.truncate(path_of(files, damaged), 5)
    path_of(files, link).parent.mkdir()
    path_of(files, link).symlink_to(path_of(files))
    path_of(files, below_a_file).parent.touch()
    for key in (damaged, link, below_a_file, OTHER):
        with pytest.raises(ObjectError) as caught:
            read(files, key)
        assert not isinstance(caught.value, ObjectUnreadableError)


def test_what_is_no_file_is_an_error_and_nobody_waits_for_it(files: ObjectFiles) -> None:
    path = path_of(files)
    path.mkdir(parents=True)
    with pytest.raises(ObjectError):
        read(files)
    with pytest.raises(ObjectError):
        write(files)
    path.rmdir()
    os.mkfifo(path)
    with pytest.raises(ObjectError):
        read(files)
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(ObjectError):
        read(files)
    assert not temporaries(files)
    write(files)  # in place of the link
    assert read(files) == content(files, 1)


def test_reads_in_parts_go_on(files: ObjectFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    write(files)
    whole = os.preadv
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


def test_writes_in_parts_go_on(files: ObjectFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.pwritev
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", lambda fd, buffers, at: whole(fd, [buffers[0][:4096]], at))
        write(files)
    assert read(files) == content(files, 1)


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


def test_to_inspect_an_object_is_no_use_of_it(files: ObjectFiles) -> None:
    write(files)
    os.utime(path_of(files), (5000, 5000))
    files.read(KEY, files.new_buffer(), is_use=False)
    assert path_of(files).stat().st_mtime == 5000
    os.truncate(path_of(files), 4096)
    with pytest.raises(ObjectError, match="4096 bytes"):
        files.read(KEY, files.new_buffer(), is_use=False)


def test_a_bad_object_is_not_used(files: ObjectFiles) -> None:
    write(files, OTHER)
    path_of(files).parent.mkdir()
    path_of(files, OTHER).rename(path_of(files))
    os.utime(path_of(files), (5000, 5000))
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


def test_a_full_disk_keeps_what_was_written_and_no_part_of_the_rest(
    small_disk: Path, manifest: Manifest
) -> None:
    files = ObjectFiles(open_directory(small_disk, manifest), manifest)
    num_written = 0
    problem = ""
    while not problem and num_written < 100:
        try:
            write(files, num_written.to_bytes(32), num_written)
            num_written += 1
        except ObjectError as error:
            problem = str(error)
    assert problem == "No space left on device"
    assert num_written > 5
    for number in range(num_written):
        assert read(files, number.to_bytes(32)) == content(files, number)
    assert not temporaries(files)


@contextmanager
def files_no_longer_than(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size", [0, 1, 4096, 8192, 12_287])
def test_a_write_that_breaks_off_leaves_nothing(files: ObjectFiles, size: int) -> None:
    write(files, OTHER)
    with files_no_longer_than(size), pytest.raises(ObjectError):
        write(files)
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
from pagoda.kv.objects import ObjectFiles
from pagoda.kv.objects import Manifest

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
