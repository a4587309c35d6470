# SPDX-License-Identifier: Apache-2.0
"""The wire between an engine and its workers for KV transfers, beside the steps."""

from __future__ import annotations

from typing import Annotated

import msgspec

from pagoda.messages.ranges import MAX_ITEMS, Count, Name, Place, Sentence, Size

BATCH_BYTES = 2**26
"""Bytes of a transfer that a worker reads at once; batches before a failure are good."""
BATCH_LIMIT_S = 60.0
"""Seconds after which a worker gives up a batch."""


def longest_transfer_s(num_bytes: int) -> float:
    """Seconds after which a transfer of `num_bytes` from each rank has ended, at the latest.

    Batches are of whole blocks, so they may be only a little more than half full.
    """
    return BATCH_LIMIT_S * (1 + 2 * num_bytes // BATCH_BYTES)


class DeviceBlocks(msgspec.Struct, frozen=True, array_like=True, tag="device"):
    """Blocks of the KV cache that the workers compute from."""

    block_ids: list[int]


class HostSlots(msgspec.Struct, frozen=True, array_like=True, tag="host"):
    """Places in each worker's arena of host memory, one block each."""

    slots: list[int]


class TierBlocks(msgspec.Struct, frozen=True, array_like=True, tag="tier"):
    """Blocks of a plugin's tier (`pagoda.kv.plugin`), each of whose places has its rank's part of them."""

    tier: str
    keys: list[bytes]


class KVPart(msgspec.Struct, frozen=True, array_like=True):
    """Part of a block on one rank: `num_heads` times `head_bytes`, one head after the other."""

    layer: Place
    """Layer number in the whole model, whatever stage this is."""
    kind: Name
    """`keys`, `values`, `key_scales` or `value_scales`; or which of the states, of whose units heads are."""
    first_head: Place
    num_heads: Place
    head_bytes: Place
    group: Place = 0
    """KV group of the layer, in whose blocks the tensor's bytes are the layer's."""
    region: Place = 0
    """Index of the memory that the part lies in, which layers of other groups may share."""
    offset: Count = 0
    """First byte of the part in a block of that memory."""
    stride: Count = 0
    """Bytes from block to block there."""

    @property
    def num_bytes(self) -> int:
        return self.num_heads * self.head_bytes


class KVRank(msgspec.Struct, frozen=True, kw_only=True):
    """The KV memory of one rank, as workers of other engines reach it."""

    parts: Annotated[tuple[KVPart, ...], msgspec.Meta(max_length=MAX_ITEMS)]
    num_blocks: Place
    descriptors: Annotated[dict[Name, bytes], msgspec.Meta(max_length=64)]
    """Addresses by transport, in a form that the transport alone reads."""

    def block_bytes(self, group: int) -> int:
        """Bytes of a block of a group on this rank; 0 where none of its layers is."""
        return sum(part.num_bytes for part in self.parts if part.group == group)


class KVPeer(msgspec.Struct, frozen=True, kw_only=True):
    """Workers of another engine, from one start to the next."""

    peer_id: str
    """Engine id and number of the start: never of two sets of workers."""
    ranks: Annotated[tuple[KVRank, ...], msgspec.Meta(max_length=1024)]


class RemoteBlocks(msgspec.Struct, frozen=True, array_like=True, tag="remote"):
    """Blocks of one KV group on the device of another engine. The workers have been told of `peer_id` before."""

    peer_id: str
    block_ids: list[int]
    group: int = 0


TransferPlace = DeviceBlocks | HostSlots | TierBlocks | RemoteBlocks


def tier_name(place: TransferPlace) -> str:
    """The tier in which places are, `device`, `host` and `remote` among them."""
    return place.tier if isinstance(place, TierBlocks) else str(place.__struct_config__.tag)


def num_places(place: TransferPlace) -> int:
    """Number of places, one for each block."""
    match place:
        case DeviceBlocks(block_ids) | RemoteBlocks(_, block_ids):
            return len(block_ids)
        case HostSlots(slots):
            return len(slots)
        case TierBlocks(_, keys):
            return len(keys)


class Transfer(msgspec.Struct, frozen=True, array_like=True):
    """KV of blocks to be copied from one place to another, beside the steps. Every rank copies its part.

    Ids are never used twice by an engine. The blocks of `source` and `target` correspond one by one.
    """

    transfer_id: int
    generation: int
    """Number of the workers' start; messages of earlier workers do not count."""
    source: TransferPlace
    target: TransferPlace
    after_step: int = -1
    """Last step that may still use device blocks of `target`, which workers execute first; -1 for none."""


class TierWord(msgspec.Struct, frozen=True, tag="tier_word"):
    """A message from one half of a plugin's tier to the other, where workers may be on other hosts."""

    tier: Name
    body: Annotated[bytes, msgspec.Meta(max_length=2**30)]
    """A message that the plugin alone reads."""


class Transfers(msgspec.Struct, frozen=True, omit_defaults=True, tag="transfers"):
    """Transfers to begin, in order of urgency."""

    transfers: list[Transfer] = []
    added_peers: list[KVPeer] = []
    """Peers that transfers from now on may name."""
    removed_peers: list[str] = []
    """Ids of peers that no transfer names any more; those under way may fail."""
    words: list[TierWord] = []
    """Words to all ranks, in order."""


class TransferLink(msgspec.Struct, frozen=True, tag="transfer_link"):
    """The first message on a worker's second connection, which is for transfers alone."""


class TransferEnd(msgspec.Struct, frozen=True, omit_defaults=True, tag="transfer_end"):
    """No rank reads or writes any block of the transfer any more. Each transfer ends once, whatever happens."""

    transfer_id: Count
    generation: Count
    failed: list[Place] = []
    """Indices of the blocks that were not copied, on any rank; what is in their targets means nothing."""
    error: Sentence = ""
    """Clause that says why the first of them failed."""
    unreadable: list[Place] = []
    """Members of `failed` whose objects may be good, but could not be read this time, on any rank."""


class TierPlace(msgspec.Struct, frozen=True):
    """Place in which one rank keeps its blocks of a plugin's tier, such as a directory."""

    tier: Name
    path: Sentence
    block_bytes: Count
    """Bytes that each block takes there."""
    host: Name = ""
    """The same for ranks on one host; empty where all are on their engine's, which sees the place itself."""
    num_sharers: Size = 1
    """Replicas of the server that may share the quota of the place, as they are on one host."""


TransferMessage = TransferLink | TransferEnd | TierWord
"""Messages of a worker on its second connection."""
