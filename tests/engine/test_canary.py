# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import pytest
from harness import make_scheduler

from pagoda.engine.canary import CANARY_ID, Canary
from pagoda.messages.frontend import Pooling


@pytest.mark.parametrize(
    ("limits", "num_tokens", "pooling"),
    [
        ({}, 1, None),
        ({"gives_logits": False}, 0, Pooling.LAST),
        ({"gives_logits": False, "whole_prompts": True}, 0, Pooling.LAST),
        ({"encodes_text": True, "vocab_size": 9}, 1, None),
        ({"feature_bytes": 64}, 1, None),
    ],
)
def test_a_model_is_asked_for_what_it_gives(
    limits: dict[str, Any], num_tokens: int, pooling: Pooling | None
) -> None:
    scheduler = make_scheduler(**limits)
    Canary(scheduler).send()
    canary = scheduler.requests[CANARY_ID]
    assert (canary.work.sampling.max_tokens, canary.work.pooling) == (num_tokens, pooling)
    plan = scheduler.schedule()
    assert plan is not None
    assert [start.work.pooling for start in plan.starts] == [pooling]


def test_a_refused_canary_is_not_ignored() -> None:
    scheduler = make_scheduler(encodes_text=True)  # a vocabulary without tokens
    with pytest.raises(RuntimeError, match="The canary was refused: Ids of a text"):
        Canary(scheduler).send()
