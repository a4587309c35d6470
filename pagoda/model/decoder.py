"""The dense decoder that Llama, Mistral, Qwen2 and Qwen3 share.

The families differ in switches only: biases, norms of queries and keys, sliding windows, rotary scaling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic

import torch
from torch import Tensor

from pagoda.backend.base import (
    Backend,
    HeadNorms,
    KVCache,
    LinearT,
    Operations,
    PlanT,
    StepInput,
    TokenBatch,
    ValueT,
)
from pagoda.backend.weights import GroupedWeight, LinearWeight
from pagoda.errors import ConfigError
from pagoda.model.config import ModelConfig
from pagoda.model.rotary import rotary_frequencies
from pagoda.model.weights import WeightSource


@dataclass(frozen=True)
class Layer(Generic[LinearT]):
    attention_norm: Tensor
    qkv: LinearT
    """Queries, keys and values, one above the other."""
    head_norms: HeadNorms | None
    attention_out: LinearT
    window: int | None
    mlp_norm: Tensor
    gate_up: LinearT
    down: LinearT


class Decoder(Generic[LinearT, PlanT]):
    """Tokens in, hidden states and logits out; K and V go to the caches."""

    def __init__(
        self,
        config: ModelConfig,
        backend: Backend[LinearT, PlanT],
        source: WeightSource,
        dtype: torch.dtype,
        caches: Sequence[KVCache],
    ) -> None:
        """Takes the weights out of `source`; `caches` has one entry per layer.

        Raises:
            ConfigError: a weight is missing or has the wrong shape.
        """
        loader = _Loader(config, backend, source, dtype)
        self._config = config
        self._backend = backend
        self._layers = [loader.layer(index) for index in range(config.num_layers)]
        self._norm = loader.tensor("model.norm.weight", config.hidden_size)
        vocab, hidden = config.vocab_size, config.hidden_size
        self._embedding = loader.linear({"model.embed_tokens": vocab}, hidden, bias=False)
        self._head = (
            self._embedding
            if config.tie_word_embeddings
            else loader.linear({"lm_head": vocab}, hidden, bias=False)
        )
        frequencies, self._rotary_scale = rotary_frequencies(config)
        self._frequencies = frequencies.to(backend.device)
        self._caches = caches
        self._compiled = backend.compile(self._hidden_states)

    def forward(self, batch: TokenBatch) -> Tensor:
        """Normed hidden states behind the last layer, [n, hidden], which `logits` takes."""
        backend = self._backend
        plan = backend.plan_attention(batch, self._config.num_heads, self._caches[0])
        table = backend.rotary_table(batch.positions, self._frequencies, self._rotary_scale)
        return self._compiled(StepInput(batch.token_ids, table, plan))

    def logits(self, hidden: Tensor) -> Tensor:
        """Of hidden states [m, hidden]: [m, vocab] float32."""
        return self._backend.linear(hidden, self._head).float()

    def greedy(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The likeliest token of each row of hidden states [m, hidden], and whether its logits are finite."""
        tokens, _, finite = self._backend.greedy(hidden, self._head)
        return tokens, finite

    def _hidden_states(
        self, ops: Operations[ValueT, LinearT, PlanT], step: StepInput[ValueT, PlanT]
    ) -> ValueT:
        eps = self._config.rms_norm_eps
        # The norm in front of a layer is taken together with the sum behind the one before.
        norms = [layer.attention_norm for layer in self._layers[1:]] + [self._norm]
        x = ops.linear_rows(step.token_ids, self._embedding)
        h = ops.rms_norm(x, self._layers[0].attention_norm, eps)
        for layer, cache, next_norm in zip(self._layers, self._caches, norms, strict=True):
            x, h = ops.add_rms_norm(
                x, self._attention(ops, step, layer, cache, h), layer.mlp_norm, eps
            )
            mixed = ops.linear(ops.silu_and_mul(ops.linear(h, layer.gate_up)), layer.down)
            x, h = ops.add_rms_norm(x, mixed, next_norm, eps)
        return h

    def _attention(
        self,
        ops: Operations[ValueT, LinearT, PlanT],
        step: StepInput[ValueT, PlanT],
        layer: Layer[LinearT],
        cache: KVCache,
        h: ValueT,
    ) -> ValueT:
        qkv = ops.linear(h, layer.qkv)
        queries = ops.rotate_and_cache(qkv, cache, step.plan, step.rotary_table, layer.head_norms)
        scale = self._config.head_dim**-0.5
        attended = ops.attention(queries, cache, step.plan, scale=scale, window=layer.window)
        return ops.linear(attended, layer.attention_out)


