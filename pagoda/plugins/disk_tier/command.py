# SPDX-License-Identifier: Apache-2.0
"""`pagoda kv`: looks into a directory of KV blocks, checks it, empties it; also while servers use it."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from pagoda.cli import output
from pagoda.cli.options import GeneralOptions
from pagoda.cli.progress import progress
from pagoda.errors import ConfigError
from pagoda.ipc.machine import format_bytes
from pagoda.plugins.disk_tier.objects import (
    FAN_OUTS,
    MANIFEST_NAME,
    FoundFile,
    Manifest,
    ObjectError,
    ObjectFiles,
    is_digest,
    list_files,
    object_directories,
    read_manifest,
)

_SHOWN_DIGITS = 8
"""Digits of a model's directory name in the table."""
_EXIT_FAILED = 1

Root = Annotated[Path, Parameter(name="DIR")]
Flag = Annotated[bool, Parameter(negative=())]


class _ModelDirectory:
    """The directory of one model's blocks, and what is in it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.digest = os.path.basename(path)
        self.manifest = read_manifest(Path(path))
        """None if it cannot be understood."""
        self.model = "unknown" if self.manifest is None else self.manifest.model
        self.num_blocks = 0
        self.num_bytes = 0
        self.num_left_over = 0
        """Files that a killed writer left."""
        self.used_at: float | None = None
        """Time of the last use of a block; None without blocks."""

    def parts(self) -> Iterator[Sequence[FoundFile]]:
        """The files in the directory itself, then those in each fan-out directory."""
        for name in ("", *FAN_OUTS):
            try:
                yield list(list_files(os.path.join(self.path, name) if name else self.path))
            except FileNotFoundError:
                yield ()

    def files(self) -> Iterator[FoundFile]:
        for part in self.parts():
            yield from part

    def count(self, found: FoundFile) -> None:
        if found.key is not None:
            self.num_blocks += 1
            self.num_bytes += found.num_bytes
            self.used_at = max(self.used_at or 0.0, found.used_at)
        elif found.is_left_over(time.time()):
            self.num_left_over += 1


def ls(root: Root, /, *, general: GeneralOptions = GeneralOptions()) -> int:
    """List the models whose KV blocks are in a directory, and what they take.

    Args:
        root: The directory given to a server as --kv-disk-path.
    """
    general.apply()
    directories = _look_into(root)
    console = output.stdout()
    head = ("model", "directory", "weights", "KV", "rank", "block", "blocks", "size", "last used")
    console.print(output.table(str(root), head, [_row(it) for it in directories]))
    console.print(_total(directories) + ".")
    return 0


def verify(
    root: Root, /, *, remove: Flag = False, general: GeneralOptions = GeneralOptions()
) -> int:
    """Read every KV block in a directory, and name those that are damaged.

    The exit code is 1 if there is any. Servers never use a damaged block: they remove it and compute it again.

    Args:
        root: The directory given to a server as --kv-disk-path.
        remove: Remove damaged blocks.
    """
    general.apply()
    directories = _look_into(root)
    console = output.stdout()
    num_checked = num_damaged = 0
    total = sum(it.num_blocks for it in directories if it.manifest is not None)
    with _failures_in_a_sentence(), progress("Checking", total) as advance:
        for found, problem in _check(directories, advance):
            num_checked += 1
            if problem is not None:
                num_damaged += 1
                console.print(f"{found.path}: {problem}", soft_wrap=True)
                if remove:
                    Path(found.path).unlink(missing_ok=True)
    unknown = [it.path for it in directories if it.manifest is None]
    for path in unknown:
        console.print(f"{path}: its manifest cannot be understood; not checked", soft_wrap=True)
    removed = " and removed" if remove and num_damaged else ""
    console.print(
        f"{_count_of(num_checked, 'block')} checked, {num_damaged or 'none'} damaged{removed}."
    )
    return _EXIT_FAILED if num_damaged or unknown else 0


def clear(
    root: Root,
    /,
    *,
    model: str | None = None,
    yes: Annotated[bool, Parameter(name=["--yes", "-y"], negative=())] = False,
    general: GeneralOptions = GeneralOptions(),
) -> int:
    """Remove the KV blocks in a directory. Servers that use it go on, and compute again what they need.

    Args:
        root: The directory given to a server as --kv-disk-path.
        model: Remove the blocks of one model only: its name, or the beginning of its directory's name.
        yes: Do not ask.
    """
    general.apply()
    directories = [it for it in _look_into(root) if _is_meant(it, model)]
    if not directories:
        raise ConfigError(
            f"{root} holds no KV blocks of a model {model}; `pagoda kv ls` shows them."
        )
    if not yes and not _agreed(f"Remove {_total(directories)} from {root}?"):
        output.stderr().print("Nothing was removed.")
        return _EXIT_FAILED
    num_removed = 0
    total = sum(it.num_blocks + it.num_left_over for it in directories)
    with _failures_in_a_sentence(), progress("Removing", total) as advance:
        for directory in directories:
            for found in directory.files():
                if found.key is not None or found.is_left_over(time.time()):
                    Path(found.path).unlink(missing_ok=True)
                    num_removed += found.key is not None
                    advance()
            _remove_empty(directory.path)
    output.stdout().print(f"{_count_of(num_removed, 'block')} removed.")
    for directory in directories:
        if os.path.isdir(directory.path):
            sentence = (
                f"{directory.path} is still there: a server, or somebody else, keeps files in it."
            )
            output.stderr().print(sentence, soft_wrap=True)
    return 0


# ---- what is there


def _look_into(root: Path) -> list[_ModelDirectory]:
    """All directories of blocks under `root`, with what is in them.

    Raises ConfigError if there is no such directory or it cannot be read.
    """
    if is_digest(root.name) and (root / MANIFEST_NAME).exists():
        above = root.absolute().parent
        raise ConfigError(f"{root} is the directory of one model; name the one above it, {above}.")
    if not root.is_dir():
        raise ConfigError(f"{root} is no directory.")
    with _failures_in_a_sentence():
        directories = [_ModelDirectory(path) for path in object_directories(str(root))]
        if not directories:
            raise ConfigError(
                f"{root} holds no KV blocks: no directory in it has a {MANIFEST_NAME}."
            )
        with progress("Counting", len(directories) * (1 + len(FAN_OUTS))) as advance:
            for directory in directories:
                for files in directory.parts():
                    for found in files:
                        directory.count(found)
                    advance()
    return directories


def _row(directory: _ModelDirectory) -> tuple[str, ...]:
    manifest = directory.manifest
    described = ("-",) * 4 if manifest is None else _describe(manifest)
    return (
        directory.model,
        directory.digest[:_SHOWN_DIGITS],
        *described,
        f"{directory.num_blocks:,}",
        format_bytes(directory.num_bytes),
        _shortly(directory.used_at),
    )


def _shortly(used_at: float | None) -> str:
    """The time if that is today, else the day."""
    if used_at is None:
        return "never"
    moment = datetime.fromtimestamp(used_at)
    is_today = moment.date() == datetime.now().date()
    return f"{moment:%H:%M}" if is_today else f"{moment:%Y-%m-%d}"


def _describe(manifest: Manifest) -> tuple[str, str, str, str]:
    """Weights, KV, rank and block size."""
    weights = manifest.dtype if manifest.quantization == "none" else manifest.quantization
    ranks = []
    if manifest.tensor_parallel_size > 1:
        ranks.append(f"tp {manifest.tensor_parallel_rank}/{manifest.tensor_parallel_size}")
    if manifest.pipeline_parallel_size > 1:
        ranks.append(f"pp {manifest.stage}/{manifest.pipeline_parallel_size}")
    return weights, manifest.kv_dtype, ", ".join(ranks) or "-", str(manifest.block_size)


def _total(directories: Sequence[_ModelDirectory]) -> str:
    num_blocks = sum(it.num_blocks for it in directories)
    num_bytes = sum(it.num_bytes for it in directories)
    num_left_over = sum(it.num_left_over for it in directories)
    total = f"{_count_of(num_blocks, 'block')} ({format_bytes(num_bytes)})"
    if num_left_over:
        total += f" and {_count_of(num_left_over, 'file')} of killed writers"
    return total


def _count_of(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


# ---- checking


def _check(
    directories: Sequence[_ModelDirectory], advance: Callable[[], None]
) -> Iterator[tuple[FoundFile, str | None]]:
    """Each block, and what is wrong with it. One that has been removed meanwhile is none."""
    for directory in directories:
        if directory.manifest is None:
            continue
        files = ObjectFiles(Path(directory.path), directory.manifest)
        buffer = files.new_buffer()
        for found in directory.files():
            if found.key is None:
                continue
            try:
                files.read(found.key, buffer, is_use=False)
                yield found, None
            except ObjectError as error:
                if os.path.lexists(found.path):
                    yield found, str(error)
            advance()


# ---- removing


def _is_meant(directory: _ModelDirectory, model: str | None) -> bool:
    if model is None:
        return True
    return directory.model == model or (bool(model) and directory.digest.startswith(model))


def _agreed(question: str) -> bool:
    """Asks a person. Raises ConfigError if standard input is not a terminal."""
    if not sys.stdin.isatty():
        raise ConfigError(
            "Nobody can confirm, as standard input is no terminal; --yes removes blocks without asking."
        )
    try:
        answer = output.stderr().input(f"{question} [y/N] ", markup=False)
    except EOFError:
        return False
    return answer.strip().lower() in ("y", "yes")


def _remove_empty(path: str) -> None:
    """Removes what is empty now: fan-out directories, and with the last of them the model's own."""
    for fan_out in FAN_OUTS:
        with contextlib.suppress(OSError):
            os.rmdir(os.path.join(path, fan_out))
    if os.listdir(path) != [MANIFEST_NAME]:
        return
    manifest = Path(path, MANIFEST_NAME)
    content = manifest.read_bytes()
    manifest.unlink()
    try:
        os.rmdir(path)
    except OSError:  # a server has just written a block
        manifest.write_bytes(content)


@contextlib.contextmanager
def _failures_in_a_sentence() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror or error}.") from error
