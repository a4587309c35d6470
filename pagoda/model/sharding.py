# SPDX-License-Identifier: Apache-2.0
"""Shards: the part of a model that one rank holds (Shoeybi et al. 2019, Megatron-LM).

Maps from hidden states are split by outputs, maps back to them by inputs, so that a layer needs two sums over all
ranks: behind attention and behind the MLP. Embedding and head are split by the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from pagoda.backend.weights import (
    BlockWeight,
    DenseWeight,
    Fp8Weight,
    GroupedWeight,
    Int8Weight,
    LinearWeight,
    dequantize,
    weight_format,
    weight_shape,
)
from pagoda.checkpoints.distances import Disentangled
from pagoda.checkpoints.layer_runs import layer_runs
from pagoda.checkpoints.layer_spec import ExpertsSpec, MlpSpec
from pagoda.checkpoints.linears import LinearRole, LinearSpec
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.scan_layers import Mamba2Spec, MambaSpec
from pagoda.checkpoints.state_layers import StateUnits
from pagoda.checkpoints.topology import can_share, check_shares, nearest_sizes
from pagoda.checkpoints.weight_formats import (
    BLOCK_SIZES,
    BlockFormat,
    DenseFormat,
    Fp8Format,
    GroupedFormat,
    Quantization,
    WeightFormat,
    format_bytes,
    part_format,
)
from pagoda.errors import ConfigError
from pagoda.parallel.config import ParallelConfig, RankPlace, channel_share, even_share

_TABLES = {LinearRole.EMBEDDING, LinearRole.HEAD, LinearRole.WHOLE}
_EXPERTS = {LinearRole.EXPERT_IN, LinearRole.EXPERT_OUT}
_VECTOR_ITEMSIZE = 4
"""Bytes of an element of norms and biases, which are float32 in memory."""


@dataclass(frozen=True)
class LinearShard:
    """Outputs and inputs of a linear layer [out, in] that a rank holds."""

    outputs: range
    inputs: range


@dataclass(frozen=True)
class Shard:
    """One rank's part of a model."""

    config: ModelSpec
    layers: range
    tp_rank: int = 0
    tp_size: int = 1
    expert_parallel: bool = False
    """Tensor-parallel ranks share out whole experts, instead of a part of each."""
    dp_attention: bool = False
    """Each rank has all of attention, for requests of its own."""

    @property
    def is_first(self) -> bool:
        """True if the stage embeds tokens."""
        return self.layers.start == 0

    @property
    def is_last(self) -> bool:
        """True if the stage has the head, and samples."""
        return self.layers.stop == self.config.num_layers

    @property
    def attention_ranks(self) -> tuple[int, int]:
        """This rank among those that share the heads of attention and the channels of states, and their number."""
        return (0, 1) if self.dp_attention else (self.tp_rank, self.tp_size)

    @property
    def heads(self) -> range:
        return even_share(self.config.num_heads, *self.attention_ranks)

    @property
    def kv_heads(self) -> range:
        """This rank's KV heads; with more ranks than KV heads, several ranks hold the same one."""
        heads, (rank, size) = self.config.num_kv_heads, self.attention_ranks
        first = rank * heads // size
        return range(first, first + max(1, heads // size))

    @property
    def num_kv_heads(self) -> int:
        return len(self.kv_heads)

    @property
    def kv_vectors(self) -> tuple[int, int]:
        """Vectors that a layer with attention keeps of a token on this rank, and their numbers."""
        of_head, numbers = self.config.kv_vectors
        return of_head * self.num_kv_heads, numbers

    @property
    def vocabulary(self) -> range:
        """The tokens whose rows of embedding and head this rank holds."""
        return self.channels(self.config.vocab_size)

    @property
    def vocabulary_shares(self) -> list[int]:
        """Number of tokens whose logits each rank computes."""
        vocab, size = self.config.head.outputs, self.tp_size
        return [len(channel_share(vocab, rank, size)) for rank in range(size)]

    def channels(self, count: int) -> range:
        return channel_share(count, self.tp_rank, self.tp_size)

    @property
    def dispatches(self) -> bool:
        """True if each rank sends its tokens to the ranks that hold their experts."""
        return self.dp_attention and self.expert_parallel

    @property
    def first_experts(self) -> list[int]:
        """The first expert of each rank that holds some whole."""
        count = 0 if self.config.experts is None else self.config.experts.num_stored
        return [even_share(count, rank, self.tp_size).start for rank in range(self.tp_size)]

    @cached_property
    def _shared_experts(self) -> frozenset[str]:
        """Names of linear layers of experts that every token goes through."""
        specs = ((layer, self.config.layers[layer].mlp) for layer in self.layers)
        found = [self.config.linears_of(at, it) for at, it in specs if isinstance(it, ExpertsSpec)]
        return frozenset(linear.name for it in found for linear in it.shared or ())

    def part_of(self, linear: LinearSpec) -> LinearShard:
        outputs, inputs = range(linear.outputs), range(linear.inputs)
        if self.dispatches and linear.name in self._shared_experts:
            return LinearShard(outputs, inputs)  # each rank computes them for its own tokens
        match linear.role:
            case LinearRole.QUERY | LinearRole.LATENT_HEADS:
                outputs = _times(self.heads, linear.outputs // self.config.num_heads)
            case LinearRole.KEY | LinearRole.VALUE:
                outputs = _times(self.kv_heads, linear.outputs // self.config.num_kv_heads)
            case LinearRole.ATTENTION_OUT:
                inputs = _times(self.heads, linear.inputs // self.config.num_heads)
            case LinearRole.EXPERT_IN | LinearRole.EXPERT_OUT if self.expert_parallel:
                pass  # experts are whole
            case LinearRole.MLP_IN | LinearRole.EXPERT_IN | LinearRole.EMBEDDING | LinearRole.HEAD:
                outputs = self.channels(linear.outputs)
            case LinearRole.MLP_OUT | LinearRole.EXPERT_OUT:
                inputs = self.channels(linear.inputs)
            case LinearRole.STATE_IN | LinearRole.STATE_GATE:
                outputs = self.state_share(linear.outputs, linear.grain)
            case LinearRole.STATE_OUT:
                inputs = self.state_share(linear.inputs, linear.grain)
        return LinearShard(outputs, inputs)

    def states(self, layer: int) -> tuple[StateUnits, ...]:
        """This rank's states of a layer; none of one with attention."""
        state = self.config.layers[layer].state
        if state is None:
            return ()
        linears = self.config.attention_linears(layer).into
        return state.states([len(self.part_of(linear).outputs) for linear in linears])

    def state_units(self, layer: int) -> list[list[range]]:
        """This rank's units of each state of a layer, by their numbers in the whole layer."""
        linears = self.config.attention_linears(layer).into
        numbers: list[list[range]] = []
        for state in self.states(layer):
            held = [self.part_of(linears[index]).outputs for index in state.maps]
            outputs = sum(map(len, held)) // state.units
            firsts = accumulate((linears[index].outputs for index in state.maps), initial=0)
            numbers.append(
                [
                    range((first + it.start) // outputs, (first + it.stop) // outputs)
                    for first, it in zip(firsts, held, strict=False)
                ]
            )
        return numbers

    def state_share(self, count: int, grain: int) -> range:
        """This rank's channels of a layer with a state, of which `grain` neighbours stay together.

        With a grain of 0 they are one number of each head, which go where heads go. Several ranks hold the same
        ones where there are more ranks than parts."""
        if grain == 0:
            return even_share(count, *self.attention_ranks)
        parts, (rank, ranks) = count // grain, self.attention_ranks
        if parts < ranks:
            return _times(range(rank * parts // ranks, rank * parts // ranks + 1), grain)
        if grain == 1:
            return channel_share(count, *self.attention_ranks)
        return _times(even_share(count // grain, *self.attention_ranks), grain)

    @property
    def experts(self) -> range:
        """The experts of each layer that this rank holds, whole or a part of every one."""
        experts = self.config.experts
        if experts is None:
            return range(0)
        if not self.expert_parallel:
            return range(experts.num_stored)
        return even_share(experts.num_stored, self.tp_rank, self.tp_size)

    def linears(self) -> Iterator[LinearSpec]:
        """Linear layers that this rank holds a part of."""
        config = self.config
        for layer in self.layers:
            yield from config.layer_linears(layer, self.experts)
        if config.draft_head is not None:
            yield from config.outer_linears
            return
        if self.is_first:
            yield config.embedding
            yield from config.encoder_linears
            if config.beside is not None:
                yield from config.beside.outer_linears(config.hidden_size)
        elif config.cross_encoder is not None:  # which all stages have
            yield from [config.embedding] * (config.audio is None)
            yield from config.cross_encoder.linears()
        tied = self.is_first and config.tie_word_embeddings
        if self.is_last and config.gives_logits and not tied:
            yield config.head
        if self.is_last:
            yield from config.map_linears

    def weight_bytes(self, quantization: Quantization | None, itemsize: int) -> int:
        """Bytes of the rank's weights in memory; `itemsize` is that of the activations' dtype."""
        return self._vector_bytes() + self._linear_bytes(set(LinearRole), quantization, itemsize)

    def forward_bytes(self, quantization: Quantization | None, itemsize: int) -> int:
        """Bytes of weights that a forward pass reads, without the head and the embedding table."""
        roles = set(LinearRole) - _TABLES
        return self._vector_bytes() + self._linear_bytes(roles, quantization, itemsize)

    def expert_bytes(self, quantization: Quantization | None, itemsize: int) -> int:
        """Bytes of all experts that the rank holds, without routers."""
        return self._linear_bytes(_EXPERTS, quantization, itemsize)

    def activation_width(self) -> int:
        """Numbers of a token in the widest layer, about: its hidden state, which parallel parts of a layer read
        later and add up behind, and what all linear layers give."""
        kinds = {self.config.layers[layer]: layer for layer in self.layers}
        config, hidden = self.config, self.config.hidden_size
        return max(
            one.held * hidden + self._outputs_of(layer) + self._scanned_of(layer)
            for one, layer in kinds.items()
        ) + (0 if config.beside is None else config.beside.width(hidden) + hidden)

    def _scanned_of(self, layer: int) -> int:
        """Numbers that a convolution in front of a scan gives, of layers with one."""
        has_scan = isinstance(self.config.layers[layer].state, Mamba2Spec | MambaSpec)
        into = self.config.attention_linears(layer).into if has_scan else ()
        return sum(len(self.part_of(linear).outputs) for linear in into)

    def _outputs_of(self, layer: int) -> int:
        """Outputs of a layer's linear layers that this rank holds, with those of a token's experts only, and what
        a plain MLP, or a norm, makes of its first ones: a gated one writes over them."""
        mlp = self.config.layers[layer].mlp
        has_copy = isinstance(mlp, MlpSpec) and (mlp.inner_norm or not mlp.gated)
        dense = held = 0
        for linear in self.config.layer_linears(layer, self.experts):
            outputs = len(self.part_of(linear).outputs)
            if linear.role in _EXPERTS:
                held += outputs
            else:
                dense += outputs * (1 + (has_copy and linear.role is LinearRole.MLP_IN))
        experts = self.config.experts
        used = 0 if experts is None else experts.routing.experts_per_token
        return dense + held * used // max(1, len(self.experts))

    def flops_per_token(self) -> int:
        """Floating-point operations of products with weights, without the head, which few tokens reach."""
        dense = held = 0
        for linear in self.linears():
            part = self.part_of(linear)
            weights = len(part.outputs) * len(part.inputs)
            if linear.role in _EXPERTS:
                held += weights
            elif linear.role not in _TABLES:
                dense += weights
        experts = self.config.experts
        if experts is not None:
            held = held * experts.routing.experts_per_token // experts.routing.num_experts
        return 2 * (dense + held)

    def _linear_bytes(
        self, roles: Set[LinearRole], quantization: Quantization | None, itemsize: int
    ) -> int:
        total = 0
        # By names, as layers may share maps.
        linears = {linear.name: linear for linear in self.linears() if linear.role in roles}
        for linear in linears.values():
            part = self.part_of(linear)
            stored_format = format_of_part(linear, _format_of(linear, quantization), part.inputs)
            total += format_bytes(stored_format, len(part.outputs), len(part.inputs), itemsize)
        return total

    def _vector_bytes(self) -> int:
        """Bytes of norms, and of this rank's parts of biases, all of them in float32."""
        config = self.config
        total = sum(size for _, size in config.last_norm_tensors) * self.is_last
        total += sum(size for _, size in config.embedding_norm_tensors) * self.is_first
        total += sum(size for _, size in config.map_vectors) * self.is_last
        total += self.is_last * config.head_bias * len(self.vocabulary)
        total += self.is_first * bool(config.embedding_projection) * config.hidden_size
        total += len(self.layers) * self._distance_numbers()
        for layer in self.layers:
            attention, spec = config.attention_linears(layer), config.layers[layer]
            tensors = {linear.stored.tensor for linear in attention.into}
            gates = config.gate_linears(layer)
            if spec.state is not None:
                gates = [gate for gate in gates if gate.stored.tensor in tensors]
            into = [*attention.into, *gates]
            biases = into * spec.attention.qkv_bias
            biases += [*filter(None, (attention.out,))] * spec.attention.output_bias
            if isinstance(spec.mlp, MlpSpec):
                biases += config.mlp_biases(layer)
            elif spec.mlp is not None and spec.mlp.bias:
                sparse = config.linears_of(layer, spec.mlp)
                held = sparse.experts[self.experts.start : self.experts.stop]
                biases += [sparse.router, *(linear for expert in held for linear in expert)]
            total += sum(size for _, size in config.norm_tensors(layer))
            total += sum(len(self.part_of(m).outputs) for m in biases)
        return total * _VECTOR_ITEMSIZE

    def _distance_numbers(self) -> int:
        """Numbers of a layer by which distances of tokens count, or of which those are made."""
        config, heads = self.config, len(self.heads)
        distances = config.layers[0].attention.distances
        if distances is None:
            return 0
        if isinstance(distances, Disentangled):
            return 4 * distances.span * heads * config.head_dim
        return heads * (2 * config.max_position_embeddings - 1)


def least_block_size(config: ModelSpec, itemsize: int) -> int:
    """Tokens of a block with room for half of a layer's state in K and in V, or all in latents, and for encoders.

    Ranks of any tensor-parallel size have it, as engines hand blocks over. `itemsize` is that of K and V.
    """
    kinds = {layer.state: index for index, layer in enumerate(config.layers) if layer.state}
    least = 1 if config.cross_encoder is None else config.cross_encoder.positions
    for size in range(1, config.num_heads + 1) if kinds else ():
        if not any(can_share(config, size, expert_parallel=it) for it in (False, True)):
            continue
        for rank in range(size):
            shard = Shard(config, range(config.num_layers), rank, size)
            token = math.prod(shard.kv_vectors) * itemsize
            for index in kinds.values():
                half = sum(state.half_bytes for state in shard.states(index))
                least = max(least, -(-2 * half // token))
    return least


def whole(config: ModelSpec) -> Shard:
    """All of a model."""
    return Shard(config, range(config.num_layers))


def whole_part(linear: LinearSpec) -> LinearShard:
    """All of a linear layer."""
    return LinearShard(range(linear.outputs), range(linear.inputs))


def shard_of(config: ModelSpec, parallel: ParallelConfig, place: RankPlace) -> Shard:
    """The shard of the rank at `place`. Raises ConfigError if the model cannot be split so."""
    check_shares("the model", config, parallel)
    return Shard(
        config,
        split_layers(config, parallel.pipeline_parallel_size)[place.pp],
        tp_rank=place.tp,
        tp_size=parallel.tensor_parallel_size,
        expert_parallel=parallel.expert_parallel,
        dp_attention=parallel.dp_attention,
    )


def check_quantized_parts(
    config: ModelSpec, quantization: Quantization | None, parallel: ParallelConfig
) -> None:
    """Checks that no rank gets a part of a quantized map that cannot be held.
    Raises ConfigError: one does, or a map cannot be quantized so at all."""
    # Layers that are cut and quantized alike need but one look, as there may be thousands.
    linears: dict[tuple[LinearRole, int, GroupedFormat | BlockFormat], LinearSpec] = {}
    for linear in whole(config).linears():
        stored_format = _format_of(linear, quantization)
        if isinstance(stored_format, GroupedFormat | BlockFormat):
            linears.setdefault((linear.role, linear.inputs, stored_format), linear)

    def first_cut(size: int) -> tuple[LinearSpec, GroupedFormat | BlockFormat, range] | None:
        for rank in range(size):
            shard = Shard(
                config,
                range(config.num_layers),
                rank,
                size,
                parallel.expert_parallel,
                parallel.dp_attention,
            )
            for (_, inputs, stored_format), linear in linears.items():
                part = shard.part_of(linear).inputs
                if part_format(stored_format, inputs, part) is None:
                    return linear, stored_format, part
        return None

    tp_size = parallel.tensor_parallel_size
    cut = first_cut(tp_size)
    if cut is None:
        return
    nearest = nearest_sizes(
        tp_size,
        config.num_heads,
        lambda size: (
            can_share(config, size, expert_parallel=parallel.expert_parallel)
            and first_cut(size) is None
        ),
    )
    linear, stored_format, part = cut
    regroups = isinstance(stored_format, BlockFormat) or stored_format.can_regroup
    other = "" if regroups else ", or take a smaller --quantization-group-size"
    unit = f"groups of {stored_format.group_size}"
    if isinstance(stored_format, BlockFormat):
        unit = f"blocks, which can be cut at multiples of {BLOCK_SIZES[-1]} only"
    raise ConfigError(
        f"--tensor-parallel-size {tp_size} cuts the {linear.inputs} inputs of {linear.name}.weight inside its "
        f"{unit}, into parts such as {part.start} to {part.stop}; the nearest that does not is {nearest}{other}."
    )


def _format_of(linear: LinearSpec, quantization: Quantization | None) -> WeightFormat:
    return DenseFormat() if quantization is None else quantization.format_of(linear)


def format_of_part(linear: LinearSpec, stored_format: WeightFormat, part: range) -> WeightFormat:
    """Format of a part of a layer's inputs, the whole being `stored_format`; see `part_format`.
    Raises ConfigError: the part cannot be held."""
    held = part_format(stored_format, linear.inputs, part)
    if held is None:
        raise ConfigError(
            f"the {linear.inputs} inputs of {linear.name}.weight, quantized in groups, cannot be cut into parts "
            f"such as {part.start} to {part.stop}; take a smaller --tensor-parallel-size."
        )
    return held


def split_layers(config: ModelSpec, num_stages: int) -> list[range]:
    """The layers of each stage, so that the costliest stage is as cheap as can be.

    Layers of one input stay together. The cost of a stage is the number of weights that a token is multiplied
    with; the head is one more cost of the last stage. Every stage has a layer at least.
    """
    together = layer_runs(config)
    costs = [sum(map(config.weights_per_token, layers)) for layers in together]
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
    return [
        range(together[start].start, together[end - 1].stop) for start, end in pairwise([0, *ends])
    ]


def _fill_stages(costs: list[int], head: int, limit: int) -> list[int]:
    """Ends of stages that are filled up to `limit`, from the last stage, which has the head, to the first."""
    ends = [len(costs)]
    total = head
    for layer in reversed(range(len(costs))):
        if total + costs[layer] > limit:
            ends.append(layer + 1)
            total = 0
        total += costs[layer]
    return ends[::-1]


def take_part(
    linear: LinearSpec, weight: LinearWeight, part: LinearShard, dtype: torch.dtype
) -> LinearWeight:
    """The part of a weight that a rank holds, in memory of its own; `dtype` is that of activations.

    A dense part may lie in the memory of the whole.
    Raises ConfigError: the inputs are cut inside a group that shares a scale, and that cannot be cut."""
    if (len(part.outputs), len(part.inputs)) == weight_shape(weight):
        return weight
    outputs, inputs = _slice(part.outputs), _slice(part.inputs)
    if isinstance(weight, DenseWeight):
        return DenseWeight(weight.values[outputs, inputs].contiguous())
    if isinstance(weight, Int8Weight):
        own = weight.rows(outputs)
        zero_points = None if own.zero_points is None else _copied(own.zero_points)
        return Int8Weight(_copied(own.values[:, inputs]), _copied(own.scales), zero_points)
    if isinstance(weight, BlockWeight):
        return _part_of_blocks(linear, weight, part)
    if isinstance(weight, Fp8Weight):
        return _part_of_fp8(linear, weight, part, dtype)
    return _part_of_groups(linear, weight, part, dtype)


def _part_of_blocks(linear: LinearSpec, weight: BlockWeight, part: LinearShard) -> BlockWeight:
    whole = weight.stored_format
    stored_format = format_of_part(linear, whole, part.inputs)
    if not isinstance(stored_format, BlockFormat):
        raise TypeError(f"{linear.name} cannot be held as {stored_format}.")
    own, inputs = weight.rows(_slice(part.outputs)), part.inputs

    def of_groups(numbers: Tensor) -> Tensor:
        size = stored_format.group_size
        repeated = numbers.repeat_interleave(whole.group_size // size, dim=1)
        return _copied(repeated[:, inputs.start // size : inputs.stop // size])

    def of_blocks(numbers: Tensor | None) -> Tensor | None:
        """This part's of the numbers of blocks, of which several smaller ones may hold the same."""
        if numbers is None:
            return None
        size = stored_format.block_size
        repeated = numbers.repeat_interleave(whole.block_size // size, dim=1)
        return _copied(repeated[:, inputs.start // size : inputs.stop // size])

    return BlockWeight(
        stored_format,
        _copied(own.codes[:, _slice(inputs)]),
        of_groups(own.scales),
        None if own.minima is None else of_groups(own.minima),
        of_blocks(own.block_scales),
        of_blocks(own.block_minima),
    )


def _part_of_fp8(
    linear: LinearSpec, weight: Fp8Weight, part: LinearShard, dtype: torch.dtype
) -> LinearWeight:
    own, inputs = weight.rows(_slice(part.outputs)), part.inputs
    stored_format = format_of_part(linear, weight_format(weight), inputs)
    if not isinstance(stored_format, Fp8Format):
        return DenseWeight(dequantize(own)[:, _slice(inputs)].to(dtype).contiguous())
    values, scales, size = own.values[:, _slice(inputs)], own.scales, stored_format.group_size
    if size is not None and weight.group_size is not None:
        smaller = scales.repeat_interleave(weight.group_size // size, dim=1)
        scales = smaller[:, inputs.start // size : -(-inputs.stop // size)]
    return Fp8Weight(_copied(values), _copied(scales), size)


def _part_of_groups(
    linear: LinearSpec, weight: GroupedWeight, part: LinearShard, dtype: torch.dtype
) -> LinearWeight:
    outputs, inputs = _slice(part.outputs), _slice(part.inputs)
    stored_format = format_of_part(linear, weight_format(weight), part.inputs)
    if not isinstance(stored_format, GroupedFormat):
        return DenseWeight(dequantize(weight)[outputs, inputs].to(dtype).contiguous())
    size = stored_format.group_size
    groups = slice(part.inputs.start // size, part.inputs.stop // size)

    def regrouped(numbers: Tensor) -> Tensor:
        smaller = numbers[outputs].repeat_interleave(weight.group_size // size, dim=1)
        return _copied(smaller[:, groups])

    return GroupedWeight(
        _copied(weight.codes[outputs, inputs]),
        regrouped(weight.scales),
        None if weight.offsets is None else regrouped(weight.offsets),
        bits=weight.bits,
        group_size=size,
        act_order=weight.act_order,
    )


def _copied(part: Tensor) -> Tensor:
    """Copies a part, which otherwise would keep the memory of the whole alive."""
    return part.clone(memory_format=torch.contiguous_format)


def _times(heads: range, head_dim: int) -> range:
    return range(heads.start * head_dim, heads.stop * head_dim)


def _slice(indices: range) -> slice:
    return slice(indices.start, indices.stop)
