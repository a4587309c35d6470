"""Which part of a model one rank holds (Shoeybi et al. 2019, Megatron-LM).

Maps from hidden states are split by outputs, maps back to them by inputs, so that a layer needs two sums over all
ranks: behind attention and behind the MLP. Embedding and head are split by the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from pagoda.backend.weights import (
    DenseWeight,
    GroupedWeight,
    Int8Weight,
    LinearWeight,
    dequantize,
    weight_shape,
)
from pagoda.errors import ConfigError
from pagoda.model.config import ExpertMaps, LinearMap, ModelConfig, Split
from pagoda.model.weight_formats import DenseFormat, Quantization, format_bytes
from pagoda.model.weights import WeightSource
from pagoda.parallel.config import ParallelConfig, RankPlace, expert_share

_CHANNEL_UNITS = (128, 64, 32)
"""Channels are cut between multiples of one of these where possible: between groups of quantized weights."""


@dataclass(frozen=True)
class Part:
    """Of a linear map [out, in]."""

    outputs: range
    inputs: range


@dataclass(frozen=True)
class Shard:
    """One rank's part of a model."""

    config: ModelConfig
    layers: range
    """Of the rank's stage."""
    tp_rank: int = 0
    tp_size: int = 1
    expert_parallel: bool = False
    """Whether the tensor-parallel ranks share out whole experts."""

    @property
    def is_first(self) -> bool:
        """Whether the stage embeds tokens."""
        return self.layers.start == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage has the head, and samples."""
        return self.layers.stop == self.config.num_layers

    @property
    def heads(self) -> range:
        """This rank's query heads."""
        return _even_share(self.config.num_heads, self.tp_rank, self.tp_size)

    @property
    def kv_heads(self) -> range:
        """This rank's KV heads; with more ranks than KV heads, several ranks hold the same one."""
        heads = self.config.num_kv_heads
        if heads >= self.tp_size:
            return _even_share(heads, self.tp_rank, self.tp_size)
        head = self.tp_rank * heads // self.tp_size
        return range(head, head + 1)

    @property
    def num_heads(self) -> int:
        return len(self.heads)

    @property
    def num_kv_heads(self) -> int:
        return len(self.kv_heads)

    @property
    def vocabulary(self) -> range:
        """The tokens whose rows of embedding and head this rank holds."""
        return self.channels(self.config.vocab_size)

    @property
    def vocabulary_share(self) -> int:
        """The most tokens that a rank holds; the last ranks may have fewer."""
        return _share_of_channels(self.config.vocab_size, self.tp_size)

    def channels(self, count: int) -> range:
        """This rank's part of `count` channels, cut between groups of quantized weights."""
        each = _share_of_channels(count, self.tp_size)
        return range(min(count, self.tp_rank * each), min(count, (self.tp_rank + 1) * each))

    def part_of(self, linear_map: LinearMap) -> Part:
        """What this rank holds of a linear map."""
        head_dim = self.config.head_dim
        outputs, inputs = range(linear_map.outputs), range(linear_map.inputs)
        match linear_map.split:
            case Split.HEADS:
                outputs = _times(self.heads, head_dim)
            case Split.KV_HEADS:
                outputs = _times(self.kv_heads, head_dim)
            case Split.FROM_HEADS:
                inputs = _times(self.heads, head_dim)
            case Split.INNER | Split.VOCABULARY:
                outputs = self.channels(linear_map.outputs)
            case Split.FROM_INNER:
                inputs = self.channels(linear_map.inputs)
            case Split.EXPERT_INNER if not self.expert_parallel:
                outputs = self.channels(linear_map.outputs)
            case Split.FROM_EXPERT_INNER if not self.expert_parallel:
                inputs = self.channels(linear_map.inputs)
        return Part(outputs, inputs)

    def expert_maps(self, layer: int) -> ExpertMaps | None:
        """Of the experts that this rank holds, `experts` of all; None where the layer is dense."""
        maps = self.config.expert_maps(layer)
        return maps and replace(maps, experts=maps.experts[self.experts.start : self.experts.stop])

    @property
    def experts(self) -> range:
        """The experts of each layer that this rank holds, whole or a part of every one."""
        experts = self.config.experts
        if experts is None:
            return range(0)
        if not self.expert_parallel:
            return range(experts.num_experts)
        return expert_share(experts.num_experts, self.tp_rank, self.tp_size)

    def linear_maps(self) -> Iterator[LinearMap]:
        """Those that this rank holds a part of."""
        config = self.config
        for layer in self.layers:
            yield from config.attention_maps(layer)
            experts = self.expert_maps(layer)
            if experts is None:
                yield from config.mlp_maps(layer)
            else:
                yield experts.router
                for mlp in experts.experts:
                    yield from mlp
        if self.is_first:
            yield config.embedding
        if self.is_last and not (self.is_first and config.tie_word_embeddings):
            yield config.head

    def weight_bytes(self, quantization: Quantization | None, itemsize: int) -> int:
        """Of the rank's weights in memory; `itemsize` is that of the activations' dtype.

        Raises:
            ConfigError: a linear map cannot be quantized so.
        """
        total = self.config.num_vector_elements(len(self.layers)) * itemsize
        for m in self.linear_maps():
            held_as = (
                DenseFormat() if quantization is None else quantization.format_of(m.name, m.inputs)
            )
            part = self.part_of(m)
            total += format_bytes(held_as, len(part.outputs), len(part.inputs), itemsize)
        return total


