# SPDX-License-Identifier: Apache-2.0
"""Time of a step of the simulated worker."""

from __future__ import annotations

from collections.abc import Mapping

from pagoda.messages.engine_config import SimConfig
from pagoda.messages.worker import StepPlan
from pagoda.plugins.sim.slots import SimSlot


def step_time_s(config: SimConfig, plan: StepPlan, slots: Mapping[int, SimSlot]) -> float:
    """Seconds that a step takes, whose plan has not been applied to `slots`, without those of cold blocks."""
    tokens_s = config.per_token_s * sum(plan.num_tokens)
    cost = config.base_s + max(config.floor_s, tokens_s) + config.per_sequence_s * len(plan.slots)
    if config.per_context_token_s or config.per_pair_s:
        begun = {start.slot: start.num_computed_tokens for start in plan.starts}
        for slot, count in zip(plan.slots, plan.num_tokens, strict=True):
            context = begun[slot] if slot in begun else slots[slot].num_computed_tokens
            cost += config.per_context_token_s * context
            if count > 1:
                cost += config.per_pair_s * count * (context + count / 2)
    return cost
