# SPDX-License-Identifier: Apache-2.0
"""Fuzzes one target for some seconds, within bounds of memory and time.

`python -m benchmarks.chaos.fuzz.child TARGET DIR --corpus CORPUS --seconds N [--kernels KERNELS]`

DIR/findings keeps an input for each kind of failure, with its traceback beside it; DIR/inputs keeps inputs that
reached something new; DIR/last is the input that was read when the process ended. With atheris, changes follow
coverage; without it they are blind, as with kernels that check every access, whose library hides coverage.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import logging
import os
import random
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.chaos.fuzz.forms import mutator
from benchmarks.chaos.fuzz.kernels import load_kernels
from benchmarks.chaos.fuzz.target import Target, corpus_of

HEADROOM_BYTES = 512 * 2**20
"""Memory that a process may take beyond what it has before the first input, which is at most 64 KiB."""
INPUT_S = 10
"""Seconds that an input may take."""
MAX_INPUT_BYTES = 65_536


class Findings:
    """Failures by their kind: the class of the exception and the last line of Pagoda's code it came through."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.kinds: dict[str, str] = {}

    def add(self, data: bytes, error: BaseException) -> None:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if "/pagoda/" in f.filename]
        place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "outside"
        kind = f"{type(error).__name__} at {place}"
        if kind in self.kinds:
            return
        self.kinds[kind] = str(error)[:200]
        name = hashlib.sha256(kind.encode()).hexdigest()[:12]
        (self._directory / f"{name}.input").write_bytes(data)
        text = "".join(traceback.format_exception(error))
        (self._directory / f"{name}.txt").write_text(f"{kind}\n{text}", encoding="utf-8")


def limit_memory(reserved_bytes: int) -> None:
    """Lets this process have `HEADROOM_BYTES` and what threads reserve more address space than it has now."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    most = pages * os.sysconf("SC_PAGE_SIZE") + HEADROOM_BYTES + reserved_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def guarded(
    feed: Callable[[bytes], object], findings: Findings, last: Path | None = None
) -> Callable[[bytes], None]:
    """`feed`, whose failures are kept instead of ending the process. What it reads is in the file `last`."""

    def feed_one(data: bytes) -> None:
        if last is not None:
            last.write_bytes(data)
        try:
            feed(bytes(data))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # what Rust code panics with is no Exception
            findings.add(bytes(data), error)

    return feed_one


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument(
        "room", type=Path, help="an empty directory, which keeps inputs and findings"
    )
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--seconds", type=int, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kernels", type=Path, help="directory of kernels that check every access")
    options = parser.parse_args()
    logging.disable()
    places = [options.room / name for name in ("files", "inputs", "findings")]
    for place in places:
        place.mkdir(exist_ok=True)
    if options.kernels is not None:
        load_kernels(options.kernels)
        _without_coverage(options)
        return
    try:
        import atheris
    except ImportError:
        _without_coverage(options)
    else:
        _with_coverage(atheris, options)


class SourceFinder(MetaPathFinder):
    """Finds modules of pagoda as their source files, which alone atheris instruments: the loader of an editable
    installation is another one."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module as a finder behind this one has it, loaded from its source if it has any."""
        if fullname.partition(".")[0] != "pagoda":
            return None
        others = sys.meta_path[sys.meta_path.index(self) + 1 :]
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            return spec
        places = spec.submodule_search_locations
        return spec_from_file_location(fullname, spec.origin, submodule_search_locations=places)


def _with_coverage(atheris: Any, options: argparse.Namespace) -> None:
    with atheris.instrument_imports(include=["pagoda"], enable_loader_override=False):
        sys.meta_path.insert(1, SourceFinder())  # behind the finder of atheris
        target = _target(options.target)
    room: Path = options.room
    words = room / "words"
    words.write_text("".join(map(_entry, target.words)), encoding="utf-8")
    with target.open(room / "files") as feed:
        feed(b"")  # what is made once is made before memory is bounded
        limit_memory(target.reserved_bytes)
        most_mb = (
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024 + HEADROOM_BYTES // 2**20
        )
        arguments = [
            *("fuzz", f"-max_total_time={options.seconds}", f"-timeout={INPUT_S}"),
            *(f"-max_len={MAX_INPUT_BYTES}", f"-rss_limit_mb={most_mb}", f"-seed={options.seed}"),
            *(f"-artifact_prefix={room}/findings/", "-print_final_stats=1"),
            *([f"-dict={words}"] if target.words else []),
            *(str(room / "inputs"), str(options.corpus / target.name)),
        ]
        fed = guarded(feed, Findings(room / "findings"), room / "last")
        if target.form is None:
            atheris.Setup(arguments, fed)
        else:
            atheris.Setup(arguments, fed, custom_mutator=mutator(target.form))
        atheris.Fuzz()


def _without_coverage(options: argparse.Namespace) -> None:
    target, rng = _target(options.target), random.Random(options.seed)
    found = [path.read_bytes() for path in sorted((options.room / "inputs").iterdir())]
    inputs = [*corpus_of(target.name, options.corpus), *found] or [b""]
    mutate = mutator(target.form)
    deadline, runs = time.monotonic() + options.seconds, 0
    with target.open(options.room / "files") as feed:
        feed(b"")
        if options.kernels is None:
            limit_memory(target.reserved_bytes)
        feed_one = guarded(feed, Findings(options.room / "findings"), options.room / "last")
        while time.monotonic() < deadline:
            data = mutate(rng.choice(inputs), MAX_INPUT_BYTES, rng.getrandbits(63))
            signal.alarm(INPUT_S)  # ends the process: an input that hangs is a finding
            feed_one(data)
            runs += 1
    signal.alarm(0)
    print(f"Done {runs} runs", file=sys.stderr)


def _target(name: str) -> Target:
    """Imported late, since what is fuzzed is imported with instruments; and no more of it than is needed."""
    for module in ("files", "native", "sockets", "frames"):
        found = importlib.import_module(f"benchmarks.chaos.fuzz.{module}")
        targets: tuple[Target, ...] = getattr(found, module.upper())
        for target in targets:
            if target.name == name:
                return target
    raise ValueError(f"there is no target {name}")


def _entry(word: str) -> str:
    """A line of libFuzzer's dictionaries."""
    return '"' + "".join(f"\\x{byte:02X}" for byte in word.encode()) + '"\n'


if __name__ == "__main__":
    main()
