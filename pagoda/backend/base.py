"""Interface of a device that a decoder model runs on.

A model is written in terms of these operations and knows no device. All activations are flat: the tokens of
every sequence in the step, one after the other, with no padding between sequences. They are float32 between
operations: a product of bfloat16 rounds its activations to bfloat16, and one of integers to integers; nothing else
rounds them, so what layers add to the hidden states is added up in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Generic, Protocol, TypeVar

from torch import Tensor, device, dtype, empty

from pagoda.backend.low_rank import LowRank, LowRankMaps
from pagoda.backend.operation import Operation, WeightNames
from pagoda.backend.sampling import SampledRow, SamplingRow, ScoredRows
from pagoda.backend.weights import GroupedWeight, Int8Weight, LinearWeight
from pagoda.messages.worker import Capabilities
from pagoda.parallel.collectives import Collectives
from pagoda.telemetry.tracer import Tracer


@dataclass(frozen=True)
class TokenBatch:
    """The tokens of one step: `n` tokens of `s` sequences, each sequence's tokens in a row.

    Sequence `i` computes its tokens at positions `context_lens[i] - query_lens[i]` to `context_lens[i] - 1`.
    """

    token_ids: Tensor
    """[n] int64."""
    positions: Tensor
    """[n] int64, position of each token in its sequence."""
    sequence_ids: Tensor
    """[n] int64, which of the `s` sequences each token belongs to; ascending."""
    query_lens: Tensor
    """[s] int64, how many tokens of each sequence the step computes; at least 1."""
    context_lens: Tensor
    """[s] int64, tokens of each sequence that have K and V after this step."""
    block_tables: Tensor
    """[s, b] int64, ids of the cache blocks that hold each sequence; entries past its end are any valid id."""
    adapters: Tensor | None = None
    """[n] int64, number of each token's adapter, -1 for none; None where no token has one."""


NewTensor = Callable[[tuple[int, ...], dtype], Tensor]
"""Gives an unwritten tensor of a shape and a dtype, in memory of whoever's choice."""


def new_tensor(shape: tuple[int, ...], dtype: dtype) -> Tensor:
    """Allocates a tensor of this process alone; the machine gives its memory as it is written."""
    return empty(shape, dtype=dtype)


@dataclass(frozen=True)
class KVCache:
    """K and V of one layer, in blocks; how a block is laid out is up to the backend."""

    keys: Tensor
    """[num_blocks, num_kv_heads, ...]: block_size tokens of head_dim elements."""
    values: Tensor
    key_scales: Tensor | None = None
    """[num_blocks, num_kv_heads, block_size] float32, of int8: each token's largest element is 127 of them."""
    value_scales: Tensor | None = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Tensors by field name, without absent scales."""
        return {name: tensor for name, tensor in vars(self).items() if tensor is not None}


@dataclass(frozen=True)
class HeadNorms:
    """RMS norms of each query and each key, before they are rotated (Qwen3)."""

    queries: Tensor
    """[head_dim] float32."""
    keys: Tensor
    """[head_dim] float32."""
    eps: float


ValueT = TypeVar("ValueT")
"""Activations: a tensor, or what stands for one while a forward pass is compiled."""
LinearT = TypeVar("LinearT")
"""A weight as the backend wants it."""
MetadataT = TypeVar("MetadataT")
"""Metadata of attention: all that depends on the step and not on the layer, computed once for all layers."""
LinearT_co = TypeVar("LinearT_co", covariant=True)
LinearT_contra = TypeVar("LinearT_contra", contravariant=True)
MetadataT_contra = TypeVar("MetadataT_contra", contravariant=True)


@dataclass(frozen=True)
class ExpertRouting:
    """Number of experts of a layer, and of experts that each token goes through."""

    num_experts: int
    experts_per_token: int
    renormalize: bool
    """The probabilities of a token's experts are scaled to add up to one."""


@dataclass(frozen=True, eq=False)
class Experts(Generic[LinearT_co]):
    """The feed-forward experts of a layer, or those in a row of them that one rank holds.

    Expert `first + i` computes `down[i](silu(gate[i](x)) * up[i](x))`; each map is one part without bias.
    """

    routing: ExpertRouting
    first: int
    gate: tuple[LinearT_co, ...]
    """Gate projection of each expert, [inner, hidden]."""
    up: tuple[LinearT_co, ...]
    down: tuple[LinearT_co, ...]
    """Down projection of each expert, [hidden, inner]."""
    counts: Tensor
    """[num_experts] int64, to which the tokens that go to each expert are added, held here or not."""


