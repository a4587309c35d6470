# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from pathlib import Path

import pytest

from pagoda.cli.generate import read_batch
from pagoda.errors import ConfigError

GOOD = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}


def _read(tmp_path: Path, *lines: object) -> int:
    path = tmp_path / "batch.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return len(read_batch(path))


def test_lines_are_read_and_blank_ones_skipped(tmp_path: Path) -> None:
    path = tmp_path / "batch.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n\n{json.dumps({**GOOD, 'custom_id': 'b'})}\n")
    assert [request.custom_id for request in read_batch(path)] == ["a", "b"]


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ((), "holds no request"),
        ((GOOD, GOOD), "line 2: custom_id a is used twice"),
        (({**GOOD, "url": 1},), "line 1.*url"),
        (({**GOOD, "method": "GET"},), "line 1.*method"),
        (({**GOOD, "body": "x"},), "line 1.*body"),
        (({**GOOD, "extra": 1},), "line 1.*extra"),
        (({**GOOD, "body": {"stream": True}},), "line 1: a batch request cannot be a stream"),
        (({**GOOD, "body": {"background": True}},), "line 1: .* cannot run in the background"),
        (({"custom_id": "a"},), "line 1.*url"),
    ],
)
def test_what_is_no_request_is_refused(
    lines: tuple[object, ...], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=problem):
        _read(tmp_path, *lines)
