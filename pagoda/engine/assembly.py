# SPDX-License-Identifier: Apache-2.0
"""The parts of an engine that exist once its first worker is ready, and how they are joined."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from pagoda.engine.batching import SchedulerLimits
from pagoda.engine.drafting.assembly import build_speculator
from pagoda.engine.kv_transfers import TiersBuilder, attach_hooks
from pagoda.engine.peer_hooks import EngineLinks
from pagoda.engine.reports import CacheReporter
from pagoda.engine.scheduler import Scheduler
from pagoda.engine.structured_output.grammar_compiler import compile_grammar
from pagoda.engine.structured_output.grammars import Grammars
from pagoda.engine.structured_output.vocabulary import TokenTextsOrder, load_token_texts
from pagoda.errors import ConfigError
from pagoda.faults.injector import Faults
from pagoda.ipc.clock import Clock
from pagoda.kv.capacity import num_cold_segments
from pagoda.kv.events import CacheRecorder
from pagoda.kv.manager import KVManager
from pagoda.messages.engine_config import EngineConfig
from pagoda.messages.worker import WorkerReady

_WAITING_CACHES = 8
"""KV caches that the tokens of waiting prompts may fill."""
_WAITING_STEPS = 64
"""Full steps that the tokens of waiting prompts may take, where these are more tokens."""
_LARGEST_BODY = 2**20
"""Tokens of 2,048 inputs of 512 tokens each, which one request for embeddings may have."""


class QueueLimits(NamedTuple):
    """The most requests that an engine takes."""

    max_num_seqs: int
    max_num_waiting: int
    max_num_waiting_tokens: int

    @classmethod
    def of(cls, config: EngineConfig, limits: SchedulerLimits, worker: WorkerReady) -> QueueLimits:
        """Limits that the configuration leaves open follow from what the engine drains."""
        max_tokens = config.max_num_waiting_tokens
        if max_tokens is None:
            max_tokens = max(
                _WAITING_CACHES * worker.num_blocks * worker.block_size,
                _WAITING_STEPS * limits.max_num_batched_tokens,
                _LARGEST_BODY,
            )
        return cls(limits.max_num_seqs, config.max_num_waiting, max_tokens)


@dataclass(frozen=True)
class EngineParts:
    worker: WorkerReady
    """The first one; its successors have the same KV cache."""
    scheduler: Scheduler
    limits: QueueLimits
    cache_reporter: CacheReporter
    cache_recorder: CacheRecorder
    grammars: Grammars


GrammarsOpener = Callable[[EngineConfig, int], Grammars]


def open_grammars(config: EngineConfig, vocab_size: int, faults: Faults | None = None) -> Grammars:
    """Grammars over the tokens of the engine's model, which are read for the first request with one. `faults` are
    those of this process."""
    worker = config.worker
    order = TokenTextsOrder(worker.model, worker.load_format, config.executor == "sim")
    compile_with = (faults or Faults(None)).before("engine.grammar", compile_grammar)
    return Grammars(partial(load_token_texts, order), vocab_size, compile_with=compile_with)


def _may_speculate(config: EngineConfig, limits: SchedulerLimits) -> bool:
    """False of encoders, which say no tokens, and of backends without mixed steps.

    Raises ConfigError: a method is asked for by its name, and the backend cannot do it."""
    if not limits.mixed_steps and config.speculation.method not in ("auto", "off"):
        raise ConfigError(
            f"--speculative-config: the method {config.speculation.method} needs a backend that computes single "
            "tokens and chunks in one step; choose another --backend."
        )
    return limits.mixed_steps and not limits.whole_prompts


def build_parts(
    config: EngineConfig,
    worker: WorkerReady,
    clock: Clock,
    links: EngineLinks | None,
    build_tiers: TiersBuilder,
    open_grammars: GrammarsOpener,
) -> EngineParts:
    recorder = CacheRecorder(
        worker.kv_groups,
        keeps_events=config.kv_events is not None,
        outlives_workers=config.kv_tiers is not None and bool(config.kv_tiers.further),
    )
    limits = SchedulerLimits.within(config, worker)
    # Engines hand over blocks that are on the device, and segments are known by the keys of their blocks.
    may_stream = links is None and config.enable_prefix_caching
    segment_tokens = worker.segment_tokens if may_stream else 0
    further = {} if config.kv_tiers is None else config.kv_tiers.further
    kv = KVManager(
        worker.num_blocks,
        worker.block_size,
        groups=worker.kv_groups,
        run_tokens=limits.max_num_batched_tokens * limits.num_stages,
        prefix_caching=config.enable_prefix_caching and not limits.whole_prompts,
        recorder=recorder,
        segment_tokens=segment_tokens,
        num_cold_segments=num_cold_segments(worker, further, segment_tokens),
        shares=config.worker.segment_shares,
        num_ranks=config.worker.parallel.attention_ranks,
    )
    if not kv.fit(limits.max_model_len, limits.batch_multiple):
        size = "--kv-cache-memory-bytes" if config.worker.num_blocks is None else "--num-kv-blocks"
        remedy = f"raise {size}"
        if segment_tokens:
            remedy = f"raise --kv-host-bytes, --kv-disk-bytes or {size}"
        elif worker.segment_tokens and not config.enable_prefix_caching:
            remedy = "leave --enable-prefix-caching on, which tiers need"
        raise ConfigError(
            f"the KV cache of {worker.num_blocks} blocks and the tiers below it do not hold one sequence of "
            f"{limits.max_model_len} tokens; {remedy}, or lower --max-model-len."
        )
    scheduler = Scheduler(limits, kv, clock)
    if _may_speculate(config, limits):
        scheduler.batcher.speculator = build_speculator(
            config.speculation, worker.max_proposals, repeats=kv.keeps_states
        )
    if config.kv_tiers is not None or links is not None:
        attach_hooks(scheduler, config, worker, clock, links, build_tiers, recorder)
    return EngineParts(
        worker=worker,
        scheduler=scheduler,
        limits=QueueLimits.of(config, limits, worker),
        cache_reporter=CacheReporter([kv.pool, *scheduler.hooks.near_pools], recorder, clock),
        cache_recorder=recorder,
        grammars=open_grammars(config, worker.vocab_size),
    )