def whole(config: ModelConfig) -> Shard:
    """All of a model."""
    return Shard(config, range(config.num_layers))


def shard_of(config: ModelConfig, parallel: ParallelConfig, place: RankPlace) -> Shard:
    """What the rank at `place` holds.

    Raises:
        ConfigError: the model cannot be split so.
    """
    tp_size, num_stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    heads, kv_heads = config.num_heads, config.num_kv_heads
    if heads % tp_size or (kv_heads % tp_size and tp_size % kv_heads):
        raise ConfigError(
            f"--tensor-parallel-size {tp_size} does not split the model's {heads} attention heads and "
            f"{kv_heads} KV heads evenly."
        )
    if num_stages > config.num_layers:
        raise ConfigError(
            f"--pipeline-parallel-size {num_stages} is more than the model's {config.num_layers} layers."
        )
    if parallel.expert_parallel:
        _check_experts(config, tp_size)
    return Shard(
        config,
        split_layers(config, num_stages)[place.pp],
        tp_rank=place.tp,
        tp_size=tp_size,
        expert_parallel=parallel.expert_parallel,
    )


def _check_experts(config: ModelConfig, tp_size: int) -> None:
    if config.experts is None:
        raise ConfigError(
            "--enable-expert-parallel needs a model with experts, such as Qwen3-MoE or Mixtral; leave it out."
        )
    if tp_size > config.experts.num_experts:
        raise ConfigError(
            f"--tensor-parallel-size {tp_size} is more than the model's {config.experts.num_experts} experts, and "
            "with --enable-expert-parallel every rank needs one at least."
        )


