# SPDX-License-Identifier: Apache-2.0
"""Drafts of a server and how many of them were right, from the counters in its `/metrics`."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from pagoda.cli.openai_client import OpenAIClient
from pagoda.errors import PagodaError

_MAKERS = ("vllm:", "pagoda_")
"""Beginnings of the names of series of vLLM and of Pagoda; there is one series for each engine."""


class Drafted(NamedTuple):
    """Counts since the start of a server, or of one run."""

    drafts: float = 0.0
    draft_tokens: float = 0.0
    accepted_tokens: float = 0.0

    def since(self, before: Drafted) -> Drafted:
        return Drafted(*(now - then for now, then in zip(self, before, strict=True)))

    @property
    def acceptance(self) -> float | None:
        """The share of drafts that were right; None without drafts."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens > 0 else None

    @property
    def length(self) -> float | None:
        """Tokens of a step with drafts, the one behind them included; None without drafts."""
        return 1 + self.accepted_tokens / self.drafts if self.drafts > 0 else None


NO_DRAFTS = Drafted()


def drafted(metrics: str) -> Drafted:
    """Sums of the counters in a text of `/metrics`; all 0 where there are none.

    A server that says them under both names counts them once. Raises ValueError: it is no such text."""
    found = defaultdict[str, float](float)
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            found[sample.name.removesuffix("_total")] += sample.value
    return Drafted(
        *(
            max(found[f"{maker}spec_decode_num_{name}"] for maker in _MAKERS)
            for name in Drafted._fields
        )
    )


async def drafted_by(client: OpenAIClient) -> Drafted:
    """Drafts of the server so far; none if it shows no metrics."""
    try:
        status, body = await client.post_raw("/metrics", None, "GET")
        return drafted(body.decode(errors="replace")) if status == 200 else NO_DRAFTS
    except (PagodaError, ValueError):
        return NO_DRAFTS