@dataclass(frozen=True)
class StepInput(Generic[ValueT, MetadataT]):
    token_ids: ValueT
    """[n] int64."""
    rotary_table: tuple[ValueT, ValueT]
    """Rotary table of the tokens' positions; see `Backend.rotary_table`."""
    plan: MetadataT
    hidden: ValueT | None = None
    """[n, hidden] float32, what the pipeline stage before computed; None on the first stage."""
    rows: ValueT | None = None
    """[m] int64, the tokens whose hidden states are wanted, each once; for passes that select rows."""
    adapters: ValueT | None = None
    """[n] int64, as in `TokenBatch`; None where no token has an adapter."""


class Operations(Protocol, Generic[ValueT, LinearT_contra, MetadataT_contra]):
    """The operations of a decoder, of which each tensor-parallel rank may hold a part.

    The result for a token must not depend, not in a single bit, on what else is in the batch nor on how its
    sequence was cut into steps: this is what makes an answer repeatable (invariant 10 of the scheduler).
    """

    def linear(self, x: ValueT, weight: LinearT_contra) -> ValueT:
        """x [n, ...], each row `in` elements, times the weight, plus the bias: [n, out].

        For a weight in bfloat16, x is rounded to bfloat16; for a quantized one, to integers.
        """

    def embedding(
        self,
        token_ids: ValueT,
        weight: LinearT_contra,
        first_id: int = 0,
        vocab_size: int | None = None,
    ) -> ValueT:
        """Rows of a weight [outputs, hidden] that is an embedding table, without its bias: [n, hidden].

        The weight has the rows from `first_id` on of a table of `vocab_size`; None means that it ends the table.
        Rows that it does not have are zeros, so that those of all ranks add up to the table's.
        Raises IndexError: a token id is not from 0 to `vocab_size - 1`."""

    def add_low_rank(self, out: ValueT, x: ValueT, maps: LowRankMaps, adapters: ValueT) -> ValueT:
        """`out` [n, out] plus what each row's adapter makes of x [n, ...]; `out` is not used after.

        Rows whose number in `adapters` [n] is below 0, or has no maps here, stay as they are. With maps in
        bfloat16, x and the scaled product of the first matrix are rounded to bfloat16.
        """

    def all_reduce(self, x: ValueT) -> ValueT:
        """The sum of x [n, d] over the ranks of the group; the same bits on all of them. x is not used after."""

    def select_rows(self, x: ValueT, rows: ValueT) -> ValueT:
        """Rows of x [n, ...] by `StepInput.rows`: [m, d]. What is computed of them has as many, maybe none."""

    def add(self, x: ValueT, delta: ValueT) -> ValueT:
        """x + delta [n, d]: what `add_rms_norm` gives first."""

    def rms_norm(self, x: ValueT, weight: Tensor, eps: float) -> ValueT:
        """x [..., d] over the root of its mean square, times weight [d] float32 (Zhang and Sennrich 2019)."""

    def add_rms_norm(
        self, x: ValueT, delta: ValueT, weight: Tensor, eps: float
    ) -> tuple[ValueT, ValueT]:
        """x + delta [n, d] and its `rms_norm`."""

    def gated_linear(
        self,
        x: ValueT,
        weight: LinearT_contra,
        maps: LowRankMaps | None = None,
        adapters: ValueT | None = None,
    ) -> ValueT:
        """silu(left half) times right half of `linear` [n, 2 d]: [n, d] (SwiGLU, Shazeer 2020).

        With maps and adapters, `add_low_rank` comes before.
        """

    def experts(self, x: ValueT, logits: ValueT, experts: Experts[LinearT_contra]) -> ValueT:
        """Sends rows of x [n, hidden] through the experts with the highest of logits [n, num_experts].

        Of equal logits the first is taken. Gives [n, hidden], the sum in float32 of what they compute, in the
        order of their numbers, each times its probability: softmax of the logits in float32 over all experts.
        Experts that are not held here add nothing.
        """

    def rotate_and_cache(
        self,
        qkv: ValueT,
        cache: KVCache,
        plan: MetadataT_contra,
        table: tuple[ValueT, ValueT],
        norms: HeadNorms | None,
    ) -> ValueT:
        """Readies queries, keys and values, one behind the other in qkv [n, (heads + 2 kv_heads) d].

        Queries and keys are normed where there are norms; then the pairs (i, i + d/2) of every head are rotated
        (Su et al. 2021, GPT-NeoX order). Keys and values go to the blocks of their sequences; returns queries
        [n, heads, d].
        """

    def attention(
        self,
        queries: ValueT,
        cache: KVCache,
        plan: MetadataT_contra,
        *,
        scale: float,
        window: int | None,
    ) -> ValueT:
        """Causal attention of queries [n, heads, d] over all cached tokens of their sequences: [n, heads, d].

        With `window`, a token sees itself and the `window - 1` before it.
        """


