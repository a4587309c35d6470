# SPDX-License-Identifier: Apache-2.0
"""The comparison of policies, with so few requests that it says whether it works and no more."""

from __future__ import annotations

import random

from benchmarks.routing import (
    LOAD,
    capacity,
    heavy_tailed,
    poisson,
    prefix_affinity_figures,
    replica,
    serve,
    shared_prefixes,
)


def test_traffic_is_the_same_for_the_same_seed() -> None:
    assert poisson(heavy_tailed, 1, 20, 5.0) == poisson(heavy_tailed, 1, 20, 5.0)
    assert poisson(heavy_tailed, 1, 20, 5.0) != poisson(heavy_tailed, 2, 20, 5.0)


def test_a_dispatcher_cannot_see_how_long_an_answer_will_be() -> None:
    requests = heavy_tailed(random.Random(1), 50)
    assert len({request.work.sampling.max_tokens for request in requests}) == 1
    prompts = sorted(len(request.prompt_token_ids) for request in requests)
    assert prompts[-1] > 10 * prompts[0]


def test_some_prompts_share_a_long_beginning() -> None:
    requests = shared_prefixes(random.Random(1), 40, groups=4)
    assert len({tuple(request.prompt_token_ids[:500]) for request in requests}) <= 4


def test_least_pending_tokens_shortens_the_tail() -> None:
    engine = replica()
    rate = 8 * LOAD * capacity(heavy_tailed, engine, count=100)
    traffic = poisson(heavy_tailed, 1, 300, rate)
    even = serve(traffic, "round-robin", 8, engine)
    least = serve(traffic, "least-pending-tokens", 8, engine)
    assert least.ttft(0.9) < 0.7 * even.ttft(0.9)
    assert least == serve(traffic, "least-pending-tokens", 8, engine)


def test_prefix_affinity_finds_more_in_the_caches() -> None:
    hits, _ = prefix_affinity_figures([1], num_requests=300)
    assert float(hits.measured.split(": ")[1].split()[0]) > 1.3
