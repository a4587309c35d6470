"""How large the KV cache becomes."""

from __future__ import annotations

from pagoda.engine.messages import WorkerConfig
from pagoda.errors import ConfigError


def choose_num_blocks(
    config: WorkerConfig,
    *,
    block_size: int,
    bytes_per_block: int,
    max_model_len: int,
    available_bytes: int,
) -> int:
    """Blocks that memory has room for, but no more than requests could ever fill.

    The number comes from `num_blocks`, else from `kv_cache_memory_bytes`, else from the share
    `memory_utilization` of `available_bytes`.

    Raises:
        ConfigError: the cache could not hold one sequence of `max_model_len` tokens.
    """
    blocks_per_sequence = -(-max_model_len // block_size)
    if config.num_blocks is not None:
        num_blocks, remedy = config.num_blocks, "raise --num-kv-blocks"
    else:
        budget = config.kv_cache_memory_bytes
        if budget is None:
            budget = int(available_bytes * config.memory_utilization)
        num_blocks = min(budget // bytes_per_block, config.max_num_seqs * blocks_per_sequence)
        remedy = "raise --kv-cache-memory-bytes"
    if num_blocks < blocks_per_sequence:
        raise ConfigError(
            f"the KV cache would hold {num_blocks * block_size} tokens "
            f"({format_bytes(num_blocks * bytes_per_block)} of {format_bytes(available_bytes)} free "
            f"memory), but one sequence may have {max_model_len} "
            f"({format_bytes(blocks_per_sequence * bytes_per_block)}); {remedy} or "
            "lower --max-model-len."
        )
    return num_blocks


def format_bytes(count: int) -> str:
    """Such as `4.2 GiB`."""
    size = float(count)
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
