"""The dense decoder that Llama, Mistral, Qwen2 and Qwen3 share.

The families differ in switches only: biases, norms of queries and keys, sliding windows, rotary scaling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic

import torch
from torch import Tensor

from pagoda.backend.base import Backend, HeadNorms, KVCache, LinearT, PlanT, TokenBatch
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
    ) -> None:
        """Takes the weights out of `source`.

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

    def forward(self, batch: TokenBatch, caches: Sequence[KVCache]) -> Tensor:
        """Hidden states behind the last layer, [n, hidden]; `caches` has one entry per layer."""
        ops, config = self._backend, self._config
        plan = ops.plan_attention(batch, config.num_heads, caches[0])
        table = ops.rotary_table(batch.positions, self._frequencies, self._rotary_scale)
        x = self._embed(batch.token_ids)
        h = ops.rms_norm(x, self._layers[0].attention_norm, config.rms_norm_eps)
        for index, (layer, cache) in enumerate(zip(self._layers, caches, strict=True)):
            attended = self._attention(layer, h, table, cache, plan)
            x, h = ops.add_rms_norm(x, attended, layer.mlp_norm, config.rms_norm_eps)
            mixed = ops.linear(ops.silu_and_mul(ops.linear(h, layer.gate_up)), layer.down)
            if index + 1 < len(self._layers):
                norm = self._layers[index + 1].attention_norm
                x, h = ops.add_rms_norm(x, mixed, norm, config.rms_norm_eps)
        return x + mixed

    def logits(self, hidden: Tensor) -> Tensor:
        """Of hidden states [m, hidden]: [m, vocab] float32."""
        ops = self._backend
        h = ops.rms_norm(hidden, self._norm, self._config.rms_norm_eps)
        return ops.linear(h, self._head).float()

    def _attention(
        self,
        layer: Layer[LinearT],
        h: Tensor,
        table: tuple[Tensor, Tensor],
        cache: KVCache,
        plan: PlanT,
    ) -> Tensor:
        ops = self._backend
        qkv = ops.linear(h, layer.qkv)
        queries = ops.rotate_and_cache(qkv, cache, plan, table, layer.head_norms)
        scale = self._config.head_dim**-0.5
        attended = ops.attention(queries, cache, plan, scale=scale, window=layer.window)
        return ops.linear(attended.flatten(1), layer.attention_out)

    def _embed(self, token_ids: Tensor) -> Tensor:
        return self._backend.linear_rows(token_ids, self._embedding)


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
