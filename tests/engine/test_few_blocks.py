# SPDX-License-Identifier: Apache-2.0
"""More is asked for than there are blocks."""

from __future__ import annotations

from harness import Harness, assert_complete, make_request


def test_blocks_for_the_rest_of_a_running_prompt_go_to_nobody_else() -> None:
    harness = Harness(num_blocks=16, prefix_caching=False)
    requests = [make_request(f"r{i}", [i] * 40, max_tokens=2) for i in range(3)]
    harness.serve(*requests)
    assert harness.scheduler.counters.num_preemptions == 0
    assert_complete(harness, requests)


def test_when_blocks_run_out_the_latest_is_preempted_and_keeps_its_tokens() -> None:
    harness = Harness(num_blocks=16, max_num_seqs=8, prefix_caching=False)
    requests = [make_request(f"r{i}", [i] * 4, max_tokens=40) for i in range(4)]
    harness.serve(*requests)
    assert harness.scheduler.counters.num_preemptions > 0
    assert next(iter(harness.finished)) == "r0"
    assert_complete(harness, requests)
