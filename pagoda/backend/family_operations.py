# SPDX-License-Identifier: Apache-2.0
"""Operations of one or two families of decoders: what goes in and out of each, and functions that record them."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import TYPE_CHECKING

from pagoda.backend.operation import OperationSpec

if TYPE_CHECKING:
    from pagoda.backend.graph import Value
    from pagoda.backend.operations import GraphBuilder

SPECS: Mapping[str, OperationSpec] = {
    "rms_norm_heads": OperationSpec(
        "norm", ("x",), ("weight",), ("first", "elements", "head_dim", "eps")
    ),
    "sparse_mixing": OperationSpec("experts", ("logits",), (), ("jitter",)),
    "expert_weights": OperationSpec(
        "experts",
        ("logits",),
        ("factors", "correction?"),
        ("per_token", "renormalize", "corrected", "kept"),
    ),
    "above_deviations": OperationSpec("activation", ("x",), (), ("deviations",)),
    "match_magnitude": OperationSpec("norm", ("x", "like"), (), ("least",)),
    "scale_heads": OperationSpec("add", ("x", "factors"), (), ("head_dim",)),
    "join_columns": OperationSpec("select", ("x", "beside")),
    "mix_streams": OperationSpec("add", ("streams", "coefficients"), (), ("count",)),
    "correct_streams": OperationSpec(
        "add", ("streams", "activated", "coefficients"), (), ("count",)
    ),
}
"""Operations by name, as in `pagoda.backend.operations.OPERATIONS`."""


def rms_norm_heads(
    ops: GraphBuilder, x: Value, weight: Sized, *, first: int, head_dim: int, eps: float
) -> Value:
    """x [n, d] whose heads from element `first` on are normed, each by its own part of the weight: [n, d].

    The weight is [heads head_dim] float32. Raises ValueError: shapes do not fit.
    """
    count = len(weight)
    if first + count > x.width or count % head_dim:
        raise ValueError(f"Norms of {count} elements from {first} on do not fit rows of {x.width}.")
    numbers = {"first": first, "elements": count, "head_dim": head_dim, "eps": eps}
    return ops.record("rms_norm_heads", [x], [weight], numbers, x.width)


def sparse_mixing(ops: GraphBuilder, logits: Value, jitter: float) -> Value:
    """Weights [n, experts] of the two experts of the highest logits [n, experts], 0 of all others.

    The first one's weight is its share in a softmax over all whose logits are less by at most 2 jitter times the
    larger of their own size and the highest; the second one's is the same without the first (Liu et al. 2024,
    GRIN, part 2). Raises ValueError: there is one expert.
    """
    if logits.width < 2:
        raise ValueError("Two of one expert are no choice.")
    return ops.record("sparse_mixing", [logits], [], {"jitter": jitter}, logits.width)


def expert_weights(
    ops: GraphBuilder,
    logits: Value,
    factors: Sized,
    correction: Sized | None = None,
    *,
    per_token: int,
    renormalize: bool,
    kept: int,
) -> Value:
    """Weights of experts by logits [n, experts]: a softmax times factors [experts] of those chosen, 0 of others.

    So many experts of a token are chosen by their logits, or by their share plus a correction [experts];
    `renormalize` has their shares add up to one. Gives [n, kept], or [n, kept + 1] where there are more: then the
    last column is the sum of the weights of those behind the kept ones. Raises ValueError: sizes do not fit.
    """
    count, corrected = logits.width, correction is not None
    if len(factors) != count or (correction is not None and len(correction) != count):
        raise ValueError(f"Factors of {len(factors)} experts do not fit {count} logits.")
    if not 1 <= per_token <= count or not 1 <= kept <= count:
        raise ValueError(f"{per_token} and {kept} of {count} experts are no choice.")
    numbers = {
        "per_token": per_token,
        "renormalize": renormalize,
        "corrected": corrected,
        "kept": kept,
    }
    weights = [factors] if correction is None else [factors, correction]
    return ops.record("expert_weights", [logits], weights, numbers, kept + (kept < count))


def above_deviations(ops: GraphBuilder, x: Value, deviations: float) -> Value:
    """Excess of x [n, d] over its row's mean plus so many standard deviations, 0 where there is none: [n, d]."""
    return ops.record("above_deviations", [x], [], {"deviations": deviations}, x.width)


def match_magnitude(ops: GraphBuilder, x: Value, like: Value, least: float) -> Value:
    """x [n, d] brought to the root mean square of `like` [n, d]; its own one counts as `least` at least."""
    _expect_width(like, x.width)
    return ops.record("match_magnitude", [x, like], [], {"least": least}, x.width)


def scale_heads(ops: GraphBuilder, x: Value, factors: Value, head_dim: int) -> Value:
    """x [n, heads head_dim] whose heads are each times a factor [n, heads] of their own: [n, heads head_dim].

    Raises ValueError: shapes do not fit.
    """
    _expect_width(x, factors.width * head_dim)
    return ops.record("scale_heads", [x, factors], [], {"head_dim": head_dim}, x.width)


def join_columns(ops: GraphBuilder, x: Value, beside: Value) -> Value:
    """Columns of x [n, d] and of another one [n, e] side by side: [n, d + e]."""
    return ops.record("join_columns", [x, beside], [], {}, x.width + beside.width)


def mix_streams(ops: GraphBuilder, streams: Value, coefficients: Value, count: int) -> Value:
    """Each of `count` streams [n, count d] plus all of them times coefficients [n, count count]: [n, count d].

    Those of the first result come first (Baykal et al. 2023, AltUp). Raises ValueError: shapes do not fit.
    """
    _expect_width(coefficients, count * count)
    return ops.record("mix_streams", [streams, coefficients], [], {"count": count}, streams.width)


def correct_streams(
    ops: GraphBuilder, streams: Value, activated: Value, coefficients: Value, count: int
) -> Value:
    """Each of `count` streams [n, count d] plus what `activated` [n, d] has more than the first: [n, count d].

    It is times one plus a coefficient [n, count] of each stream (Baykal et al. 2023). Raises ValueError: shapes do
    not fit.
    """
    _expect_width(coefficients, count)
    _expect_width(streams, count * activated.width)
    inputs = [streams, activated, coefficients]
    return ops.record("correct_streams", inputs, [], {"count": count}, streams.width)


def _expect_width(x: Value, width: int) -> None:
    if x.width != width:
        raise ValueError(f"Rows of {x.width} are not of {width}.")
