# SPDX-License-Identifier: Apache-2.0
"""The engine's part of speculation, made of the configuration."""

from __future__ import annotations

from pagoda.engine.drafting.drafter import Drafter
from pagoda.engine.drafting.matching import MatchingDrafter, MatchRules
from pagoda.engine.drafting.speculator import Speculator
from pagoda.engine.drafting.step_costs import StepCosts
from pagoda.engine.drafting.worker_drafts import WorkerDrafter
from pagoda.messages.speculation import SpeculativeConfig

_DEFAULT_LOOKUP = 5
"""Both bounds of a match, as in vLLM, if neither is given."""


def build_speculator(
    config: SpeculativeConfig, max_proposals: int = 0, *, repeats: bool = False
) -> Speculator | None:
    """None if there is nothing that drafts. `max_proposals` is `WorkerReady.max_proposals`; with `repeats`, drafts
    that were right are computed again."""
    drafter: Drafter
    if config.method == "off":
        return None
    if max_proposals and config.method not in ("suffix", "ngram"):
        drafter = WorkerDrafter(max_proposals)
    else:
        drafter = MatchingDrafter(match_rules(config))
    return Speculator(drafter, config.num_speculative_tokens, StepCosts(repeats=repeats))


def match_rules(config: SpeculativeConfig) -> MatchRules:
    """The rules of `ngram`, or else of `suffix`."""
    if config.method != "ngram":
        return MatchRules(
            least=2,
            longest=config.suffix_decoding_max_tree_depth,
            factor=config.suffix_decoding_max_spec_factor,
            least_share=config.suffix_decoding_min_token_prob,
            num_pooled=config.suffix_decoding_max_cached_requests,
        )
    given = [it for it in (config.prompt_lookup_min, config.prompt_lookup_max) if it is not None]
    least, longest = (given[0], given[-1]) if given else (_DEFAULT_LOOKUP, _DEFAULT_LOOKUP)
    return MatchRules(least, longest, float("inf"), 0.0, num_pooled=0)
