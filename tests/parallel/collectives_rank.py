# SPDX-License-Identifier: Apache-2.0
"""One rank of `test_collectives`: `python -m collectives_rank KIND RANK SIZES ADDRESSES`.

Takes part in a group of each of the sizes that it is a rank of. Ends with code 0 if it saw what it had to see.
"""

from __future__ import annotations

import random
import sys
import time

import torch
from torch import Tensor

from pagoda.backend.cpu.collectives import SharedMemoryCollectives
from pagoda.parallel.collectives import Collectives
from pagoda.parallel.distributed import DistributedCollectives

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
COUNTS = (1, 2, 31, 1000, 4096, 4097, 20000, 65537)
LARGE = 600_000
"""Elements that do not fit the shared memory at once."""
REPETITIONS = {"shared": 300, "gloo": 20}


def join(kind: str, rank: int, size: int, address: str) -> Collectives:
    if kind == "shared":
        return SharedMemoryCollectives(address, rank, size)
    return DistributedCollectives(address, rank, size, "127.0.0.1")


def input_of(rank: int, count: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(count, generator=generator).to(dtype)


def expect(actual: Tensor, expected: Tensor) -> None:
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        raise SystemExit(f"{actual.shape}, {actual.dtype} instead of {expected.shape}")
    if not torch.equal(actual.view(torch.uint8), expected.view(torch.uint8)):
        raise SystemExit(f"other bits: {actual} instead of {expected}")


def check_sums(group: Collectives, rng: random.Random) -> None:
    for dtype in DTYPES:
        for count in (*COUNTS, LARGE) if dtype == torch.float32 else COUNTS:
            torch.set_num_threads(rng.choice((1, 2)))
            parts = [input_of(rank, count, dtype, count) for rank in range(group.size)]
            total = parts[0].float()
            for part in parts[1:]:
                total = total + part.float()
            expect(group.all_reduce(parts[group.rank]), total.to(dtype))


def check_exchanges(group: Collectives) -> None:
    for dtype in (*DTYPES, torch.int64, torch.bool):
        for count in (1, 777, 200_001):
            parts = [input_of(rank, count, torch.float32, count) for rank in range(group.size)]
            typed = [(part * 10).to(dtype) for part in parts]
            expect(group.all_gather(typed[group.rank]), torch.stack(typed))
            # To rank b go b + 1 of a rank's rows, to the last none; rows of rank a are those of all from a on.
            rows = torch.cat(typed)[:, None].expand(-1, 3).contiguous()
            counts = [
                [(to + 1) * (to + 1 < group.size) * count // 777 for to in range(group.size)]
                for _ in range(group.size)
            ]
            sent = rows[group.rank :][: sum(counts[group.rank])]
            first = sum(counts[0][: group.rank])
            own = slice(first, first + counts[0][group.rank])
            expect(
                group.all_to_all(sent, counts),
                torch.cat([rows[rank:][: sum(counts[rank])][own] for rank in range(group.size)]),
            )
    for length in (0, 1, 5000, 4 * LARGE):
        payload = bytes(range(256)) * (length // 256) + bytes(length % 256)
        if group.broadcast(payload if group.rank == 0 else None) != payload:
            raise SystemExit(f"another payload of {length} bytes was broadcast")


def check_races(group: Collectives, rng: random.Random, repetitions: int) -> None:
    """Ranks come early and late; each sum differs from the one before."""
    for step in range(repetitions):
        if rng.random() < 0.1:
            time.sleep(rng.random() * 2e-3)
        count = (3, 2500, 40000)[step % 3]
        x = torch.full((count,), float(step * (group.rank + 1)))
        expected = step * group.size * (group.size + 1) / 2
        expect(group.all_reduce(x), torch.full((count,), expected))


def main(kind: str, rank: int, sizes: list[int], addresses: list[str]) -> None:
    for size, address in zip(sizes, addresses, strict=True):
        if rank < size:
            group = join(kind, rank, size, address)
            rng = random.Random(rank)
            check_sums(group, rng)
            check_exchanges(group)
            check_races(group, rng, REPETITIONS[kind])
            # Those who come late to the last meeting still read what the others have sent.
            group.broadcast(b"" if rank == 0 else None)


def wait_for_ever(path: str, rank: int, size: int) -> None:
    """For ranks that never come."""
    group = SharedMemoryCollectives(path, rank, size)
    print("here", flush=True)
    group.all_reduce(torch.zeros(10))


if __name__ == "__main__":
    if sys.argv[1] == "wait":
        wait_for_ever(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        given_sizes = [int(size) for size in sys.argv[3].split(",")]
        main(sys.argv[1], int(sys.argv[2]), given_sizes, sys.argv[4].split(","))
