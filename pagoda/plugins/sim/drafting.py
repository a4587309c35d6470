# SPDX-License-Identifier: Apache-2.0
"""Drafts in the simulated worker: rows behind them, and the proposals of its drafter."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Protocol

from pagoda.messages.engine_config import SimConfig
from pagoda.messages.kv_groups import KVGroup, KVKind


class DraftedSlot(Protocol):
    """A slot of the simulated worker."""

    token_ids: list[int]
    draft: list[int]
    num_computed_tokens: int

    def choose(self, vocab_size: int, mask: bytes | None) -> int:
        """The next token; `mask` says which may be chosen."""


def num_unkept(slot: DraftedSlot, group: KVGroup) -> int:
    """Tokens that a step computes last and of which a group keeps nothing."""
    return len(slot.draft) if group.kind is KVKind.STATE else 0


def say(
    slot: DraftedSlot,
    vocab_size: int,
    masks: Sequence[bytes | None],
    certain: int | None,
    *,
    keeps_states: bool,
) -> list[int]:
    """Appends the next token in place of the drafts, and further ones as long as these are right and there are
    masks. States are not kept behind drafts, also right ones."""
    draft, slot.draft = slot.draft, []
    begin = len(slot.token_ids) - len(draft)
    del slot.token_ids[begin:]
    for guess, mask in zip([*draft, None], masks, strict=False):
        slot.token_ids.append(slot.choose(vocab_size, mask) if certain is None else certain)
        if slot.token_ids[-1] != guess:
            break
    slot.num_computed_tokens = begin if keeps_states else len(slot.token_ids) - 1
    return slot.token_ids[begin:]


def propose(slot: DraftedSlot, config: SimConfig, most: int) -> list[int]:
    """The next tokens of a slot, each with a probability."""
    num_tokens, vocab_size = len(slot.token_ids), config.vocab_size
    for _ in range(most):
        slot.token_ids.append(slot.choose(vocab_size, None))
        hashed = zlib.crc32(b"%d %d" % (len(slot.token_ids), slot.token_ids[-1]))
        if hashed % 1000 >= 1000 * config.proposal_share:
            slot.token_ids[-1] = (slot.token_ids[-1] + 1) % vocab_size
    proposed = slot.token_ids[num_tokens:]
    del slot.token_ids[num_tokens:]
    return proposed
