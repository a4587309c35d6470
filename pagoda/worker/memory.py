# SPDX-License-Identifier: Apache-2.0
"""The memory plan of a worker: bytes of weights, activations and KV cache, computed before any memory is taken."""

from __future__ import annotations

from collections.abc import Sequence

from pagoda.errors import ConfigError
from pagoda.ipc.machine import format_bytes
from pagoda.kv.capacity import resident_tokens
from pagoda.messages.kv_groups import KVGroup
from pagoda.messages.worker_config import WorkerConfig
from pagoda.worker.kv.memory import slot_bytes


def sampling_bytes(num_rows: int, vocab_size: int, num_ranks: int, num_threads: int) -> int:
    """Bytes that sampling from `num_rows` rows of logits at once takes at most, for a while in each step.

    A row of logits takes four bytes a token, twice if penalties change them and log-probabilities are wanted;
    several ranks gather them, which takes them twice more. Each thread sorts 16 bytes a token.
    """
    logits = 4 * num_rows * vocab_size
    return (2 if num_ranks == 1 else 4) * logits + 16 * num_threads * vocab_size


def check_weights(config: WorkerConfig, weight_bytes: int, available_bytes: int) -> None:
    """Raises ConfigError: the weights do not fit into memory."""
    if weight_bytes > available_bytes:
        raise ConfigError(
            f"the weights of {config.model} take {format_bytes(weight_bytes)}, but only "
            f"{format_bytes(available_bytes)} of memory are free; free some, or serve a smaller model or a "
            "smaller --dtype."
        )


def left_for_kv_cache(
    config: WorkerConfig,
    *,
    weight_bytes: int,
    batch_bytes: int,
    step_bytes: int,
    sampling_bytes: int,
    step_tokens: int,
    max_model_len: int,
    available_bytes: int,
) -> int:
    """Bytes of `available_bytes` that weights, the input batch, steps, sampling and the arena for blocks leave.

    A step of `step_tokens` takes `step_bytes`. Raises ConfigError: there is not enough for them."""
    available = format_bytes(available_bytes)
    check_weights(config, weight_bytes, available_bytes)
    if weight_bytes + batch_bytes > available_bytes:
        raise ConfigError(
            f"the tokens of {config.max_num_seqs} requests of {max_model_len} take "
            f"{format_bytes(batch_bytes)} besides {format_bytes(weight_bytes)} of weights, but only "
            f"{available} of memory are free; lower --max-num-seqs or --max-model-len."
        )
    held = weight_bytes + batch_bytes
    if held + sampling_bytes > available_bytes:
        raise ConfigError(
            f"sampling for {config.max_num_seqs} requests takes {format_bytes(sampling_bytes)} besides "
            f"{format_bytes(held)} of weights and tokens, but only {available} of memory are free; lower "
            "--max-num-seqs."
        )
    left = available_bytes - held - sampling_bytes - step_bytes
    if left < 0:
        raise ConfigError(
            f"steps of {step_tokens} tokens take {format_bytes(step_bytes)} besides "
            f"{format_bytes(held + sampling_bytes)} of weights, tokens and sampling, but only {available} of "
            "memory are free; lower --max-num-batched-tokens."
        )
    if config.kv_host_bytes > left:
        raise ConfigError(
            f"--kv-host-bytes gives this worker {format_bytes(config.kv_host_bytes)}, but the weights leave only "
            f"{format_bytes(left)} of memory free; lower it."
        )
    return left - config.kv_host_bytes


def tokens_held(groups: Sequence[KVGroup], num_blocks: int) -> int:
    """Tokens of the longest sequence that blocks hold, computed a few at a time."""
    low, high = 0, num_blocks * max(group.block_size for group in groups)
    if not any(group.keeps_all for group in groups):
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if sum(group.most_blocks(0, middle, LEAST_RUN) for group in groups) <= num_blocks:
            low = middle
        else:
            high = middle - 1
    return low


def check_arena(config: WorkerConfig, bytes_per_block: int) -> None:
    """Raises ConfigError if the arena in host memory is to be there, but would not hold one block."""
    wanted = slot_bytes(bytes_per_block)
    if 0 < config.kv_host_bytes < wanted:
        raise ConfigError(
            f"--kv-host-bytes gives each worker {format_bytes(config.kv_host_bytes)}, which does not hold one "
            f"block of {format_bytes(wanted)}; raise it."
        )


LEAST_RUN = 512
"""Tokens of one request that the KV cache lets be computed at once, at least, besides what windows see."""


def choose_num_blocks(
    config: WorkerConfig,
    *,
    groups: Sequence[KVGroup],
    bytes_per_block: int,
    max_model_len: int,
    available_bytes: int,
    segment_tokens: int = 0,
    num_cold_segments: int = 0,
) -> int:
    """Blocks of the KV cache, below which lie tiers that hold so many segments of running requests.

    The number comes from `num_blocks`, else from `kv_cache_memory_bytes`, which both hold as they are, else from
    the share `memory_utilization` of `available_bytes`: then it is no more than requests could ever fill.

    Raises ConfigError if the cache, with the tiers below it, could not hold one sequence of `max_model_len` tokens
    or does not fit into `available_bytes`.
    """
    shares = config.segment_shares
    held = shares.most_tokens(max_model_len)
    most = sum(group.most_blocks(0, held, held) for group in groups)
    blocks_per_sequence = sum(group.most_blocks(0, held, LEAST_RUN) for group in groups)
    if config.num_blocks is not None:
        num_blocks, flag = config.num_blocks, "--num-kv-blocks"
    else:
        flag = "--kv-cache-memory-bytes"
        if config.kv_cache_memory_bytes is not None:
            num_blocks = config.kv_cache_memory_bytes // bytes_per_block
        else:
            budget = int(available_bytes * config.memory_utilization)
            num_blocks = min(budget // bytes_per_block, config.max_num_seqs * most)
    num_tokens = shares.size * tokens_held(groups, num_blocks)
    size, available = format_bytes(num_blocks * bytes_per_block), format_bytes(available_bytes)
    resident = resident_tokens(groups, num_blocks, max_model_len, LEAST_RUN, segment_tokens)
    num_streamed = resident + num_cold_segments * segment_tokens if resident else 0
    if num_blocks < blocks_per_sequence and num_streamed < max_model_len:
        below, flags = "", flag
        if segment_tokens:
            below = f", and the tiers below it {num_cold_segments * segment_tokens}"
            flags = f"--kv-host-bytes, --kv-disk-bytes or {flag}"
        raise ConfigError(
            f"the KV cache would hold {num_tokens} tokens ({size} of {available} free memory){below}, "
            f"but one sequence may have {max_model_len} "
            f"({format_bytes(blocks_per_sequence * bytes_per_block)}); raise {flags} or lower --max-model-len."
        )
    if num_blocks * bytes_per_block > available_bytes:
        raise ConfigError(
            f"the KV cache would take {size} for {num_tokens} tokens, but the weights leave only "
            f"{available} of memory free; lower {flag}."
        )
    return num_blocks
