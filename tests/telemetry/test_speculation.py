# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pagoda.telemetry.speculation import SpeculationCounts


def test_fields_are_those_of_vllm() -> None:
    one, other, whole = SpeculationCounts(), SpeculationCounts(), SpeculationCounts()
    assert whole.fields() is None
    for num_accepted in (0, 3, 3):
        one.count(3, num_accepted)
    other.count(4, 0)
    whole.add(one)
    whole.add(other)
    assert whole.fields() == {
        "mean_acceptance_length": 2.5,
        "draft_acceptance_rate": 6 / 13,
        "acceptance_histogram": {"0": 2, "3": 2},
        "num_spec_steps": 4,
        "num_accepted_draft_tokens": 6,
        "num_draft_tokens": 13,
    }
