# SPDX-License-Identifier: Apache-2.0
"""KV groups: layers that share a block table, and how much of a sequence each kind of layer needs."""

from __future__ import annotations

import enum
import sys
from collections.abc import Sequence
from typing import Annotated

import msgspec

from pagoda.messages.ranges import MAX_ITEMS, Place, Size


class KVKind(enum.StrEnum):
    """Kinds of layers by what they keep of a sequence."""

    FULL = "full"
    """K and V of all tokens."""
    WINDOW = "window"
    """K and V of the last `window` tokens."""
    CHUNK = "chunk"
    """K and V of the tokens from the last multiple of `window` on."""
    LATENT = "latent"
    """One vector of each token, of which all heads make their K and V."""
    STEP = "step"
    """K and V of all tokens while the step runs that computes them; nothing goes on from them (encoders)."""
    STATE = "state"
    """One state of all tokens so far. A block holds the state behind its last computed token, so a full one is a
    snapshot from which another sequence can go on."""


class KVGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that share a block table. Blocks of all groups are equally large and come out of one pool."""

    layers: Annotated[tuple[Place, ...], msgspec.Meta(max_length=MAX_ITEMS)]
    """Layer numbers in the whole model, whatever stage holds them."""
    kind: KVKind = KVKind.FULL
    block_size: Size
    """Tokens of a block; a multiple of that of the smallest group."""
    window: Place = 0
    """Tokens that a token sees, itself included (`window`), or of a chunk (`chunk`); else 0."""
    window_multiple: Size = 1
    """Attention reads from a multiple of this on, somewhat before the window begins."""

    def __post_init__(self) -> None:
        if self.kind in (KVKind.WINDOW, KVKind.CHUNK) and self.window < 1:
            raise ValueError(f"a group of kind {self.kind} has a window of at least 1")

    @property
    def keeps_all(self) -> bool:
        """True if no block is ever behind what later tokens need."""
        return self.kind in (KVKind.FULL, KVKind.LATENT, KVKind.STEP)

    def first_token(self, num_computed_tokens: int) -> int:
        """The first token that attention of the token behind `num_computed_tokens` may read."""
        if self.keeps_all:
            return 0
        if self.kind is KVKind.STATE:
            return max(0, num_computed_tokens - 1)
        if self.kind is KVKind.CHUNK:
            first = num_computed_tokens - num_computed_tokens % self.window
        else:
            first = max(0, num_computed_tokens - self.window + 1)
        return first - first % self.window_multiple

    def first_block(self, num_computed_tokens: int) -> int:
        """The first block that the token behind `num_computed_tokens` needs."""
        return self.first_token(num_computed_tokens) // self.block_size

    def last_use(self, index: int) -> int:
        """The most computed tokens of a sequence behind which the next one needs block `index`."""
        if self.keeps_all:
            return sys.maxsize
        end = (index + 1) * self.block_size
        if self.kind is KVKind.STATE:
            return end
        first = -(-end // self.window_multiple) * self.window_multiple
        if self.kind is KVKind.CHUNK:
            return -(-first // self.window) * self.window - 1
        return first + self.window - 2

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens fill or begin."""
        return -(-num_tokens // self.block_size)

    def most_blocks(self, num_computed_tokens: int, num_tokens: int, run_tokens: int) -> int:
        """The most blocks held at once while a sequence goes on from `num_computed_tokens` to `num_tokens`.

        At most `run_tokens` tokens are under way before the first of them counts as computed.
        """
        first = self.first_block(num_computed_tokens)
        rest = self.num_blocks_for(num_tokens) - first
        if self.keeps_all:
            return rest
        ahead = max(0, min(run_tokens, num_tokens - num_computed_tokens))
        behind = 1 if self.kind is KVKind.STATE else self.window + self.window_multiple - 2
        return max(0, min(rest, -(-(behind + ahead) // self.block_size) + 1))


def full_group(num_layers: int, block_size: int) -> KVGroup:
    """The group of a model whose layers all keep everything, or are to be treated so."""
    return KVGroup(layers=tuple(range(num_layers)), block_size=block_size)


_SNAPSHOT_TOKENS = 64
"""Tokens of a block that holds a state, at least: a prefix may end behind so many."""


def layer_groups(
    layers: Sequence[tuple[KVKind, int] | None], block_size: int, window_multiple: int = 1
) -> tuple[KVGroup, ...]:
    """Groups of layers of these kinds and windows, None of which keep nothing; groups that keep all come first.

    Blocks of states are of more tokens than others, which are of `block_size`.

    Blocks of all groups are equally large, so groups have equally many layers as far as that goes: as many as the
    rarest kind has. A kind that is more frequent makes several groups; where it does not divide, the last places
    of some blocks stay unused. Kinds of almost equal frequency are not divided. (vLLM's hybrid KV cache manager
    chooses alike.)
    """
    kinds: dict[tuple[KVKind, int], list[int]] = {}
    for layer, kind in enumerate(layers):
        if kind is not None:
            kinds.setdefault(kind, []).append(layer)
    counts = [len(alike) for alike in kinds.values()]
    most, least = max(counts), min(counts)
    size = most if 4 * most < 5 * least else least
    groups = [
        KVGroup(
            layers=part,
            kind=kind,
            block_size=-(-_SNAPSHOT_TOKENS // block_size) * block_size
            if kind is KVKind.STATE
            else block_size,
            window=window,
            window_multiple=window_multiple,
        )
        for (kind, window), alike in kinds.items()
        for part in _evenly(alike, -(-len(alike) // size))
    ]
    return tuple(sorted(groups, key=lambda group: not group.keeps_all))


def _evenly(layers: Sequence[int], count: int) -> list[tuple[int, ...]]:
    """Cuts layers into parts that take turns, so that every stage has about as many of each."""
    return [tuple(layers[start::count]) for start in range(count)]
