# SPDX-License-Identifier: Apache-2.0
"""Operations of layers that keep a state by name, and what goes in and out of each."""

from __future__ import annotations

from collections.abc import Mapping

from pagoda.backend.operation import OperationSpec

STATE_OPERATIONS: Mapping[str, OperationSpec] = {
    "short_conv": OperationSpec(
        "state", ("x", "metadata"), ("cache", "weight", "bias?"), ("gated", "silu")
    ),
    "gated_delta": OperationSpec(
        "state",
        ("qkv", "gates", "metadata"),
        ("cache", "decay", "dt_bias"),
        ("key_heads", "key_dim", "by_channel"),
    ),
    "selective_scan": OperationSpec(
        "state",
        ("x", "b", "c", "dt", "metadata"),
        ("cache", "decay", "dt_bias", "skip"),
        ("groups", "state_dim", "b_first", "c_first", "by_element", "dt_min", "dt_max"),
    ),
    "gated_head_norm": OperationSpec("norm", ("x", "gate"), ("weight",), ("head_dim", "eps")),
    "rms_norm_groups": OperationSpec("norm", ("x",), ("weight",), ("group_size", "eps")),
}
"""Operations of `pagoda.backend.state_layers`."""
