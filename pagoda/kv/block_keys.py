# SPDX-License-Identifier: Apache-2.0
"""Block keys of the prefix cache: digests over all tokens up to a block's end. Equal keys mean equal prefixes.

    key(root)  = SHA-256("pagoda-kv-1", block size, adapter, cache salt)
    key(block) = SHA-256(key(parent), token ids as little-endian 32-bit integers)

Where embedded spans lie in a block, its key is a digest of that one and of each span's digest, length and place.
The salt is in the root and so in every key of the chain: requests with different salts never share a block; nor do
those with different adapters, which are known by the digest of their files.
Blocks of one prefix in several KV groups have keys that differ in the last byte by the number of the group.
SHA-256 rather than Python's `hash`: keys are the same in every process, and nobody can craft a collision.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from itertools import islice, takewhile
from operator import attrgetter
from struct import pack
from typing import overload

from pagoda.messages.spans import EmbeddedSpan

KEY_VERSION = "pagoda-kv-1"
_SPANS = b"pagoda-kv-spans-1"
SHORT_KEY_BYTES = 8
"""The beginning of a key that is enough to guess by: where a mistake costs time, and no more."""


def root_key(block_size: int, cache_salt: str | None = None, adapter: str = "") -> bytes:
    """The key of the empty prefix; 32 bytes. `adapter` is as in `Work`."""
    root = hashlib.sha256(f"{KEY_VERSION}:{block_size}:".encode())
    if adapter:
        root.update(f"adapter:{adapter}:".encode())
    root.update(
        b"" if cache_salt is None else b"salt:" + cache_salt.encode("utf-8", "surrogatepass")
    )
    return root.digest()


def extend_keys(
    keys: list[bytes],
    token_ids: Sequence[int],
    block_size: int,
    num_blocks: int,
    spans: Sequence[EmbeddedSpan] = (),
) -> None:
    """Appends the keys of the leading blocks of a prompt up to `num_blocks`, which are full. `keys` has the key of
    the empty prefix, and those of the first blocks."""
    parent, first = keys[-1], (len(keys) - 1) * block_size
    tokens, size = _bytes_of(token_ids[first : num_blocks * block_size]), 4 * block_size
    for start in range(0, len(tokens), size):
        parent = hashlib.sha256(parent + tokens[start : start + size]).digest()
        if spans:
            place = first + start // 4
            parent = _with_spans(parent, spans, place, place + block_size)
        keys.append(parent)


def block_key(
    parent: bytes, token_ids: Sequence[int], spans: Sequence[EmbeddedSpan] = (), start: int = 0
) -> bytes:
    """The key of a block that holds `token_ids` behind the block of `parent`; 32 bytes.

    `start` is the place of the first of them in the prompt, whose `spans` are in order."""
    key = hashlib.sha256(parent + _bytes_of(token_ids)).digest()
    return _with_spans(key, spans, start, start + len(token_ids)) if spans else key


def _with_spans(key: bytes, spans: Sequence[EmbeddedSpan], start: int, end: int) -> bytes:
    """The key of a block from place `start` to `end`, of which `key` tells the tokens."""
    first = bisect_right(spans, start, key=attrgetter("end"))
    parts = [
        pack("<qq", span.start - start, span.length) + span.digest
        for span in takewhile(lambda span: span.start < end, islice(spans, first, None))
    ]
    return hashlib.sha256(b"".join((_SPANS, key, *parts))).digest() if parts else key


def group_key(key: bytes, group: int) -> bytes:
    """The key of a block of KV group `group`, from 0 to 255, that ends where the block of `key` ends; 32 bytes."""
    return key[:-1] + bytes((key[-1] ^ group,)) if group else key


class GroupKeys(Sequence[bytes]):
    """Keys of the leading blocks of a prefix in one KV group, made as they are asked for."""

    def __init__(self, keys: Sequence[bytes], group: int, ratio: int, num_blocks: int) -> None:
        """`keys` are those of group 0; a block of `group` is `ratio` of its blocks."""
        self._keys = keys
        self._group = group
        self._ratio = ratio
        self._num_blocks = num_blocks

    def __len__(self) -> int:
        return self._num_blocks

    @overload
    def __getitem__(self, index: int) -> bytes: ...

    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...

    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._num_blocks))]
        if not 0 <= index < self._num_blocks:
            raise IndexError(f"The group has {self._num_blocks} blocks, but no block {index}.")
        return group_key(self._keys[(index + 1) * self._ratio - 1], self._group)


def _bytes_of(token_ids: Sequence[int]) -> bytes:
    tokens = array("I", token_ids)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens.tobytes()


def prefix_keys(
    token_ids: Sequence[int],
    block_size: int,
    cache_salt: str | None,
    max_blocks: int,
    adapter: str = "",
    spans: Sequence[EmbeddedSpan] = (),
) -> list[bytes]:
    """The keys of the full blocks that a request of `token_ids` may find cached, root first.

    The block of the last token is not among them: that token is always computed, so that the request can sample.
    """
    keys = [root_key(block_size, cache_salt, adapter)]
    num_blocks = min((len(token_ids) - 1) // block_size, max_blocks)
    extend_keys(keys, token_ids, block_size, max(0, num_blocks), spans)
    return keys[1:]