class ForwardPass(Protocol[LinearT_co, MetadataT]):
    """A model in terms of operations, from tokens or hidden states to hidden states."""

    def __call__(
        self, ops: Operations[ValueT, LinearT_co, MetadataT], step: StepInput[ValueT, MetadataT]
    ) -> ValueT: ...


UNNAMED: WeightNames = MappingProxyType({})


class Compiled(Protocol[MetadataT]):
    """A forward pass as a backend runs it."""

    @property
    def operations(self) -> Sequence[Operation]:
        """Operations of every step, in order; empty where they are not recorded."""

    def __call__(self, step: StepInput[Tensor, MetadataT]) -> Tensor: ...

    def traced(
        self, step: StepInput[Tensor, MetadataT], tracer: Tracer
    ) -> tuple[Tensor, Sequence[int]]:
        """The same result, and how many nanoseconds each of `operations` took, by the clock of the device.

        Of a pass that is not recorded each operation becomes a span of the tracer's instead.
        """


class Backend(Operations[Tensor, LinearT, MetadataT], Protocol, Generic[LinearT, MetadataT]):
    """A device with its operations, and all that is done once for a model or once for a step."""

    capabilities: Capabilities
    device: device
    """Device on which weights, caches and activations lie."""
    group: Collectives
    """The ranks that `all_reduce` adds up over."""
    arithmetic: str
    """Name such as `cpu (avx2)`: backends of one arithmetic compute the same bits, whatever the machine."""

    def allocate_kv_cache(
        self,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: dtype,
        kv_dtype: dtype | None = None,
        new: NewTensor = new_tensor,
    ) -> KVCache:
        """The cache of one layer: `dtype` is the model's, `kv_dtype` that of K and V if it is another.

        With int8, a token's K and its V have one scale per head, symmetric about 0.
        """

    def quantize_int8(self, values: Tensor, *, symmetric: bool) -> Int8Weight:
        """Quantizes a weight [out, in]; scales are not finite where weights are not.

        A `symmetric` weight, which some file formats want, has no zero points.
        """

    def quantize_int4(self, values: Tensor, group_size: int) -> GroupedWeight:
        """The same in groups that divide the inputs."""

    def prepare_linear(
        self, parts: Sequence[LinearWeight], bias: Tensor | None, dtype: dtype
    ) -> LinearT:
        """Linear maps of the same inputs, as one, in the form that `linear` is fastest with.

        Their outputs follow one another, and the bias [out] is of all of them; dense ones are kept in `dtype`.
        """

    def set_low_rank(
        self, maps: LowRankMaps, adapter: int, parts: Sequence[LowRank | None]
    ) -> None:
        """Gives an adapter its parts of a layer's maps, in place of those that it had."""

    def remove_low_rank(self, maps: LowRankMaps, adapter: int) -> None:
        """Forgets an adapter's parts, if there are any."""

    def argmax(self, x: Tensor, weight: LinearT) -> tuple[Tensor, Tensor, Tensor]:
        """The highest output of `linear` for each row of x [m, in], without storing the others.

        Returns the index [m] int64, the lowest of equal ones; the value [m] float32; and a flag [m] bool that all
        logits of the row are finite, without which the other two mean nothing.
        """

    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[SampledRow]:
        """The next token of each row of logits [rows, vocab] float32, which are used up.

        `pagoda.backend.sampling` says how tokens are chosen; all backends choose the same ones of the same logits.
        """

    def score(self, logits: Tensor, token_ids: Tensor, num_top: int) -> ScoredRows:
        """Log-probabilities of one token [rows] int64 of each row of logits [rows, vocab] float32, and of the
        `num_top` likeliest: the same bits as `sample` reports of a token that it draws."""

    def rotary_table(
        self, positions: Tensor, frequencies: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Cosines and sines of positions [n] times frequencies [d/2], times `scale`: two of [n, d/2] float32."""

    def attention_metadata(self, batch: TokenBatch, num_heads: int, cache: KVCache) -> MetadataT:
        """Metadata of a step, the same for all layers; `cache` is any layer's."""

    def compile(
        self,
        forward: ForwardPass[LinearT, MetadataT],
        hidden: int | None = None,
        names: WeightNames = UNNAMED,
    ) -> Compiled[MetadataT]:
        """The same forward pass, as quick as the backend can make it.

        `hidden` is the width of `StepInput.hidden` where every step has it, else None. Operations are named after
        the weights that they read.

        It may be called once, with stand-ins for tensors and no plan, and what it did be repeated for every
        step; so it must do the same whatever the step is.
        """
