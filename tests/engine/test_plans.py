# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from harness import make_request, make_scheduler

from pagoda.messages.encoder_input import encoder_input
from pagoda.messages.worker import SlotStart, StepResult


def test_one_audio_begins_in_a_step_and_shares_no_blocks_with_another() -> None:
    scheduler = make_scheduler(feature_bytes=4)
    heard = [encoder_input(bytes([seed] * 4)) for seed in (1, 2, 1)]
    prompt = list(range(9))
    for name, audio in zip("abc", heard, strict=True):
        scheduler.add(make_request(name, prompt, max_tokens=2, encoder_input=audio))
    starts: list[SlotStart] = []
    for _ in range(5):
        plan = scheduler.schedule()
        assert plan is not None
        assert len(plan.starts) <= 1
        starts += plan.starts
        scheduler.update(StepResult(plan.step, plan.slots, [[7]] * len(plan.slots)))
        if len(starts) == 3:
            break
    assert [start.work.encoder_input for start in starts] == heard
    # The last one's audio is that of the first, whose blocks it finds.
    assert [start.num_computed_tokens for start in starts] == [0, 0, 8]
