"""Workers of one replica must agree on what their results and their KV mean."""

from __future__ import annotations

from collections.abc import Collection

from pagoda.messages.worker import WorkerReady


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
