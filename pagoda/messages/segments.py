# SPDX-License-Identifier: Apache-2.0
"""Segments of a context: tokens between multiples of a number, over which attention is computed by itself.

Attention of a row over one segment gives the highest score, the sum of weights and the weighted values, which are
merged in ascending order of segments. So no bit depends on where a segment lies: in the cache, or outside of it as
a cold segment.
"""

from __future__ import annotations

import msgspec

from pagoda.messages.transfers import HostSlots, TierBlocks

SEGMENT = 4096
"""Tokens of a segment."""
LEAST_SEGMENT = 128
"""Tokens of a segment at least; always a power of two, as the parts are that kernels cut contexts into."""


class ColdSegment(msgspec.Struct, frozen=True, array_like=True):
    """The next segment of a slot that lies outside of the cache, all of it in one place.

    Cold segments are the first ones of a slot, in each KV group for itself. The slot's block table has any valid
    ids for their blocks.
    """

    slot: int
    group: int
    """Number of a KV group of full attention or latents."""
    place: HostSlots | TierBlocks
    """Blocks of the segment in order: its tokens over those of a block of the group."""
