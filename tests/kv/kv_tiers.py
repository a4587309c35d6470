"""A prefix of sixteen blocks, and what tests of tiers need around it."""

from __future__ import annotations

from pagoda.kv.block_pool import BlockPool
from pagoda.kv.connector import Demand, Offer
from pagoda.messages.transfers import Transfer, TransferEnd
from pagoda.messages.worker import Capabilities, WorkerReady

BLOCK_SIZE = 4
READY = WorkerReady(
    capabilities=Capabilities(
        block_sizes=(BLOCK_SIZE,), max_batch_tokens=1, max_batch_seqs=1, max_model_len=1
    ),
    num_blocks=64,
    block_size=BLOCK_SIZE,
    max_model_len=64,
    vocab_size=100,
    summary="",
    kv_host_slots=8,
)


def chain(count: int) -> list[bytes]:
    return [bytes([index]) * 32 for index in range(count)]


DEMAND = Demand("r", chain(16), list(range(64)))


def offers_of(pool: BlockPool, start: int, end: int) -> list[Offer]:
    """Blocks `start` to `end` of the demand, which are cached on the device from then on."""
    offers = []
    for index in range(start, end):
        key = DEMAND.keys[index]
        block = pool.find(key)
        if block is None:
            (block,) = pool.take(1)
            pool.publish(block, key)
            pool.release([block])
        parent = DEMAND.keys[index - 1] if index else None
        tokens = DEMAND.token_ids[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]
        offers.append(Offer(block, key, parent, tokens))
    return offers


def end_of(transfer: Transfer, failed: list[int] | None = None, error: str = "") -> TransferEnd:
    return TransferEnd(transfer.transfer_id, transfer.generation, failed or [], error)
