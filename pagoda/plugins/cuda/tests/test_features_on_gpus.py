# SPDX-License-Identifier: Apache-2.0
"""Sets of features on the emulated device: answers are those of an engine that does nothing but compute, one
request at a time, in every bit. The interpreter is slow, so that there are few requests of few tokens.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from feature_sets import answers, asked, featured

from tools.features import GPU_SETS

LENGTHS = {"1 0": 4, "1 1": 4, "2 0": 2, "4 0": 2}
"""Tokens of the answers to requests by their ids: two of one prompt, a call and a grammar."""
PROMPT_LENGTH, REPEATED_LENGTH = 4, 12
"""Tokens of a prompt, and of one that repeats itself, for drafters that look for that."""


@pytest.mark.parametrize("number", range(len(GPU_SETS)))
def test_features_on_gpus(number: int, tmp_path: Path) -> None:
    of = featured(GPU_SETS[number], tmp_path, number)
    looks_back = of.speculation.method in ("suffix", "ngram")
    length = REPEATED_LENGTH if looks_back else PROMPT_LENGTH
    requests = [
        msgspec.structs.replace(
            it,
            prompt_token_ids=it.prompt_token_ids[:length],
            work=msgspec.structs.replace(
                it.work,
                sampling=msgspec.structs.replace(
                    it.work.sampling,
                    max_tokens=min(LENGTHS[it.request_id], it.work.sampling.max_tokens or 0),
                ),
            ),
        )
        for it in asked(of)
        if it.request_id in LENGTHS
        and (it.request_id == "1 0" or it.grammar or "n > 1" in of.features)
    ]
    alone, together = of.plain(), of.featured()
    expected = {id_: it for each in requests for id_, it in answers(alone, [each]).items()}
    assert answers(together, requests) == expected
    if of.speculation.method != "off":
        assert together.load().num_draft_tokens > 0
