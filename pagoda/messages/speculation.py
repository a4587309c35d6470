# SPDX-License-Identifier: Apache-2.0
"""The configuration of speculative decoding, with the keys of vLLM's `--speculative-config`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Method = Literal["auto", "off", "ngram", "suffix", "draft_model", "mtp", "eagle3"]
MAX_DRAFT_TOKENS = 32


class SpeculativeConfig(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Method of drafting and its bounds. No token depends on any of it."""

    method: Method = "auto"
    """`auto` takes what the model brings, then `suffix`."""
    model: str | None = None
    """The drafter's weights, for methods with weights of their own."""
    num_speculative_tokens: Annotated[int, Meta(ge=1, le=MAX_DRAFT_TOKENS)] = 16
    """The most drafts of a request in a step; how many there are is decided step by step."""
    prompt_lookup_min: Annotated[int, Meta(ge=1, le=64)] | None = None
    """Tokens of a match at least (`ngram`)."""
    prompt_lookup_max: Annotated[int, Meta(ge=1, le=64)] | None = None
    """Tokens of a match that are compared (`ngram`)."""
    suffix_decoding_max_tree_depth: Annotated[int, Meta(ge=2, le=64)] = 24
    """Tokens of a match that are compared (`suffix`)."""
    suffix_decoding_max_cached_requests: Annotated[int, Meta(ge=0, le=1_000_000)] = 10_000
    """Recent answers that are kept of a tenant, as far as there is room; 0 for none (`suffix`)."""
    suffix_decoding_max_spec_factor: Annotated[float, Meta(gt=0, le=64)] = 1.0
    """Drafts for each token of a match (`suffix`)."""
    suffix_decoding_min_token_prob: Annotated[float, Meta(ge=0, le=1)] = 0.1
    """Share of the matches that must go on with a draft (`suffix`)."""

    @property
    def drafter(self) -> DrafterConfig | None:
        """The drafter with weights that is asked for by name; None without one."""
        if self.method in ("auto", "off", "ngram", "suffix"):
            return None
        return DrafterConfig(method=self.method, model=self.model or "")


class DrafterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A drafter with weights, which runs in the worker."""

    method: Method
    """One with weights; `auto` is `mtp` where the model brings a head that can run, else none."""
    model: str = ""
    """Name of the files, as `WorkerConfig.model`; empty for those of the model itself."""


OFF = SpeculativeConfig(method="off")
HEAD_IF_ANY = DrafterConfig(method="auto")
