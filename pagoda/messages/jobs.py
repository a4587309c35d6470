# SPDX-License-Identifier: Apache-2.0
"""Messages of jobs: processes that load models for one piece of work, report progress and end with a result.

A job reads its configuration from standard input and writes one JSON object a line to standard output:
`JobProgress` as often as it likes, then its result or `JobFailed`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from pagoda.messages.worker_config import WorkerConfig


class JobProgress(msgspec.Struct, frozen=True, tag="progress"):
    done: int
    total: int


class JobFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The job ends without a result."""

    error: str
    is_user_error: bool


class QualityConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Two models of one vocabulary and texts on which they are compared (`pagoda.plugins.bench.quality_job`)."""

    model: WorkerConfig
    reference: WorkerConfig
    texts: list[list[int]]
    """Token ids of each text, without those that a tokenizer adds around it."""
    prefix: list[int] = []
    """Token ids in front of every window, such as BOS."""
    context_len: int
    """Tokens of a window, those of `prefix` included."""


class Closeness(msgspec.Struct, frozen=True, kw_only=True):
    """Next-token distributions of a model beside those of the reference, over all positions of a text."""

    positions: int
    perplexity: float
    reference_perplexity: float
    kl_mean: float
    """Mean of KL(reference || model) over the whole vocabulary, in nats."""
    kl_p99: float
    kl_max: float
    kl_top20: float
    """The same mean where all but the model's 20 most likely tokens count as one."""
    same_top_token: float
    """Share of positions at which both models have the same most likely token."""


class QualityResult(msgspec.Struct, frozen=True, kw_only=True, tag="quality"):
    model: str
    """Summary of the worker's plan: backend, number formats, memory."""
    reference: str
    texts: list[Closeness]
    overall: Closeness


QuantizeFormat = Literal["w8a8", "w8a16", "w4a16"]
"""Schemes of quantized checkpoints; see `pagoda.model.compressed_tensors`."""


class QuantizeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A model to quantize, and where; see `pagoda.plugins.quantize.job`."""

    model: str
    """A model directory with dense weights."""
    directory: str
    """An empty directory that takes the files."""
    format: QuantizeFormat
    group_size: int
    max_shard_bytes: int
    backend: str = "auto"
    num_threads: int | None = None
    calibration_windows: list[list[int]] = []
    """Token ids of a text's windows by whose inputs weights are rounded; none rounds each to the nearest."""


class QuantizeResult(msgspec.Struct, frozen=True, kw_only=True, tag="quantized"):
    weight_bytes: int
    """Bytes of all tensors written."""
    source_bytes: int
    """Bytes of all tensors read."""
    num_weights: int
    """Numbers in all tensors read."""
    num_files: int
