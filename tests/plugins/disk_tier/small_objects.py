# SPDX-License-Identifier: Apache-2.0
"""A manifest of small objects."""

from __future__ import annotations

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
