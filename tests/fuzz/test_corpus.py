# SPDX-License-Identifier: Apache-2.0
"""The kept inputs of the fuzzer, seeds and findings: each is refused in a sentence or read, in bounded memory."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from benchmarks.chaos.fuzz.target import Target
from benchmarks.chaos.fuzz.targets import TARGETS

CORPUS = Path(__file__).with_name("corpus")
MAX_CORPUS_BYTES = 2**20
ROOM_BYTES = 256 * 2**20
"""Memory that reading an input may take beside `PER_BYTE` for each byte: texts have up to 16 Mi characters."""
PER_BYTE = 100


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_kept_inputs_are_read_or_refused(target: Target, tmp_path: Path) -> None:
    with target.open(tmp_path) as feed:
        feed(b"")
        paths = sorted((CORPUS / target.name).iterdir())
        assert paths
        for path in paths:
            data = path.read_bytes()
            tracemalloc.start()
            try:
                feed(data)
                peak = tracemalloc.get_traced_memory()[1]
            except Exception as error:
                error.add_note(str(path))
                raise
            finally:
                tracemalloc.stop()
            assert peak <= ROOM_BYTES + PER_BYTE * len(data), path


def test_the_corpus_is_small_and_of_known_targets() -> None:
    assert {path.name for path in CORPUS.iterdir()} == set(TARGETS)
    sizes = [path.stat().st_size for path in CORPUS.rglob("*") if path.is_file()]
    assert sum(sizes) <= MAX_CORPUS_BYTES
