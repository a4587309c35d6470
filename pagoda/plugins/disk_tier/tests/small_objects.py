# SPDX-License-Identifier: Apache-2.0
"""A manifest of small objects, and the configuration of a tier."""

from __future__ import annotations

from pathlib import Path

from pagoda.messages.worker_config import KVTierConfig
from pagoda.plugins.disk_tier.directory import MIN_TOUCHES, TIER
from pagoda.plugins.disk_tier.objects import Manifest


def small_manifest(payload_bytes: int = 10_000, **fields: object) -> Manifest:
    return Manifest(
        **{
            "model": "some-model",
            "model_digest": "5eed",
            "dtype": "float32",
            "kv_dtype": "float32",
            "quantization": "none",
            "arithmetic": "cpu (avx512)",
            "layout": "layer, side, head, token, element",
            "block_size": 16,
            "payload_bytes": payload_bytes,
            **fields,
        }
    )


def disk_under(directory: Path) -> dict[str, KVTierConfig]:
    """The tiers of a server that keeps all blocks in `directory / "kv"`."""
    return {TIER: KVTierConfig(str(directory / "kv"), 2**30, {MIN_TOUCHES: 1})}
