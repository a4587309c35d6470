# SPDX-License-Identifier: Apache-2.0
"""Tensors of gated delta rules as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

_TILED_ROWS = ("in_proj_z.weight", "in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias")


def delta_tensors(
    published: Mapping[str, Tensor], config: Any, *, tiled: bool
) -> Iterator[tuple[str, Tensor]]:
    """Tensors with queries, keys and values of all heads one behind the other, apart from gates of outputs.

    With `tiled`, heads of values are in the order of Qwen3.5's files: the first of each head of keys come first.
    """
    keys, key_dim = config.linear_num_key_heads, config.linear_key_head_dim
    of_key = config.linear_num_value_heads // keys
    together = of_key * config.linear_value_head_dim
    first_value = 2 * keys * key_dim

    def tiled_rows(rows: Tensor) -> Tensor:
        return rows.unflatten(0, (keys, of_key, -1)).transpose(0, 1).reshape(rows.shape)

    for name, values in published.items():
        stem, _, end = name.rpartition("linear_attn.")
        if end == "in_proj_qkvz.weight":
            parts = values.unflatten(0, (keys, -1)).split([key_dim, key_dim, together, together], 1)
            *qkv, z = (part.flatten(0, 1) for part in parts)
            yield f"{stem}linear_attn.in_proj_qkv.weight", torch.cat(qkv)
            yield f"{stem}linear_attn.in_proj_z.weight", z
        elif stem and tiled and end in ("in_proj_qkv.weight", "conv1d.weight"):
            yield name, torch.cat([values[:first_value], tiled_rows(values[first_value:])])
        elif stem and tiled and end in _TILED_ROWS:
            yield name, tiled_rows(values)
        elif stem and tiled and end == "out_proj.weight":
            yield name, tiled_rows(values.t()).t().contiguous()
        else:
            yield name, values
