# SPDX-License-Identifier: Apache-2.0
"""Events of cached blocks, for routers outside of this server.

The structs are the wire format, too: maps whose `type` is the name of the struct, with the fields that vLLM's
subscribers read (`docs/kv-events.md` says what is the same and what differs). `pagoda.plugins.kv_events` sends
them.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence

import msgspec

from pagoda.messages.kv_groups import KVGroup, KVKind


class Medium(enum.StrEnum):
    """Tiers of the core, by the names that vLLM's subscribers know. Those of plugins have names of their own."""

    DEVICE = "GPU"
    """The memory that the worker computes from, whatever the device is."""
    HOST = "CPU"
    """The arena in host memory."""


class BlockStored(msgspec.Struct, frozen=True, tag=True):
    """Blocks that follow each other in one prefix can be found from now on."""

    block_hashes: list[bytes]
    """Keys (`pagoda.kv.block_keys`) of 32 bytes each, in the order of their tokens."""
    parent_block_hash: bytes | None
    """The key of the block in front of the first; None where the prefix begins. It may be gone already."""
    token_ids: list[int]
    """Tokens of all these blocks, `block_size` for each."""
    block_size: int
    lora_id: None = None
    """Subscribers want this field and `lora_name`; adapters would be part of the key."""
    medium: str = Medium.DEVICE
    lora_name: None = None
    group_idx: int = 0
    """KV group of the blocks."""
    kv_cache_spec_kind: str = "full_attention"
    """Kind of the layers of the group, in vLLM's words."""
    kv_cache_spec_sliding_window: int | None = None
    """Tokens that a token sees in a group of layers with a window, itself included."""


class BlockRemoved(msgspec.Struct, frozen=True, tag=True):
    """Blocks were evicted; their keys are in no order."""

    block_hashes: list[bytes]
    medium: str = Medium.DEVICE
    group_idx: int | None = 0
    """KV group of the blocks; None where the key alone is known."""


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    """Nothing is cached any more, in any tier."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared

_SPEC_KINDS = {
    KVKind.FULL: "full_attention",
    KVKind.LATENT: "mla_attention",
    KVKind.WINDOW: "sliding_window",
    KVKind.CHUNK: "chunked_local_attention",
    KVKind.STATE: "mamba",
    KVKind.STEP: "encoder_only_attention",
}
"""Kinds of groups as vLLM's `KVCacheSpecKind` names them."""


class CacheRecorder:
    """Records which blocks are stored and removed: as events in their order, and as the set of changed keys.

    The lists of the last event of a group in a tier grow until events are drained: blocks that follow each other,
    or that are evicted together, are one event. So these events are in their order; which of two groups or tiers
    changed first is not told. Removals without a group are in their order among all events of their tier.
    """

    def __init__(
        self,
        groups: Sequence[KVGroup] = (),
        *,
        keeps_events: bool = True,
        outlives_workers: bool = False,
    ) -> None:
        """One group keeps all where `groups` is empty."""
        self.changed: dict[bytes, None] | None = None
        """Keys of group 0 stored or removed in tiers of the core since a listener put a dict here, in order."""
        self._groups = groups
        self._keeps_events = keeps_events
        self._outlives_workers = outlives_workers
        self._events: list[KVEvent] = []
        self._last: dict[tuple[str, int | None], BlockStored | BlockRemoved] = {}

    def store(
        self,
        key: bytes,
        parent: bytes | None,
        token_ids: Sequence[int],
        medium: str = Medium.DEVICE,
        group: int = 0,
    ) -> None:
        """A block can be found there from now on; `parent` is None for the first of a prefix."""
        self._change(key, medium, group)
        if not self._keeps_events:
            return
        last = self._last.get((medium, group))
        if isinstance(last, BlockStored) and last.block_hashes[-1] == parent:
            last.block_hashes.append(key)
            last.token_ids.extend(token_ids)
            return
        kind, window = KVKind.FULL, 0
        if self._groups:
            kind, window = self._groups[group].kind, self._groups[group].window
        event = BlockStored(
            [key],
            parent,
            list(token_ids),
            len(token_ids),
            medium=medium,
            group_idx=group,
            kv_cache_spec_kind=_SPEC_KINDS[kind],
            kv_cache_spec_sliding_window=window if kind is KVKind.WINDOW else None,
        )
        self._append(medium, group, event)

    def remove(self, key: bytes, medium: str = Medium.DEVICE, group: int | None = 0) -> None:
        """A block can be found there no longer; `group` is None if it is not known."""
        self._change(key, medium, group)
        if not self._keeps_events:
            return
        last = self._last.get((medium, group))
        if isinstance(last, BlockRemoved):
            last.block_hashes.append(key)
            return
        self._append(medium, group, BlockRemoved([key], medium, group))

    def _change(self, key: bytes, medium: str, group: int | None) -> None:
        if self.changed is not None and group == 0 and isinstance(medium, Medium):
            self.changed[key] = None

    def lose(self, blocks: Iterable[tuple[bytes, int]], medium: Medium = Medium.DEVICE) -> None:
        """The workers are gone, and with them all that this tier held: `blocks`, by their keys and groups.

        Where nothing outlives the workers, one event says so for all tiers.
        """
        for key, group in blocks:
            if self._outlives_workers:
                self.remove(key, medium, group)
            else:
                self._change(key, medium, group)
        if self._outlives_workers:
            return
        if self._keeps_events and not (
            self._events and isinstance(self._events[-1], AllBlocksCleared)
        ):
            self._events.append(AllBlocksCleared())
            self._last.clear()

    def drain(self) -> list[KVEvent]:
        """Returns the events since the last call, in order."""
        events, self._events = self._events, []
        self._last.clear()
        return events

    def _append(self, medium: str, group: int | None, event: BlockStored | BlockRemoved) -> None:
        for key in list(self._last):
            if key[0] == medium and None in (group, key[1]):
                del self._last[key]
        self._events.append(event)
        self._last[medium, group] = event
