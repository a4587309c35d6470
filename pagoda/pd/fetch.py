"""A request whose KV is asked for at another engine, and the load that it becomes."""

from __future__ import annotations

from collections.abc import Sequence

from pagoda.kv.block_pool import Block
from pagoda.kv.connector import PrefixRequest
from pagoda.messages.frontend import KVSource
from pagoda.pd.messages import KVSubscribe


class Load:
    """Blocks that are being filled."""

    def __init__(self, held_id: int, start: int, blocks: Sequence[Block], after_step: int) -> None:
        self.held_id = held_id
        self.start = start
        self.end = start + len(blocks)
        self.blocks = blocks
        self.after_step = after_step
        self.next = start
        """The first block that has not begun to be read."""
        self.num_open = 0
        """Transfers under way."""
        self.is_checking = False
        """Whether all is read, and the other side was asked whether it counts."""


class Fetch:
    """A request whose KV is asked for."""

    def __init__(self, prefix: PrefixRequest, source: KVSource, start: int, now: float) -> None:
        self.prefix = prefix
        self.source = source
        self.is_token_alone = start >= len(prefix.keys)
        """Whether the device had all blocks when it was announced."""
        self.block_ids: list[int] = []
        """Of the leading blocks that are known to be computed."""
        self.num_blocks: int | None = None
        """How many of the prefix's blocks will come; None if that is not known yet."""
        self.peer_id: str | None = None
        """Whose blocks these are."""
        self.load: Load | None = None
        self.is_loaded = False
        self.has_token = False
        self.moved_at = now
        """When there was something new of it."""

    @property
    def is_incomplete(self) -> bool:
        """Whether something of it has yet to come, be it news, blocks or the token."""
        if self.load is not None or not self.has_token:
            return True
        return self.num_blocks is None or len(self.block_ids) < self.num_blocks

    @property
    def is_owed(self) -> bool:
        """Whether it is for the other engine to do something; how long a read may take is for workers to say."""
        return self.is_incomplete and (self.load is None or self.load.num_open == 0)

    def want(self) -> KVSubscribe:
        """What to ask for: all of which there is nothing known."""
        return KVSubscribe(self.source.transfer_id, len(self.block_ids), len(self.prefix.keys))
