# SPDX-License-Identifier: Apache-2.0
"""Paged KV blocks with a prefix cache, at their plainest; a prefix is found by its tokens themselves."""

from __future__ import annotations

from operator import eq
from typing import Protocol

Prefix = tuple[int, ...]
"""Tokens of a sequence up to the end of a block."""


class Sequence(Protocol):
    tokens: list[int]
    num_published: int
    """Leading blocks that others can find."""
    provides: Prefix | None
    """The prefix whose last block the request computes for all who want it."""
    provider: tuple[Sequence, int] | None
    """Request whose blocks this one waits for, and how many it had published then."""


class Blocks:
    """Free blocks, cached blocks that nobody holds, and blocks that requests hold."""

    def __init__(self, num_blocks: int, size: int) -> None:
        self.size = size
        self.free = list(range(num_blocks))[::-1]
        self.cached: dict[int, None] = {}
        """In the order in which they were given back."""
        self.num_holders = [0] * num_blocks
        self.prefixes: dict[int, Prefix] = {}
        self.by_prefix: dict[Prefix, int] = {}

    @property
    def num_available(self) -> int:
        return len(self.free) + len(self.cached)

    def find(self, tokens: list[int]) -> list[int]:
        """The longest cached prefix, without the last token: the request computes that one and samples."""
        found = []
        for end in range(self.size, len(tokens), self.size):
            block = self.by_prefix.get(tuple(tokens[:end]))
            if block is None:
                break
            found.append(block)
        return found

    def hold(self, blocks: list[int]) -> list[int]:
        for block in blocks:
            self.cached.pop(block, None)
            self.num_holders[block] += 1
        return blocks

    def take(self, count: int) -> list[int]:
        """Free blocks, then cached ones, which nobody can find any more."""
        taken = []
        for _ in range(count):
            if not self.free:
                block = next(iter(self.cached))
                del self.cached[block], self.by_prefix[self.prefixes.pop(block)]
                self.free.append(block)
            taken.append(self.free.pop())
        return self.hold(taken)

    def give_back(self, blocks: list[int]) -> None:
        for block in reversed(
            blocks
        ):  # a root serves more prefixes than an end, and is evicted later
            self.num_holders[block] -= 1
            if self.num_holders[block] == 0 and block in self.prefixes:
                self.cached[block] = None
            elif self.num_holders[block] == 0:
                self.free.append(block)
        blocks.clear()

    def publish(self, block: int, prefix: Prefix) -> None:
        if self.by_prefix.setdefault(prefix, block) == block:
            self.prefixes[block] = prefix


class InFlightPrefixes:
    """Of requests with a common prefix that arrive together one computes it; the others wait for its blocks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.by_prefix: dict[Prefix, Sequence] = {}

    def advance(self, request: Sequence) -> None:
        """The request, which runs, has published blocks or none yet."""
        self.leave(request)
        end = (request.num_published + 1) * self.size
        prefix = tuple(request.tokens[:end])
        if len(prefix) == end and self.by_prefix.setdefault(prefix, request) is request:
            request.provides = prefix

    def leave(self, request: Sequence) -> None:
        if request.provides is not None:
            del self.by_prefix[request.provides]
            request.provides = None

    def is_awaiting(self, request: Sequence) -> bool:
        """True if the request was told to wait, and its provider has published nothing since."""
        provider, num_published = request.provider or (request, -1)
        return provider.provides is not None and provider.num_published == num_published

    def should_wait(self, request: Sequence, num_cached: int) -> bool:
        """True if a running request computes at least half of what this one has to behind `num_cached` blocks."""
        request.provider, size = None, self.size
        num_blocks = (len(request.tokens) - 1) // size
        provider = self.by_prefix.get(tuple(request.tokens[: (num_cached + 1) * size]))
        if provider is None or num_cached >= num_blocks:
            return False
        pairs = [*map(eq, request.tokens, provider.tokens), False]
        num_equal = min(num_blocks, pairs.index(False) // size)
        if 2 * (num_equal - num_cached) * size < len(request.tokens) - num_cached * size:
            return False
        request.provider = provider, provider.num_published
        return True
