"""The keys of KV blocks: digests over all tokens up to the end of a block, so equal keys mean equal prefixes.

    key(root)  = SHA-256("pagoda-kv-1", block size, adapter, cache salt)
    key(block) = SHA-256(key(parent), token ids as little-endian 32-bit integers)

The salt is in the root and so in every key of the chain: requests with different salts never share a block; nor do
those with different adapters, which are known by the digest of their files.
SHA-256 rather than Python's `hash`: keys are the same in every process, and nobody can craft a collision.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence

KEY_VERSION = "pagoda-kv-1"
SHORT_KEY_BYTES = 8
"""The beginning of a key that is enough to guess by: where a mistake costs time, and no more."""


def root_key(block_size: int, cache_salt: str | None = None, adapter: str = "") -> bytes:
    """The key of the empty prefix; 32 bytes. `adapter` is as in `GenerateRequest`."""
    root = hashlib.sha256(f"{KEY_VERSION}:{block_size}:".encode())
    if adapter:
        root.update(f"adapter:{adapter}:".encode())
    root.update(
        b"" if cache_salt is None else b"salt:" + cache_salt.encode("utf-8", "surrogatepass")
    )
    return root.digest()


def block_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The key of a block that holds `token_ids` behind the block of `parent`; 32 bytes."""
    return hashlib.sha256(parent + _bytes_of(token_ids)).digest()


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
) -> list[bytes]:
    """The keys of the full blocks that a request of `token_ids` may find cached, root first.

    The block of the last token is not among them: that token is always computed, so that the request can sample.
    """
    keys: list[bytes] = []
    parent = root_key(block_size, cache_salt, adapter)
    num_blocks = min((len(token_ids) - 1) // block_size, max_blocks)
    tokens, size = _bytes_of(token_ids[: max(0, num_blocks) * block_size]), 4 * block_size
    for start in range(0, len(tokens), size):
        parent = hashlib.sha256(parent + tokens[start : start + size]).digest()
        keys.append(parent)
    return keys
