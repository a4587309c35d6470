"""What happens to cached blocks, for those who route requests to them from outside.

The structs are the wire format too: maps whose `type` is the name of the struct, with the fields that vLLM's
subscribers read (`docs/kv-events.md` says what is the same and what differs). Nothing here knows how they are
sent.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

DEVICE_MEDIUM = "GPU"
"""The tier that the worker computes from. vLLM's subscribers know it by this name, whatever the device is."""


class BlockStored(msgspec.Struct, frozen=True, tag=True):
    """Blocks that follow each other in one prefix can be found from now on."""

    block_hashes: list[bytes]
    """Their keys (`pagoda.kv.block_keys`), 32 bytes each, in the order of their tokens."""
    parent_block_hash: bytes | None
    """The key of the block in front of the first; None where the prefix begins. It may be gone already."""
    token_ids: list[int]
    """Of all these blocks, `block_size` for each."""
    block_size: int
    lora_id: None = None
    """Subscribers want this field and `lora_name`; adapters would be part of the key."""
    medium: str = DEVICE_MEDIUM
    lora_name: None = None


class BlockRemoved(msgspec.Struct, frozen=True, tag=True):
    """Blocks were evicted; their keys are in no order."""

    block_hashes: list[bytes]
    medium: str = DEVICE_MEDIUM


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    """Nothing is cached any more, in any tier."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, frozen=True, array_like=True):
    """The events of one engine step, in their order."""

    ts: float
    """Seconds since 1970."""
    events: list[KVEvent]
    data_parallel_rank: int


class KVEventRecorder:
    """Collects events until somebody takes them.

    The lists of the last one grow until then: blocks that follow each other, or that are evicted together, are
    one event.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._events: list[KVEvent] = []

    def store(self, key: bytes, parent: bytes | None, token_ids: Sequence[int]) -> None:
        """A block can be found from now on; `parent` is None for the first of a prefix."""
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockStored) and last.block_hashes[-1] == parent:
            last.block_hashes.append(key)
            last.token_ids.extend(token_ids)
            return
        self._events.append(BlockStored([key], parent, list(token_ids), self._block_size))

    def remove(self, key: bytes) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved):
            last.block_hashes.append(key)
            return
        self._events.append(BlockRemoved([key]))

    def clear(self) -> None:
        self._events.append(AllBlocksCleared())

    def take(self) -> list[KVEvent]:
        """What has happened since the last call, in order."""
        events, self._events = self._events, []
        return events
