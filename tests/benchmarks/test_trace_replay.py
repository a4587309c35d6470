# SPDX-License-Identifier: Apache-2.0
"""A trace becomes requests that share what the trace's do, and hosts find that cached."""

from __future__ import annotations

from pathlib import Path

from benchmarks.routing import serve
from benchmarks.trace_replay import BLOCK_SIZE, as_traffic, host, read_trace

LINES = """\
{"timestamp": 1000, "input_length": 1100, "output_length": 3, "hash_ids": [0, 1, 2]}
{"timestamp": 5000, "input_length": 1500, "output_length": 2, "hash_ids": [0, 1, 3]}
{"timestamp": 9000, "input_length": 600, "output_length": 0, "hash_ids": [4, 5]}
{"timestamp": 9500, "input_length": 10, "output_length": 1, "hash_ids": [6]}
"""


def test_a_trace_is_replayed(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(LINES)
    traffic = list(as_traffic(read_trace(path, 3), speed=2.0))
    assert [timed.at for timed in traffic] == [0.0, 2.0, 4.0]
    assert read_trace(path, 5, skip=2) == read_trace(path, 4)[2:]
    first, second, third = (timed.request for timed in traffic)
    assert len(first.prompt_token_ids) == 1100
    shared = 2 * BLOCK_SIZE
    assert first.prompt_token_ids[:shared] == second.prompt_token_ids[:shared]
    assert first.prompt_token_ids[shared:] != second.prompt_token_ids[shared:1100]
    assert third.prompt_token_ids[:10] != first.prompt_token_ids[:10]
    outcome = serve(traffic, "prefix-affinity", 2, host(300))
    assert outcome.hit_rate == shared / (1100 + 1500 + 600)
    assert len(outcome.ttfts) == 3
