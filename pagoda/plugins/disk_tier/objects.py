# SPDX-License-Identifier: Apache-2.0
"""The format of KV on disk: one object, a file, for each block, in one directory for each model and rank.

    DIR/<digest of the manifest>/manifest.json          what all objects in here have in common
    DIR/<digest of the manifest>/<2 hex>/<62 hex>       an object; the digits are its key's

An object is a header of 64 bytes, the payload (all layers of the block on one rank), and padding up to the next
4 KiB:

    offset  bytes
         0      8  magic
         8      4  format version
        12      8  payload length
        20     32  key
        52      8  zero
        60      4  CRC-32C of the 60 bytes before and the payload

Integers are little-endian. An object appears under its name all at once, by a rename; nothing is synced, since an
object that a loss of power left in pieces fails its check and is a miss.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import mmap
import os
import secrets
import stat
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from crc32c import crc32c

from pagoda.errors import ConfigError
from pagoda.faults.injector import Faults
from pagoda.ipc.bounded import within
from pagoda.kv.block_keys import KEY_VERSION
from pagoda.messages.kv_groups import KVGroup

FORMAT_VERSION = 1
ALIGNMENT = 4096
"""Alignment of object lengths and buffers, in bytes, as direct I/O requires."""
HEADER_BYTES = 64
KEY_BYTES = 32
MANIFEST_NAME = "manifest.json"
TEMPORARY_PREFIX = ".tmp-"
"""Files that are being written, or that a killed writer left."""
_ASIDE_PREFIX = "aside-"
"""Beginning of the names of what lay in the way of objects."""

OPEN_TIMEOUT_S = 30.0
"""Seconds that a disk may take for the first look at a directory."""
_log = logging.getLogger(__name__)
_MAX_PAYLOAD_BYTES = 2**40
"""Limit of a valid manifest: the quota counts with the lengths of other models' objects."""
_MAX_MANIFEST_BYTES = 2**16
_MAGIC = b"PAGODAKV"
_HEADER = struct.Struct("<8sIQ32s8x")
_CHECKSUM = struct.Struct("<I")
_RELEASE_THE_GIL = 1
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_NO_FILE = frozenset({errno.ELOOP, errno.ENOTDIR, errno.ENXIO})
"""Errors for a link, a path through a file, and a pipe or device that cannot be opened."""
_USED_AGAIN_AFTER_S = 60.0
"""Seconds by which an object's time of last use may lag: not every read writes an inode."""
_DIGEST_DIGITS = 64
_FAN_OUT_DIGITS = 2
_HEX_DIGITS = frozenset("0123456789abcdef")


class ObjectError(Exception):
    """An object cannot be read or written. The text is a clause that says why."""


class ObjectUnreadableError(ObjectError):
    """The object may be good, but cannot be read now."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Everything on which two objects of one key must agree to be the same bytes."""

    format_version: int = FORMAT_VERSION
    key_version: str = KEY_VERSION
    model: str
    """Name for people; two names of one model share a directory."""
    model_digest: str
    dtype: str
    kv_dtype: str
    quantization: str
    arithmetic: str
    layout: str
    """Dimensions of the payload, in order."""
    block_size: Annotated[int, msgspec.Meta(ge=1)]
    kv_groups: tuple[KVGroup, ...] = ()
    """Groups of layers whose blocks are objects of their own; empty for one that keeps all."""
    payload_bytes: Annotated[int, msgspec.Meta(ge=1, le=_MAX_PAYLOAD_BYTES)]
    tensor_parallel_size: int = 1
    tensor_parallel_rank: int = 0
    pipeline_parallel_size: int = 1
    stage: int = 0
    expert_parallel: bool = False
    """Sums over experts are rounded in another order then."""

    @property
    def digest(self) -> str:
        """SHA-256 over all fields but the name for people, in hex."""
        fields = msgspec.to_builtins(self)
        del fields["model"]
        if not self.kv_groups:  # there were none when the first objects were written
            del fields["kv_groups"]
        return hashlib.sha256(msgspec.json.encode(fields, order="sorted")).hexdigest()

    @property
    def object_bytes(self) -> int:
        return object_bytes(self.payload_bytes)