class _Loader(Generic[LinearT]):
    """From the names and shapes of a Hugging Face checkpoint to prepared weights."""

    def __init__(
        self,
        config: ModelConfig,
        backend: Backend[LinearT, PlanT],
        source: WeightSource,
        dtype: torch.dtype,
    ) -> None:
        self._config = config
        self._prepare_linear = backend.prepare_linear
        self._source = source
        self._dtype = dtype
        self._device = backend.device

    def layer(self, index: int) -> Layer[LinearT]:
        config, prefix = self._config, f"model.layers.{index}"
        hidden, q_size = config.hidden_size, config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        return Layer(
            attention_norm=self.tensor(f"{prefix}.input_layernorm.weight", hidden),
            qkv=self.linear(
                {
                    f"{attention}.q_proj": q_size,
                    f"{attention}.k_proj": kv_size,
                    f"{attention}.v_proj": kv_size,
                },
                hidden,
                bias=config.qkv_bias,
            ),
            head_norms=self._head_norms(attention) if config.qk_norm else None,
            attention_out=self.linear(
                {f"{attention}.o_proj": hidden}, q_size, bias=config.output_bias
            ),
            window=config.sliding_windows[index],
            mlp_norm=self.tensor(f"{prefix}.post_attention_layernorm.weight", hidden),
            gate_up=self.linear(
                {
                    f"{mlp}.gate_proj": config.intermediate_size,
                    f"{mlp}.up_proj": config.intermediate_size,
                },
                hidden,
                bias=config.mlp_bias,
            ),
            down=self.linear(
                {f"{mlp}.down_proj": hidden}, config.intermediate_size, bias=config.mlp_bias
            ),
        )

    def tensor(self, name: str, *shape: int) -> Tensor:
        return self._joined({name: shape[0]}, *shape[1:])

    def linear(self, parts: dict[str, int], in_size: int, *, bias: bool) -> LinearT:
        """Linear maps of the same input, as one; `parts` holds their names and output sizes."""
        weights = [
            self._source.linear(name, size, in_size, self._dtype) for name, size in parts.items()
        ]
        _check_input_orders(list(parts), weights)
        biases = {f"{name}.bias": size for name, size in parts.items()}
        return self._prepare_linear(weights, self._joined(biases) if bias else None, self._dtype)

    def _head_norms(self, attention: str) -> HeadNorms:
        queries, keys = (
            self.tensor(f"{attention}.{name}_norm.weight", self._config.head_dim) for name in "qk"
        )
        return HeadNorms(queries, keys, self._config.rms_norm_eps)

    def _joined(self, parts: dict[str, int], *inner: int) -> Tensor:
        shape = (sum(parts.values()), *inner)
        joined = torch.empty(shape, dtype=self._dtype, device=self._device)
        for name, out in zip(parts, torch.split(joined, list(parts.values())), strict=True):
            self._source.read_into(name, out)
        return joined


def _check_input_orders(names: Sequence[str], weights: Sequence[LinearWeight]) -> None:
    """Maps of the same input are computed together, so they must take its elements in one order."""
    orders = [
        (name, weight.input_order)
        for name, weight in zip(names, weights, strict=True)
        if isinstance(weight, GroupedWeight)
    ]
    for name, order in orders[1:]:
        first_name, first = orders[0]
        same = order is first or (
            order is not None and first is not None and torch.equal(order, first)
        )
        if not same:
            raise ConfigError(
                f"{first_name} and {name} have the same inputs but group them in different orders (act-order); "
                "quantize them with one order."
            )
