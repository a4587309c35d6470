# SPDX-License-Identifier: Apache-2.0
"""Operations that a model needs and others do not, told by its specification before a weight is read."""

from __future__ import annotations

from pagoda.checkpoints.distances import DistanceBuckets
from pagoda.checkpoints.layer_spec import ExpertsSpec, LayerSpec, MlpSpec
from pagoda.checkpoints.model_spec import ModelSpec

_GATED = {"silu": "silu_and_mul", "gelu_tanh": "gelu_and_mul", "gelu": "gelu_erf_and_mul"}
_PLAIN = {"relu2": {"relu", "mul"}}
"""Operations of activations that are not one of the same name."""


def needed_operations(spec: ModelSpec) -> frozenset[str]:
    """Operations in the graphs of a model on one rank, without those that all models have."""
    found = {"layer_norm" if spec.norm.kind == "layer" else "rms_norm"}
    for layer in set(spec.layers):
        found |= _of_attention(layer) | _of_mlp(layer.mlp)
    if any(table.dim for table in spec.rotary.values()):
        found.add("rotary_table")
    factors = spec.multipliers
    if any(factor != 1 for factor in (factors.embedding, factors.residual, factors.logits)):
        found.add("scale")
    activations = {it.activation for layers in spec.maps.values() for it in layers}
    found |= activations - {"tanh", "identity"}
    if factors.logits_softcap is not None or "tanh" in activations:
        found.add("softcap")
    if spec.beside is not None:
        found |= spec.beside.operations
    if spec.gives_logits:
        found.add("linear_argmax")
    return frozenset(found)


def _of_attention(layer: LayerSpec) -> set[str]:
    found = {"scale"} if (layer.input_factor, layer.output_factor) != (1, 1) else set()
    if layer.normed_residuals not in (None, (1, 1)):
        found.add("scale")
    if layer.shared is not None:
        found.add("join_columns")
    if layer.mixed_with:
        found.add("scale")
    if layer.replaced is not None:
        return found
    attention = layer.attention
    if attention.temperature is not None:
        found |= {"position_scale", "scale_rows"}
    if layer.kind is not None:
        return found | layer.kind.operations
    found.add("rotate_and_cache")
    if attention.distances is None:
        found.add("alibi_attention" if attention.alibi else "attention")
    elif isinstance(attention.distances, DistanceBuckets):
        found.add("relative_attention")
    else:
        found |= {"columns", "head_linear", "disentangled_attention"}
    if attention.clip is not None:
        found.add("clip")
    if attention.qk_norm == "layer":
        found.add("layer_norm_heads")
    if attention.norms_rotated or attention.kv_layer is not None:
        found.add("rotate_heads")
    if attention.value_norm or attention.kv_layer is not None or attention.qk_norm == "each":
        found.add("rms_norm_heads")
    if attention.value_scale != 1:
        found.add("scale")
    if attention.output_gate:
        found |= {"scale_heads" if attention.gates_heads else "mul", "sigmoid"}
    return found


def _of_mlp(mlp: MlpSpec | ExpertsSpec | None) -> set[str]:
    if mlp is None:
        return set()
    if isinstance(mlp, MlpSpec):
        found = {"scale"} if mlp.down_factor != 1 else set()
        plain = _PLAIN.get(mlp.activation, {mlp.activation})
        if mlp.deviations is not None:
            return found | {"above_deviations", "columns", "gelu_tanh", "mul"}
        if mlp.limit is not None:
            return found | {"columns", "silu", "clip", "mul"}
        if mlp.gate_factor != 1 or (mlp.gated and mlp.activation == "relu2"):
            scale = {"scale"} if mlp.gate_factor != 1 else set()
            return found | plain | scale | {"columns", "mul"}
        return found | ({_GATED[mlp.activation]} if mlp.gated else plain)
    found = {"experts"} | _of_mlp(mlp.shared)
    if mlp.apart:
        found |= {"expert_weights", "rms_norm"}
    if mlp.identities:
        found |= {"expert_weights", "columns", "scale_rows"}
    if mlp.jitter is not None:
        found.add("sparse_mixing")
    if mlp.scores_shared:
        found |= {"sigmoid", "scale_rows"}
    return found
