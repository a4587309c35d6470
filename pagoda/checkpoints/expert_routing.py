# SPDX-License-Identifier: Apache-2.0
"""Choice of the experts that a token goes through; no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ExpertRouting:
    """Rule by which a token's experts are chosen and weighed.

    DeepSeek-V3 and GLM-4.5 score by sigmoids, choose by corrected scores within groups, renormalize and scale;
    DeepSeek-V2 does by softmax, within groups by their best expert. A softmax over the chosen experts alone
    (gpt-oss, Granite) is that over all of them, renormalized.
    """

    num_experts: int
    experts_per_token: int
    renormalize: bool
    """The scores of a token's experts are scaled to add up to one (`norm_topk_prob`)."""
    scores: Literal["softmax", "sigmoid", "given"] = "softmax"
    """Scores of logits: softmax over all experts, or a sigmoid of each (`scoring_func`), or the logits themselves,
    where another operation has made weights of them."""
    num_groups: int = 1
    """Groups of equally many experts, one behind the other (`n_group`)."""
    groups_per_token: int = 1
    """Groups that a token's experts are chosen from (`topk_group`)."""
    group_score: Literal["best", "best_two"] = "best"
    """A group is as good as its best expert (DeepSeek-V2), or as the sum of its two best (DeepSeek-V3)."""
    scaling_factor: float = 1.0
    """Factor of all weights (`routed_scaling_factor`)."""
    weighs_inputs: bool = False
    """Weights are for what experts are given instead of for what they give (Llama 4)."""

    def __post_init__(self) -> None:
        """Raises ValueError: experts or groups are no choice."""
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise ValueError(
                f"{self.experts_per_token} of {self.num_experts} experts are no choice."
            )
        size, rest = divmod(self.num_experts, self.num_groups)
        if rest or not 1 <= self.groups_per_token <= self.num_groups:
            raise ValueError(
                f"{self.groups_per_token} of {self.num_groups} groups of {self.num_experts} experts "
                f"are no choice."
            )
        if self.group_score == "best_two" and self.num_groups > 1 and size < 2:
            raise ValueError("Groups that count by their two best experts have at least two.")
        if self.groups_per_token * size < self.experts_per_token:
            raise ValueError(
                f"{self.groups_per_token} groups of {size} experts do not have {self.experts_per_token}."
            )
