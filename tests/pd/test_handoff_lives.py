"""Hundreds of seeds of two engines between which KV goes; `handoff_lives` says what goes wrong."""

from __future__ import annotations

from collections import Counter

import pytest
from handoff_lives import SEEDS_PER_TEST, Life, live_all

NUM_SEEDS = 300


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, SEEDS_PER_TEST))
def test_seeds(first: int) -> None:
    live_all(first)


FAULTS = (
    "aborted at decode: checking",
    "aborted at decode: in line",
    "aborted at decode: in line, asked for",
    "aborted at decode: loading",
    "aborted at decode: running",
    "aborted at decode: unanswered",
    "aborted at prefill, computed in part",
    "aborted at prefill, queued",
    "complaint: another engine is there now",
    "complaint: another request fetches it already",
    "complaint: it could not be read (it was not to be)",
    "complaint: it does not answer",
    "complaint: it hung up",
    "complaint: it is not held, or not any more",
    "complaint: it is of other tokens than the request's",
    "complaint: no engine with the secret of this one has made it",
    "complaint: its lease has run out",
    "complaint: its request failed or was aborted",
    "complaint: its request was preempted",
    "complaint: nobody is there",
    "complaint: nothing more of it came for 30 s",
    "complaint: the workers that held it were lost",
    "cut",
    "decode engine replaced",
    "decode engine stands still",
    "expired",
    "failed for want of KV",
    "failed reads",
    "KVBlocks dropped",
    "KVCheck late",
    "KVRelease dropped",
    "KVRelease twice",
    "KVPrefilled twice",
    "KVCheckResult late",
    "KVWelcome late",
    "never fetched",
    "preempted at decode",
    "preempted at prefill",
    "prefill engine replaced",
    "silence",
    "slow reads",
    "verdict: invalid",
    "with a source that is of no use",
    "workers lost at decode",
    "workers lost at prefill",
)


def test_the_seeds_meet_every_fault_and_fetch_all_the_same() -> None:
    met: Counter[str] = Counter()
    for seed in range(1000, 1220):
        met += Life(seed).met
    assert [fault for fault in FAULTS if met[fault] < 3] == []
    assert met["requests"] > 1500
    assert met["blocks fetched"] > 2 * met["blocks not fetched"]
