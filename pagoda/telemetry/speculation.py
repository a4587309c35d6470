# SPDX-License-Identifier: Apache-2.0
"""Counts of drafts, of which answers tell their clients."""

from __future__ import annotations

from typing import Any

import msgspec


class SpeculationCounts(msgspec.Struct):
    """Drafts of one answer, or of several."""

    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    steps_by_accepted: dict[int, int] = {}
    """Steps with drafts, by how many of these were right."""

    def count(self, num_drafted: int, num_accepted: int) -> None:
        """A step computed `num_drafted` drafts."""
        self.num_draft_tokens += num_drafted
        self.num_accepted_tokens += num_accepted
        steps = self.steps_by_accepted
        steps[num_accepted] = steps.get(num_accepted, 0) + 1

    def add(self, other: SpeculationCounts) -> None:
        self.num_draft_tokens += other.num_draft_tokens
        self.num_accepted_tokens += other.num_accepted_tokens
        steps = self.steps_by_accepted
        for num_accepted, count in other.steps_by_accepted.items():
            steps[num_accepted] = steps.get(num_accepted, 0) + count

    def fields(self) -> dict[str, Any] | None:
        """The figures by vLLM's names; None if nothing was drafted."""
        num_steps = sum(self.steps_by_accepted.values())
        if not num_steps:
            return None
        return {
            "mean_acceptance_length": 1 + self.num_accepted_tokens / num_steps,
            "draft_acceptance_rate": self.num_accepted_tokens / self.num_draft_tokens,
            "acceptance_histogram": {
                str(num_accepted): count
                for num_accepted, count in sorted(self.steps_by_accepted.items())
            },
            "num_spec_steps": num_steps,
            "num_accepted_draft_tokens": self.num_accepted_tokens,
            "num_draft_tokens": self.num_draft_tokens,
        }
