# SPDX-License-Identifier: Apache-2.0
"""Sets of features that are asked for at once: answers are those of an engine that does nothing but compute, one
request at a time, in every bit of tokens, log-probabilities and vectors.

Each pair of features that is not refused stands in one of the sets; docs/combinations.md names it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from feature_sets import answers, asked, featured

from tools.features import SETS


@pytest.mark.parametrize("number", range(len(SETS)))
def test_features_together(number: int, tmp_path: Path) -> None:
    of = featured(SETS[number], tmp_path, number)
    requests, alone, together = asked(of), of.plain(), of.featured()
    expected = {id_: it for each in requests for id_, it in answers(alone, [each]).items()}
    for _ in range(2 if "prefix cache" in SETS[number] else 1):
        assert answers(together, requests) == expected
    load = together.load()
    if of.speculation.method != "off":
        assert load.num_draft_tokens > 0
    if {"prefix cache"} <= set(SETS[number]) and "encoders" not in SETS[number]:
        assert load.num_prefix_hit_tokens > 0
