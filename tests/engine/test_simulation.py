"""A thousand seeds: random arrivals, aborts, lost workers and tiny caches, in virtual time.

Every seed is a whole life of an engine. Answers are compared with what the simulated model says without any
engine, the simulated worker refuses to read KV that is not the sequence's own, and in the end nothing is left.
A failing seed is reproduced by its number alone.
"""

from __future__ import annotations

import random

import pytest
from harness import Harness, expected_tokens
from mortal_executor import POISON, MortalExecutor, random_request

from pagoda.messages.frontend import FinishReason, GenerateRequest

NUM_SEEDS = 1000
NUM_SEEDS_WITH_STAGES = 300
SEEDS_PER_TEST = 50


def live(seed: int, num_stages: int = 1) -> Harness:
    rng = random.Random(seed)
    max_model_len = rng.choice([24, 48, 64])
    block_size = rng.choice([1, 4, 8])
    needed = -(-max_model_len // block_size)
    death_rate = rng.choice([0.0, 0.0, 2.0])
    harness = Harness(
        num_blocks=needed + rng.randint(0, 2 * needed),
        block_size=block_size,
        max_model_len=max_model_len,
        max_num_seqs=rng.choice([1, 2, 8]),
        max_num_batched_tokens=rng.choice([7, 16, 64]),
        prefix_caching=rng.random() < 0.8,
        num_stages=num_stages,
        wrap=lambda inner, clock: MortalExecutor(inner, clock, rng, death_rate),
    )
    requests: dict[str, GenerateRequest] = {}
    aborted: set[str] = set()
    for index in range(rng.randint(1, 16)):
        request = random_request(rng, index, max_model_len)
        requests[request.request_id] = request
        harness.add(request)
        for _ in range(rng.choice([0, 1, 1, 3])):
            harness.tick()
        if rng.random() < 0.15:
            victim = rng.choice(list(requests))
            if victim not in harness.finished:
                harness.core.abort(victim)
                aborted.add(victim)
        harness.scheduler.kv.pool.check()
        for running in harness.scheduler.requests.values():
            assert 0 <= running.num_computed_tokens <= running.num_tokens <= max_model_len
    harness.run()
    for request_id, request in requests.items():
        whole = expected_tokens(request, max_model_len)
        if request_id in aborted:
            assert harness.tokens[request_id] == whole[: len(harness.tokens[request_id])]
            assert request_id not in harness.finished
            continue
        last = harness.finished[request_id]
        if POISON in request.prompt_token_ids:
            assert last.finish_reason is FinishReason.ERROR
            assert harness.tokens[request_id] == []
        elif last.finish_reason is FinishReason.ERROR:  # so many deaths happened to hit it alone
            assert death_rate
            assert "worker died" in (last.error or "")
            assert harness.tokens[request_id] == whole[: len(harness.tokens[request_id])]
        else:
            assert harness.tokens[request_id] == whole
    harness.check_nothing_left()
    return harness


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, SEEDS_PER_TEST))
def test_seeds(first: int) -> None:
    for seed in range(first, first + SEEDS_PER_TEST):
        try:
            live(seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("first", range(0, NUM_SEEDS_WITH_STAGES, SEEDS_PER_TEST))
def test_seeds_with_stages(first: int, num_stages: int) -> None:
    for seed in range(first, first + SEEDS_PER_TEST):
        try:
            live(seed, num_stages)
        except Exception as error:
            raise AssertionError(f"seed {seed}, {num_stages} stages: {error}") from error


def test_the_same_seed_is_the_same_life() -> None:
    first, second = live(17), live(17)
    assert first.tokens == second.tokens
    assert first.clock.now() == second.clock.now()


def test_the_seeds_meet_preemption_prefix_hits_and_lost_workers() -> None:
    lives = [live(seed) for seed in range(40)]
    assert sum(h.scheduler.counters.num_preemptions for h in lives) > 0
    assert sum(h.scheduler.counters.num_prefix_hit_tokens for h in lives) > 0
    assert sum(h.core.load().num_worker_restarts for h in lives) > 0
    errors = [chunk.error for h in lives for chunk in h.finished.values() if chunk.error]
    assert errors
