# SPDX-License-Identifier: Apache-2.0
from pagoda.plugins.simulate.records import RequestRecord, Slo, figures, percentile


def test_percentiles_are_nearest_ranks() -> None:
    assert [percentile([1.0, 2.0], share) for share in (0.5, 0.51, 0.99, 1.0)] == [1, 2, 2, 2]
    assert percentile([float(n) for n in range(1, 101)], 0.99) == 99
    assert percentile([], 0.5) is None


def test_requests_that_were_not_sent_have_no_tokens() -> None:
    answered = RequestRecord("a", 0.0, 100, num_output_tokens=10, num_cached_tokens=50, first=1.0)
    answered.ended = 2.0
    too_long = RequestRecord("b", 0.0, 10**9, is_too_long=True)
    found = figures([answered, too_long], 2.0, Slo(ttft=5.0))
    assert (found.prompt_tokens, found.hit_rate, found.completed) == (100, 0.5, 1)
    assert found.goodput == 0.5  # whoever asked got nothing