def split_layers(config: ModelConfig, num_stages: int) -> list[range]:
    """The layers of each stage, so that the costliest stage is as cheap as can be.

    The cost of a stage is the number of weights that a token is multiplied with; the head is one more cost of the
    last stage. Every stage has a layer at least.
    """
    costs = [config.weights_per_token(layer) for layer in range(config.num_layers)]
    head = config.head.outputs * config.head.inputs
    # The cheapest limit under which so many stages are enough, found by halving.
    low, high = max(max(costs), costs[-1] + head), sum(costs) + head
    while low < high:
        middle = (low + high) // 2
        if len(_fill_stages(costs, head, middle)) <= num_stages:
            high = middle
        else:
            low = middle + 1
    ends = _fill_stages(costs, head, low)
    while len(ends) < num_stages:
        longest = max(pairwise([0, *ends]), key=lambda stage: stage[1] - stage[0])
        ends = sorted([*ends, sum(longest) // 2])
    return [range(start, end) for start, end in pairwise([0, *ends])]


def _fill_stages(costs: list[int], head: int, limit: int) -> list[int]:
    """Where stages end that are filled up to `limit`, from the last, which has the head, to the first."""
    ends = [len(costs)]
    total = head
    for layer in reversed(range(len(costs))):
        if total + costs[layer] > limit:
            ends.append(layer + 1)
            total = 0
        total += costs[layer]
    return ends[::-1]


class PartialWeights(Protocol):
    """Gives parts of a model's weights."""

    def read_into(self, name: str, out: Tensor) -> None:
        """See `WeightSource`; the whole tensor."""
        ...

    def linear(self, linear_map: LinearMap, part: Part, dtype: torch.dtype) -> LinearWeight:
        """The part of a linear map's weight; see `WeightSource.linear`.

        Raises:
            ConfigError: there is no such map, or it cannot be cut so.
        """
        ...


class CutWeights:
    """Cuts parts out of what a source gives."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source

    def read_into(self, name: str, out: Tensor) -> None:
        self._source.read_into(name, out)

    def linear(self, linear_map: LinearMap, part: Part, dtype: torch.dtype) -> LinearWeight:
        name = linear_map.name
        weight = self._source.linear(name, linear_map.outputs, linear_map.inputs, dtype)
        return take_part(name, weight, part, dtype)


def take_part(name: str, weight: LinearWeight, part: Part, dtype: torch.dtype) -> LinearWeight:
    """The part of a weight that a rank holds; `dtype` is that of activations.

    Raises:
        ConfigError: the inputs are cut inside a group that shares a scale.
    """
    if (len(part.outputs), len(part.inputs)) == weight_shape(weight):
        return weight
    outputs, inputs = _slice(part.outputs), _slice(part.inputs)
    if isinstance(weight, DenseWeight):
        return DenseWeight(weight.values[outputs, inputs].contiguous())
    if isinstance(weight, Int8Weight):
        return Int8Weight(weight.values[outputs, inputs].contiguous(), weight.scales[outputs])
    return _part_of_groups(name, weight, part, dtype)


def _part_of_groups(
    name: str, weight: GroupedWeight, part: Part, dtype: torch.dtype
) -> LinearWeight:
    outputs, inputs, size = _slice(part.outputs), _slice(part.inputs), weight.group_size
    order = weight.input_order
    if len(part.inputs) == weight_shape(weight)[1]:
        groups = slice(None)
    elif order is not None:
        # A rank's activations lie scattered over all groups; as numbers they need no groups.
        return DenseWeight(dequantize(weight)[outputs, inputs].to(dtype).contiguous())
    elif inputs.start % size or inputs.stop % size:
        raise ConfigError(
            f"{name}.weight has groups of {size} inputs, which the tensor-parallel ranks would cut at input "
            f"{inputs.start if inputs.start % size else inputs.stop}; take a smaller --tensor-parallel-size."
        )
    else:
        groups = slice(inputs.start // size, inputs.stop // size)
    return GroupedWeight(
        weight.codes[outputs, inputs].contiguous(),
        weight.scales[outputs, groups].contiguous(),
        None if weight.offsets is None else weight.offsets[outputs, groups].contiguous(),
        bits=weight.bits,
        group_size=size,
        input_order=order,
    )


def _share_of_channels(count: int, ranks: int) -> int:
    unit = next((unit for unit in _CHANNEL_UNITS if count % (unit * ranks) == 0), 1)
    return -(-count // (unit * ranks)) * unit


def _even_share(count: int, rank: int, ranks: int) -> range:
    each = count // ranks
    return range(rank * each, (rank + 1) * each)


def _times(heads: range, head_dim: int) -> range:
    return range(heads.start * head_dim, heads.stop * head_dim)


def _slice(indices: range) -> slice:
    return slice(indices.start, indices.stop)
