# SPDX-License-Identifier: Apache-2.0
"""Drafts of a server and how many of them were right, from the counters in its `/metrics`."""

from __future__ import annotations

import re
from typing import NamedTuple

from pagoda.cli.openai_client import OpenAIClient
from pagoda.errors import PagodaError

_COUNTER = re.compile(
    r"^(?:vllm:|pagoda_)spec_decode_num_(drafts|draft_tokens|accepted_tokens)(?:_total)?"
    r"(?:\{[^\n]*\})? ([0-9.e+]+)\s*$",
    re.MULTILINE,
)
"""Series of vLLM and of Pagoda; there is one for each engine."""


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

    A server that says them under both names counts them once."""
    found: dict[tuple[str, str], float] = {}
    for match in _COUNTER.finditer(metrics):
        place = match[0].partition("spec_")[0], match[1]
        found[place] = found.get(place, 0.0) + float(match[2])
    return Drafted(
        *(
            max(found.get((maker, name), 0.0) for maker in ("vllm:", "pagoda_"))
            for name in Drafted._fields
        )
    )


async def drafted_by(client: OpenAIClient) -> Drafted:
    """Drafts of the server so far; none if it shows no metrics."""
    try:
        status, body = await client.post_raw("/metrics", None, "GET")
    except PagodaError:
        return NO_DRAFTS
    return drafted(body.decode(errors="replace")) if status == 200 else NO_DRAFTS
