# SPDX-License-Identifier: Apache-2.0
"""KV groups of models with windows, chunks and states, for tests."""

from __future__ import annotations

from pagoda.messages.kv_groups import KVGroup, KVKind, layer_groups

GEMMA_LIKE = [(KVKind.WINDOW, 1024)] * 5 + [(KVKind.FULL, 0)]
"""Six layers of a model in which one of six layers sees all."""


def grouped(name: str, block_size: int) -> tuple[KVGroup, ...]:
    """Groups of a small model; windows and chunks are of a few blocks, states of two or, in `fine`, of one."""
    full, window = (KVKind.FULL, 0), (KVKind.WINDOW, 2 * block_size + 1)
    match name:
        case "full":
            return layer_groups([full], block_size)
        case "window":
            return layer_groups([window], block_size)
        case "mixed":
            return layer_groups([window, full, window], block_size, window_multiple=2)
        case "chunk":
            return layer_groups([full, (KVKind.CHUNK, 3 * block_size)], block_size)
        case "fine":
            return (*layer_groups([full], block_size), state(block_size))
        case "several":
            return layer_groups([full, full, window, full], block_size)
        case "state":
            return (*layer_groups([full], block_size), state(2 * block_size))
    return (*layer_groups([window, full], block_size), state(2 * block_size))


def state(block_size: int) -> KVGroup:
    return KVGroup(layers=(9,), kind=KVKind.STATE, block_size=block_size)


NAMES = ("full", "window", "mixed", "chunk", "fine", "state", "all")
EVERY = (*NAMES, "several")
"""Also a model of which several groups keep all."""
