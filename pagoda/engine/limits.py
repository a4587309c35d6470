"""The limits that every step obeys."""

from __future__ import annotations

import msgspec

from pagoda.messages.worker import Capabilities


class SchedulerLimits(msgspec.Struct, frozen=True, kw_only=True):
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    batch_multiple: int = 1
    mixed_steps: bool = True
    num_stages: int = 1

    @classmethod
    def within(
        cls,
        capabilities: Capabilities,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        num_stages: int = 1,
    ) -> SchedulerLimits:
        """The limits asked for, cut to what the backend can do."""
        multiple = capabilities.batch_multiple
        budget = min(max_num_batched_tokens, capabilities.max_batch_tokens)
        return cls(
            max_num_seqs=min(max_num_seqs, capabilities.max_batch_seqs),
            max_num_batched_tokens=max(multiple, budget - budget % multiple),
            max_model_len=min(max_model_len, capabilities.max_model_len),
            batch_multiple=multiple,
            mixed_steps=capabilities.mixed_steps,
            num_stages=num_stages,
        )
