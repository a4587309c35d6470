# SPDX-License-Identifier: Apache-2.0
"""From the configuration of speculation to the engine's part of it."""

from __future__ import annotations

from pagoda.engine.drafting.matching import MatchingDrafter, MatchRules
from pagoda.engine.drafting.speculator import Speculator
from pagoda.engine.drafting.step_costs import StepCosts
from pagoda.engine.drafting.token_index import MAX_MATCH
from pagoda.engine.drafting.worker_drafts import WorkerDrafts
from pagoda.messages.speculation import SpeculativeConfig

_DEFAULT_LOOKUP = 5
"""Both bounds of a match, as in vLLM, if neither is given."""


def build_speculator(config: SpeculativeConfig) -> Speculator | None:
    """None if there is nothing that drafts."""
    if config.drafter is not None:
        found = WorkerDrafts()
        return Speculator(found, config.num_speculative_tokens, StepCosts(), found)
    if config.method not in ("auto", "suffix", "ngram"):
        return None
    rules = _ngram_rules(config) if config.method == "ngram" else _suffix_rules(config)
    return Speculator(MatchingDrafter(rules), config.num_speculative_tokens, StepCosts())


def _ngram_rules(config: SpeculativeConfig) -> MatchRules:
    given = [it for it in (config.prompt_lookup_min, config.prompt_lookup_max) if it is not None]
    least, longest = (given[0], given[-1]) if given else (_DEFAULT_LOOKUP, _DEFAULT_LOOKUP)
    return MatchRules(least, longest, float("inf"), 0.0, num_pooled=0)


def _suffix_rules(config: SpeculativeConfig) -> MatchRules:
    return MatchRules(
        least=2,
        longest=MAX_MATCH,
        factor=config.suffix_decoding_max_spec_factor,
        least_share=config.suffix_decoding_min_token_prob,
        num_pooled=config.suffix_decoding_max_cached_requests,
    )
