# SPDX-License-Identifier: Apache-2.0
"""Objects that are exempt from garbage collection, and memory that goes back to the system."""

import ctypes
import gc
from collections.abc import Iterator

import psutil
import pytest

from pagoda.ipc.heap import settle_heap

PIECE = 2**16
"""Bytes of one allocation: such small ones come from the heap, whatever their sum."""
COUNT = 2**10


@pytest.fixture(autouse=True)
def _thawed() -> Iterator[None]:
    yield
    gc.enable()
    gc.unfreeze()


def test_what_is_there_is_not_collected_again() -> None:
    class Node:
        pass

    gc.disable()
    kept = Node()
    settle_heap()
    assert gc.isenabled()
    assert not any(each is kept for each in gc.get_objects())


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs glibc")
def test_gaps_of_the_heap_go_back_to_the_system() -> None:
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    pieces = [libc.malloc(PIECE) for _ in range(COUNT)]
    for piece in pieces:
        ctypes.memset(piece, 1, PIECE)
    for piece in pieces[:-1]:  # the last one keeps the heap from shrinking
        libc.free(piece)
    before = psutil.Process().memory_info().rss
    settle_heap()
    assert psutil.Process().memory_info().rss < before - PIECE * COUNT // 2
    libc.free(pieces[-1])