def object_bytes(payload_bytes: int) -> int:
    return -(-(HEADER_BYTES + payload_bytes) // ALIGNMENT) * ALIGNMENT


def object_name(key: bytes) -> str:
    """Path of the object of `key`, relative to its directory."""
    digits = key.hex()
    return f"{digits[:_FAN_OUT_DIGITS]}/{digits[_FAN_OUT_DIGITS:]}"


def parse_name(fan_out: str, name: str) -> bytes | None:
    """The key of the object `name` in the directory `fan_out`; None if that is no name of an object."""
    digits = fan_out + name
    if len(fan_out) != _FAN_OUT_DIGITS or len(digits) != 2 * KEY_BYTES:
        return None
    try:
        key = bytes.fromhex(digits)
    except ValueError:
        return None
    return key if key.hex() == digits else None  # there are other ways to write a number


def is_digest(name: str) -> bool:
    """True if a directory of this name may hold objects."""
    return len(name) == _DIGEST_DIGITS and _HEX_DIGITS.issuperset(name)


def payload(buffer: memoryview, payload_bytes: int) -> memoryview:
    """The part of an object that is its payload; 64 bytes behind the start of `buffer`."""
    return buffer[HEADER_BYTES : HEADER_BYTES + payload_bytes]


def seal(buffer: memoryview, key: bytes, payload_bytes: int) -> None:
    """Writes the header in front of the payload that is in `buffer`."""
    _HEADER.pack_into(buffer, 0, _MAGIC, FORMAT_VERSION, payload_bytes, key)
    _CHECKSUM.pack_into(buffer, _HEADER.size, _checksum(buffer, payload_bytes))


def check(buffer: memoryview, key: bytes, payload_bytes: int) -> None:
    """Makes sure that `buffer` holds the object of `key`, whole.

    Raises ObjectError, which gives the reason, if it does not.
    """
    magic, version, length, named = _HEADER.unpack_from(buffer)
    (checksum,) = _CHECKSUM.unpack_from(buffer, _HEADER.size)
    if magic != _MAGIC:
        raise ObjectError("it is no KV object")
    if version != FORMAT_VERSION:
        raise ObjectError(f"its format is version {version}, not {FORMAT_VERSION}")
    if length != payload_bytes:
        raise ObjectError(f"its header says {length} bytes of payload, not {payload_bytes}")
    if named != key:
        raise ObjectError(f"it is the object of another key, {named.hex()[:16]}")
    if checksum != _checksum(buffer, payload_bytes):
        raise ObjectError("its checksum is wrong")


def _checksum(buffer: memoryview, payload_bytes: int) -> int:
    """CRC-32C of header and payload. Releases the GIL, since a payload may be megabytes."""
    head = crc32c(buffer[: _HEADER.size])
    return crc32c(payload(buffer, payload_bytes), head, gil_release_mode=_RELEASE_THE_GIL)


def open_directory(root: Path, manifest: Manifest) -> Path:
    """The directory of the objects of `manifest` under `root`; made, with its manifest, if it is not there.

    Raises ConfigError, which gives the reason, if the directory cannot be used.
    """
    directory = root / manifest.digest
    try:
        if root.exists() and not root.is_dir():
            raise ConfigError(f"KV blocks cannot be kept in {root}, which is not a directory.")
        if (root / MANIFEST_NAME).exists():
            above = root.absolute().parent
            raise ConfigError(
                f"{root} is the directory of one model's KV blocks; name the one above it, {above}."
            )
        make_directory(directory, manifest)
        _check_owner(directory)
        found = read_manifest(directory)
        _try_to_write(directory)
    except OSError as error:
        problem = error.strerror or str(error)
        raise ConfigError(f"KV blocks cannot be kept in {root}: {problem}.") from error
    if found is None or found.digest != manifest.digest:
        problem = (
            "cannot be read" if found is None else f"is that of other blocks, of {found.model}"
        )
        raise ConfigError(
            f"{directory / MANIFEST_NAME} {problem}; "
            f"`pagoda kv clear {root}` removes it, or name another directory."
        )
    return directory


def open_in_time(root: Path, manifest: Manifest, *, was_open: bool) -> Path:
    """`open_directory` of a disk that may hang. One that `was_open` before is taken without a look then: what is
    asked of it later has time-outs of its own.

    Raises ConfigError as `open_directory` does, and if a disk hangs that was not open before.
    """
    try:
        return within(OPEN_TIMEOUT_S, lambda: open_directory(root, manifest))
    except TimeoutError:
        problem = f"the disk of {root}, for KV blocks, has not answered for {OPEN_TIMEOUT_S:g} s"
        if not was_open:
            raise ConfigError(f"{problem}; name another directory with --kv-disk-path.") from None
        _log.warning("%s; it is used once it does", problem)
        return root / manifest.digest


def make_directory(directory: Path, manifest: Manifest) -> None:
    """Makes a directory of objects, unless it is there. Objects tell what prompts were, so others keep out.

    Raises OSError if the directory cannot be made.
    """
    directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory.mkdir(mode=0o700, exist_ok=True)
    path = directory / MANIFEST_NAME
    if path.exists():
        return
    temporary = directory / temporary_name()
    try:
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(manifest)) + b"\n")
        temporary.rename(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def read_manifest(directory: Path) -> Manifest | None:
    """Returns the manifest in `directory`; None if it cannot be understood.

    Raises OSError if the manifest cannot be read.
    """
    # Not blocking: somebody may have put a pipe there.
    descriptor = os.open(directory / MANIFEST_NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        content = os.read(descriptor, _MAX_MANIFEST_BYTES)
    finally:
        os.close(descriptor)
    try:
        return msgspec.json.decode(content, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def temporary_name() -> str:
    """A name that no other thread, process or host uses."""
    return f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}"


def _put_aside(path: Path) -> None:
    """Gives what nobody can use another name, under which nobody looks for objects; it may be somebody's."""
    with contextlib.suppress(FileNotFoundError):  # another thread was quicker
        os.rename(path, path.with_name(f"{_ASIDE_PREFIX}{secrets.token_hex(8)}"))


def _check_owner(directory: Path) -> None:
    """Makes sure that nobody else can have put objects there: a checksum tells damage, not forgery.

    Raises ConfigError if somebody else can write there, OSError if the directory cannot be inspected.
    """
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"KV blocks cannot be kept in {directory}, which is not a directory.")
    if found.st_uid != os.geteuid():
        raise ConfigError(
            f"{directory} belongs to another user, who could put anything there; "
            "name a directory of your own."
        )
    if found.st_mode & _WRITABLE_BY_OTHERS:
        raise ConfigError(
            f"{directory} can be written by other users, who could put anything there; "
            f"`chmod 700 {directory}` keeps them out."
        )


def _try_to_write(directory: Path) -> None:
    """Asks the file system rather than its permission bits, which do not know read-only mounts."""
    probe = directory / temporary_name()
    os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    probe.unlink()


# ---- whole objects, read and written


class ObjectFiles:
    """The objects of one directory, all of one size, past the page cache where the file system allows.

    Threads may share it, but not a buffer. Nothing here holds the interpreter while the disk or the checksum is at
    work.

    Raises OSError if the directory cannot be inspected.
    """

    def __init__(self, directory: Path, manifest: Manifest, faults: Faults | None = None) -> None:
        """`faults` are those of this process."""
        faults = faults or Faults(None)
        self._fill = faults.buffers("disk.read", self._read_object)
        self._fill_part = faults.buffers("disk.read", self._read_part)
        self._write = faults.buffers("disk.write", self._write_object)
        self.directory = directory
        self.object_bytes = manifest.object_bytes
        self.payload_bytes = manifest.payload_bytes
        self.manifest = manifest
        self._owner = directory.stat().st_uid
        self.direct = os.O_DIRECT if _supports_direct_io(directory) else 0
        """`O_DIRECT` if objects bypass the page cache; else 0."""

    def new_buffer(self) -> memoryview:
        """Room for one object, aligned for direct I/O."""
        return memoryview(mmap.mmap(-1, self.object_bytes))

    def payload(self, buffer: memoryview) -> memoryview:
        """The payload of the object in `buffer`; 64 bytes behind its start."""
        return payload(buffer, self.payload_bytes)

    def read(self, key: bytes, buffer: memoryview, *, is_use: bool = True) -> None:
        """Fills `buffer` with the object of `key`; notes the time if this is a use of the object.

        Raises ObjectUnreadableError if reading failed and says nothing of the object, ObjectError if the object is
        missing or damaged. `buffer` holds nothing of value in both cases.
        """
        with self._opened(key) as descriptor:
            self._fill(descriptor, buffer)
            check(buffer, key, self.payload_bytes)
            if is_use:
                _note_use(descriptor)

    def read_part(self, key: bytes, first: int, buffer: memoryview) -> None:
        """Fills `buffer` with the object from byte `first` on, both in units of `ALIGNMENT`, and notes the
        time; nothing is checked.

        Raises as `read` does.
        """
        with self._opened(key) as descriptor:
            self._fill_part(descriptor, first, buffer)
            _note_use(descriptor)

    @contextlib.contextmanager
    def _opened(self, key: bytes) -> Iterator[int]:
        # Not blocking: whatever somebody put there under this name, a pipe even, must not make a thread wait.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | self.direct
        try:
            descriptor = os.open(self.directory / object_name(key), flags)
            try:
                yield descriptor
            finally:
                os.close(descriptor)
        except FileNotFoundError as error:
            raise ObjectError("it is not there any more") from error
        except OSError as error:
            kind = ObjectError if error.errno in _NO_FILE else ObjectUnreadableError
            raise kind(error.strerror or str(error)) from error

    def _read_object(self, descriptor: int, buffer: memoryview) -> None:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ObjectError("it is not a file")
        if found.st_uid != self._owner:
            raise ObjectError("it belongs to another user than its directory")
        if found.st_size != self.object_bytes:
            raise ObjectError(f"it has {found.st_size} bytes, not {self.object_bytes}")
        self._move(os.preadv, descriptor, buffer)

    def _read_part(self, descriptor: int, first: int, buffer: memoryview) -> None:
        self._move(os.preadv, descriptor, buffer, first)

    def write(self, key: bytes, buffer: memoryview) -> None:
        """Makes an object of `key` of the payload in `buffer`; replaces one that is there. A directory in its way,
        or a file above, gets another name.

        Raises ObjectError if the object was not written; nothing is left of it.
        """
        seal(buffer, key, self.payload_bytes)
        path = self.directory / object_name(key)
        try:
            try:
                self._write(path, buffer)
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
                if isinstance(error, NotADirectoryError):
                    _put_aside(path.parent)
                elif isinstance(error, IsADirectoryError):
                    _put_aside(path)
                # The first object of its fan-out directory, or somebody removed the directories.
                make_directory(self.directory, self.manifest)
                path.parent.mkdir(mode=0o700, exist_ok=True)
                self._write(path, buffer)
        except OSError as error:
            raise ObjectError(error.strerror or str(error)) from error

    def _write_object(self, path: Path, buffer: memoryview) -> None:
        temporary = path.with_name(temporary_name())
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | self.direct
        descriptor = os.open(temporary, flags, 0o600)
        try:
            try:
                self._move(os.pwritev, descriptor, buffer)
            finally:
                os.close(descriptor)
            os.rename(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def _move(
        self,
        call: Callable[[int, list[memoryview], int], int],
        descriptor: int,
        buffer: memoryview,
        first: int = 0,
    ) -> None:
        """Reads or writes an object from a byte on. Raises ObjectError if the file system makes no progress."""
        done = 0
        while done < len(buffer):
            count = call(descriptor, [buffer[done:]], first + done)
            whole = count - count % ALIGNMENT  # direct I/O continues at a unit only
            if not whole:
                raise ObjectError("the file system took only a part of it")
            done += whole


def _note_use(descriptor: int) -> None:
    if abs(time.time() - os.fstat(descriptor).st_mtime) > _USED_AGAIN_AFTER_S:
        with contextlib.suppress(OSError):  # such as a read-only file system
            os.utime(descriptor)


def _supports_direct_io(directory: Path) -> bool:
    """Tries it: some file systems refuse the flag, some the first write, and some need larger units."""
    probe = directory / temporary_name()
    unit = mmap.mmap(-1, ALIGNMENT)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        descriptor = os.open(probe, flags | os.O_DIRECT, 0o600)
        try:
            return (
                os.pwritev(descriptor, [unit], 0) == ALIGNMENT
                and os.preadv(descriptor, [unit], 0) == ALIGNMENT
            )
        finally:
            os.close(descriptor)
    except OSError:
        return False
    finally:
        unit.close()
        with contextlib.suppress(OSError):
            probe.unlink()


# ---- what lies in directories of objects

FAN_OUTS = tuple(f"{number:02x}" for number in range(256))
_STALE_AFTER_S = 600.0


class FoundFile(NamedTuple):
    """A file in a fan-out directory, or in the one above."""

    path: str
    key: bytes | None
    """None where the name is not that of an object."""
    num_bytes: int
    used_at: float
    """Seconds since 1970."""

    @property
    def is_temporary(self) -> bool:
        return self.key is None and os.path.basename(self.path).startswith(TEMPORARY_PREFIX)

    def is_stale(self, now: float) -> bool:
        """True if the file is so old that no process can still be writing it."""
        return now - self.used_at > _STALE_AFTER_S

    def is_left_over(self, now: float) -> bool:
        """True if a killed writer left the file."""
        return self.is_temporary and self.is_stale(now)


def object_directories(root: str) -> list[str]:
    """The directories of objects under `root`, in the order of their names.

    Raises OSError if `root` cannot be read.
    """
    with os.scandir(root) as entries:
        names = [entry.name for entry in entries if is_digest(entry.name)]
    paths = [os.path.join(root, name) for name in sorted(names)]
    return [path for path in paths if os.path.lexists(os.path.join(path, MANIFEST_NAME))]


def list_files(path: str) -> Iterator[FoundFile]:
    """The plain files in a directory of objects, or in one of its fan-out directories.

    Raises OSError if the directory cannot be read.
    """
    fan_out = os.path.basename(path)
    with os.scandir(path) as entries:
        # In the order in which the disk has them: inodes that lie side by side are read at once.
        in_order = sorted(entries, key=os.DirEntry.inode)
    for entry in in_order:
        try:
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:  # gone since it was listed
            continue
        if stat.S_ISREG(status.st_mode):
            key = parse_name(fan_out, entry.name)
            yield FoundFile(entry.path, key, status.st_size, status.st_mtime)
