"""A prompt is computed by one engine, its answer goes on at another."""

from __future__ import annotations

from harness import assert_complete, make_request
from pair import Pair

from pagoda.pd.messages import KVBlocks, KVDone, KVPrefilled

PROMPT = [token % 50 for token in range(3, 45)]


def test_the_answer_is_that_of_one_engine() -> None:
    pair = Pair()
    request = make_request("r", PROMPT)
    pair.submit(request)
    pair.run()
    assert_complete(pair.decode.harness, [request])
    assert pair.prefill.harness.tokens["r"] == pair.decode.harness.tokens["r"][:1]
    assert pair.decode.harness.core.load().tiers[0].num_loaded == 10
    assert len(pair.told(KVDone)) == len(pair.told(KVPrefilled)) == 1
    assert len(pair.told(KVBlocks)) == 2, "one for each chunk"
    pair.check_nothing_left()
