# SPDX-License-Identifier: Apache-2.0
"""The pool of KV blocks of one tier: reference counts, the index of the prefix cache, and the order of eviction.

Every block is in exactly one of three states:

    free        no reference, no key: holds nothing of value
    cached      no reference, a key: holds K and V that a later request may reuse
    referenced  listed by at least one live request or transfer

Free and cached blocks are linked into rings, from which blocks are taken at the head: first free blocks, then
cached ones that nobody is likely to want, then the others. A free block is put back at the head of its ring and
a cached one at the tail, so a cached block is evicted only when no free one is left, and then the one that was
released longest ago. The links are in the blocks themselves: taking, returning and pulling a cached block out of
the middle are all O(1).

Blocks of all KV groups are in one pool. Each is filed under a key of its group (`group_key`). Of several
ranks each holds equally many of the blocks, which follow each other, and has rings of its own. Ranks that attend
to requests of their own (`own_keys`) find their own blocks alone, and several may hold the same prefix.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain

from pagoda.kv.events import CacheRecorder, Medium


class Block:
    """One block of the KV cache; identified by its index into the device tensors, or into an arena of slots."""

    __slots__ = ("block_id", "group", "key", "next", "previous", "rank", "ref_count", "used_by")

    def __init__(self, block_id: int, rank: int = 0) -> None:
        self.block_id = block_id
        self.rank = rank
        """Rank whose memory it lies in."""
        self.ref_count = 0
        self.key: bytes | None = None
        """Digest of all tokens up to the end of this block, once it is full and computed."""
        self.group = 0
        """KV group of what the block holds, while it has a key."""
        self.used_by = -1
        """The last step that may still have read it or written to it after it was freed; -1 if none had."""
        self.previous: Block = self
        self.next: Block = self

    def __repr__(self) -> str:
        key = self.key.hex()[:8] if self.key else None
        return f"Block({self.block_id}, ref_count={self.ref_count}, key={key})"


class BlockPool:
    """Allocates blocks, counts references and finds cached blocks by key."""

    def __init__(
        self,
        num_blocks: int,
        recorder: CacheRecorder | None = None,
        medium: Medium = Medium.DEVICE,
        num_ranks: int = 1,
        *,
        own_keys: bool = False,
    ) -> None:
        """`recorder` is told of the blocks of `medium` that are stored and removed. Ranks hold equally many; with
        `own_keys` each finds its own."""
        if num_blocks < 1 or num_blocks % num_ranks:
            least = f"at least 1, a multiple of {num_ranks}"
            raise ValueError(f"num_blocks must be {least}, got {num_blocks}.")
        self.num_blocks = num_blocks
        self.num_ranks = num_ranks
        self.own_keys = own_keys
        self.num_stored = 0
        """Blocks that became findable since the start."""
        self.removed = [0] * num_ranks
        """Blocks of each rank that can be found no longer; `num_cached` is the difference to those stored."""
        self._recorder = recorder or CacheRecorder(keeps_events=False)
        self._medium = medium
        self._rings = [(Block(-1), Block(-1), Block(-1)) for _ in range(num_ranks)]
        """Sentinels of each rank's rings of available blocks, which are free, unlikely and likely to be wanted:
        `next` is the head, `previous` the tail."""
        self._blocks = [Block(i, i * num_ranks // num_blocks) for i in range(num_blocks)]
        shared: dict[bytes, Block] = {}
        self._by_key = [{} if own_keys else shared for _ in range(num_ranks)]
        """Blocks by key that each rank finds."""
        self._indices = self._by_key if own_keys else self._by_key[:1]
        self._num_grouped = 0
        """Cached blocks of groups other than 0."""
        self.num_available = 0
        """Blocks that `allocate` can give: free, or cached and evictable."""
        self.available = [0] * num_ranks
        """The same by rank."""
        self.evictable = [0] * num_ranks
        """Available blocks of each rank that are cached."""
        for block in self._blocks:
            self._link_before(self._rings[block.rank][0], block)

    @property
    def num_removed(self) -> int:
        """Blocks that can be found no longer."""
        return sum(self.removed)

    @property
    def num_evictable(self) -> int:
        """Available blocks that are cached."""
        return sum(self.evictable)

    @property
    def of_rank(self) -> int:
        """Blocks of each rank."""
        return self.num_blocks // self.num_ranks

    @property
    def num_cached(self) -> int:
        """Blocks, referenced or not, that can be found by key."""
        return sum(map(len, self._indices))

    def allocate(self, count: int, rank: int = 0) -> list[Block]:
        """`count` blocks of a rank with one reference each, evicting cached ones as needed.

        Raises ValueError if fewer than `count` blocks are available.
        """
        if count > self.available[rank]:
            raise ValueError(f"{count} blocks wanted, {self.available[rank]} available.")
        taken = []
        rings = iter(self._rings[rank])
        ring = next(rings)
        for _ in range(count):
            while ring.next is ring:
                ring = next(rings)
            block = ring.next
            self._unlink(block)
            block.ref_count = 1
            self._forget(block)
            taken.append(block)
        return taken

    def allocate_on(self, ranks: Sequence[int]) -> list[Block]:
        """A block of each of these ranks, as `allocate` gives them.

        Raises ValueError if a rank has too few, before any is taken.
        """
        wanted = Counter(ranks)
        for rank, count in wanted.items():
            if count > self.available[rank]:
                raise ValueError(f"{count} blocks wanted, {self.available[rank]} available.")
        taken = {rank: iter(self.allocate(count, rank)) for rank, count in wanted.items()}
        return [next(taken[rank]) for rank in ranks]

    def in_order_of_eviction(self, rank: int = 0) -> Iterator[Block]:
        """Cached blocks of a rank without a reference; the pool must not change meanwhile."""
        _, *cached = self._rings[rank]
        for ring in cached:
            block = ring.next
            while block is not ring:
                if block.key is not None:
                    yield block
                block = block.next

    @property
    def num_known(self) -> int:
        """Different keys of blocks that can be found, of which several ranks may have some."""
        return len(set().union(*self._indices))

    def keys(self) -> Collection[bytes]:
        """Keys of cached blocks of group 0."""
        if not self._num_grouped:
            return (
                self._indices[0].keys() if len(self._indices) == 1 else set().union(*self._indices)
            )
        items = chain.from_iterable(index.items() for index in self._indices)
        return {key: None for key, block in items if block.group == 0}

    def find(self, key: bytes, rank: int = 0) -> Block | None:
        """The block that holds the tokens of `key` and that a rank finds, if any. Takes no reference."""
        return self._by_key[rank].get(key)

    def place(self, key: bytes, rank: int) -> tuple[int, bytes]:
        """Names the one block of a key that a rank may find, in books beside the pool."""
        return rank if self.own_keys else 0, key

    def holds(self, key: bytes) -> bool:
        """True if some rank finds a block of `key`."""
        return any(key in index for index in self._indices)

    def share(self, blocks: Iterable[Block]) -> None:
        """Adds one reference to each block; cached ones leave the list of available blocks."""
        for block in blocks:
            if block.ref_count == 0:
                self._unlink(block)
            block.ref_count += 1

    def release(self, blocks: Sequence[Block], *, likely: bool = True) -> None:
        """Drops one reference from each block of a chain.

        The last block goes back first, so that the ends of chains are evicted before their roots: a root
        serves more prefixes. Blocks that nobody is `likely` to want again are evicted before all others.

        Raises ValueError if a block has no reference to drop.
        """
        for block in reversed(blocks):
            if block.ref_count < 1:
                raise ValueError(f"{block} is released more often than it was taken.")
            block.ref_count -= 1
            if block.ref_count == 0:
                free, unlikely, wanted = self._rings[block.rank]
                cached = wanted if likely else unlikely
                self._link_before(cached if block.key else free.next, block)

    def publish(
        self,
        block: Block,
        key: bytes,
        parent: bytes | None = None,
        token_ids: Sequence[int] = (),
        group: int = 0,
    ) -> None:
        """Makes a full, computed block findable, unless another is already: the first one under a key keeps it.

        Among ranks that share contexts, one on another rank gives way unless somebody references it: prefixes go
        round the ranks, and today's go on with the new one.

        `parent` is the key of the block in front of it, and `token_ids` are its own tokens.

        Raises ValueError if the block is not referenced or has another key.
        """
        if block.ref_count < 1 or (block.key is not None and block.key != key):
            raise ValueError(f"{block} cannot be published.")
        if block.key is not None:
            return
        index = self._by_key[block.rank]
        other = index.get(key)
        if other is not None:
            if other.rank == block.rank or other.ref_count:
                return
            self._forget(other)
        is_new = not self.holds(key)
        index[key] = block
        block.key = key
        block.group = group
        self.num_stored += 1
        self._num_grouped += group > 0
        if is_new:
            self._recorder.store(key, parent, token_ids, self._medium, group)

    def discard(self, key: bytes) -> None:
        """Makes blocks unfindable: their content is wrong."""
        for index in self._indices:
            if (block := index.get(key)) is not None:
                self._forget(block)

    def clear_cache(self) -> None:
        """Forgets all keys, since the memory has been lost. References stay."""
        lost: dict[bytes, int] = {}
        for key, block in chain.from_iterable(index.items() for index in self._indices):
            self.removed[block.rank] += 1
            lost[key] = block.group
        for block in self._blocks:
            block.used_by, block.key = -1, None
        self.evictable = [0] * self.num_ranks
        self._recorder.lose(list(lost.items()), self._medium)
        for index in self._indices:
            index.clear()
        self._num_grouped = 0

    def _forget(self, block: Block) -> None:
        key = block.key
        if key is None:
            return
        block.key = None
        if block.ref_count == 0:
            self.evictable[block.rank] -= 1
        index = self._by_key[block.rank]
        if index.get(key) is block:
            del index[key]
            self.removed[block.rank] += 1
            self._num_grouped -= block.group > 0
            if not self.holds(key):
                self._recorder.remove(key, self._medium, block.group)

    def _link_before(self, successor: Block, block: Block) -> None:
        block.previous, block.next = successor.previous, successor
        successor.previous.next = block
        successor.previous = block
        self.num_available += 1
        self.available[block.rank] += 1
        self.evictable[block.rank] += block.key is not None

    def _unlink(self, block: Block) -> None:
        block.previous.next = block.next
        block.next.previous = block.previous
        self.num_available -= 1
        self.available[block.rank] -= 1
        self.evictable[block.rank] -= block.key is not None

    def references(self) -> dict[int, int]:
        """References by block id, of referenced blocks only; takes time in proportion to the pool."""
        return {block.block_id: block.ref_count for block in self._blocks if block.ref_count}

    def check(self) -> None:
        """Verifies the pool's own bookkeeping; for tests and debugging.

        Raises ValueError, which names the invariant, if one is broken.
        """
        listed: list[Block] = []
        for rank, rings in enumerate(self._rings):
            before = len(listed)
            for ring in rings:
                block = ring.next
                while block is not ring and len(listed) <= self.num_blocks:
                    listed.append(block)
                    block = block.next
            of_rank = listed[before:]
            if len(of_rank) != self.available[rank] or any(it.rank != rank for it in of_rank):
                raise ValueError(f"The available blocks of rank {rank} are not those counted.")
        unreferenced = [block for block in self._blocks if block.ref_count == 0]
        if sorted(block.block_id for block in listed) != [block.block_id for block in unreferenced]:
            raise ValueError("The list of available blocks is not the set of unreferenced blocks.")
        if len(listed) != self.num_available:
            raise ValueError(f"{len(listed)} blocks are listed, {self.num_available} are counted.")
        num_evictable = sum(block.key is not None for block in listed)
        if num_evictable != self.num_evictable:
            raise ValueError(
                f"{num_evictable} listed blocks have a key, {self.num_evictable} are counted."
            )
        filed = list(chain.from_iterable(index.items() for index in self._indices))
        for key, block in filed:
            if block.key != key:
                raise ValueError(f"{block} is filed under another key.")
        keyed = sum(block.key is not None for block in self._blocks)
        if keyed != len(filed):
            raise ValueError(f"{keyed} blocks have a key, {len(filed)} are filed.")
        if self.num_stored - self.num_removed != len(filed):
            raise ValueError(
                f"{self.num_stored} blocks were stored and {self.num_removed} removed, "
                f"{len(filed)} are filed."
            )
