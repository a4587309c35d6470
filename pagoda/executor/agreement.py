# SPDX-License-Identifier: Apache-2.0
"""Workers of one replica must agree on what their results and their KV mean, and then are ready as one."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain

import msgspec

from pagoda.messages.worker import WorkerReady
from pagoda.parallel.config import ParallelConfig


def disagreement(readies: Collection[WorkerReady]) -> str | None:
    """Sentence that says what workers of one replica do not agree on; None if they agree."""
    block_sizes = sorted({ready.block_size for ready in readies})
    if len(block_sizes) > 1:
        sizes = " and ".join(str(size) for size in block_sizes)
        return (
            f"the workers' backends prefer KV blocks of {sizes} tokens; name one with --block-size."
        )
    arithmetics = sorted({ready.arithmetic for ready in readies})
    if len(arithmetics) > 1:
        # Ranks that round differently would not agree on hidden states, nor on the experts of a token.
        return (
            f"the workers compute with {' and '.join(arithmetics)}, whose results differ in rounding; set "
            "PAGODA_CPU_ISA to an instruction set that all hosts have, or give --backend reference."
        )
    if len({ready.kv_digest for ready in readies}) > 1:
        return (
            "the workers' KV does not mean the same to other engines; all hosts must have the same files of "
            "the model and the same version of Pagoda."
        )
    return None


def joined(
    readies: Sequence[WorkerReady], sampling_rank: int, parallel: ParallelConfig
) -> WorkerReady:
    """Returns what all workers of a replica are together, from what each says, by rank."""
    ready = readies[sampling_rank]
    return msgspec.structs.replace(
        ready,
        summary=f"{_describe_ranks(parallel)}{ready.summary}",
        num_blocks=ready.num_blocks * parallel.num_pools,
        kv_host_slots=min(ready.kv_host_slots for ready in readies) * parallel.num_pools,
        segment_tokens=min(ready.segment_tokens for ready in readies),
        kv_places=tuple(chain.from_iterable(ready.kv_places for ready in readies)),
        kv_ranks=tuple(chain.from_iterable(ready.kv_ranks for ready in readies)),
        planned_memory_bytes=sum(ready.planned_memory_bytes for ready in readies),
        taken_memory_bytes=sum(ready.taken_memory_bytes for ready in readies),
    )


def _describe_ranks(parallel: ParallelConfig) -> str:
    tp, pp = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    cp = parallel.context_parallel_size
    parts = [f"{pp} pipeline stages"] * (pp > 1) + [f"{cp} context-parallel ranks"] * (cp > 1)
    parts += [f"{tp} tensor-parallel ranks"] * (tp > 1)
    return f"{' of '.join(parts)}: " if parts else ""
