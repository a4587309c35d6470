# SPDX-License-Identifier: Apache-2.0
"""The interface of backends: kernels, KV cache and memory of one kind of device.

A model records its forward pass as a graph (`pagoda.backend.graph`) and knows no device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Generic, Literal, NamedTuple, Protocol, TypeVar

from torch import Tensor, arange, device, dtype, empty, float32, int64, uint8

from pagoda.backend.graph import Graph, LinearShape, Value
from pagoda.backend.low_rank import LowRank, LowRankMaps
from pagoda.backend.operation import Operation, WeightNames
from pagoda.backend.sampling import SampledRows, ScoredRows
from pagoda.backend.sampling_table import SamplingTable
from pagoda.backend.weights import BlockWeight, GroupedWeight, Int8Weight, LinearWeight
from pagoda.checkpoints.expert_routing import ExpertRouting
from pagoda.checkpoints.weight_formats import BlockFormat
from pagoda.errors import ConfigError
from pagoda.messages.encoder_input import EncoderInput
from pagoda.messages.segments import SEGMENT
from pagoda.messages.worker import Capabilities
from pagoda.parallel.collectives import Collectives, HostGroup
from pagoda.telemetry.tracer import Tracer


class EmbeddedRows(NamedTuple):
    """Tokens of a step whose embeddings are given."""

    rows: Tensor
    """[m] int64, which of the step's tokens."""
    vectors: Tensor
    """[m, hidden] float32."""

    def of(self, chosen: Tensor) -> EmbeddedRows | None:
        """Rows of the tokens that are `chosen` [n] bool, in a step of these alone; None where no token is left."""
        kept = chosen[self.rows]
        rows = (chosen.cumsum(0) - 1)[self.rows[kept]]
        return EmbeddedRows(rows, self.vectors[kept]) if len(rows) else None


class ToEncode(NamedTuple):
    """Audio or text of a sequence whose first tokens a step computes."""

    sequence: int
    """Place of the sequence in the step."""
    given: EncoderInput


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
    block_tables: tuple[Tensor, ...]
    """Block tables of the KV groups, each [s, b] int64: ids of the cache blocks that hold each sequence.

    Entries past its end are any valid id, and so are those of blocks that lie wholly behind what its tokens read:
    from the first token of a window or chunk on, rounded down to `Capabilities.window_multiple`. Such blocks may
    hold NaN."""
    adapters: Tensor | None = None
    """[n] int64, number of each token's adapter, -1 for none; None where no token has one."""
    token_types: Tensor | None = None
    """[n] int64, 1 for tokens of the second of two texts, else 0; None where all are 0."""
    embedded: EmbeddedRows | None = None
    """Tokens whose embeddings are given; None where no token is one."""
    draft_lens: Tensor | None = None
    """[s] int64, how many of each sequence's last tokens are drafts; None where none is. No state is kept behind
    them: that behind the token before them stays the newest."""
    segment: int = SEGMENT
    """Tokens of a segment of attention (`pagoda.messages.segments`)."""
    cold: Mapping[int, ColdContexts] = field(default_factory=dict)
    """Segments that lie outside of the cache, by KV group; block tables have any valid ids for their blocks."""
    ranks: Tensor | None = None
    """[s] int64, ascending: the rank that attends to each sequence and has its blocks; None where all do."""
    to_encode: tuple[ToEncode, ...] = ()
    """Audio or text of sequences that begin in the step, which is encoded before it."""
    encoded_lens: Tensor | None = None
    """[s] int64, positions of each sequence that its encoder gave; None where all have as many, or none."""

    def of(self, chosen: Tensor, cold: Mapping[int, ColdContexts] | None = None) -> TokenBatch:
        """The part of the sequences that are chosen [s] bool, whose token ids are written; `cold` is theirs."""
        rows = chosen.repeat_interleave(self.query_lens)
        query_lens = self.query_lens[chosen]
        return TokenBatch(
            token_ids=self.token_ids[rows],
            positions=self.positions[rows],
            sequence_ids=arange(len(query_lens)).repeat_interleave(query_lens),
            query_lens=query_lens,
            context_lens=self.context_lens[chosen],
            block_tables=tuple(table[chosen] for table in self.block_tables),
            adapters=None if self.adapters is None else self.adapters[rows],
            token_types=None if self.token_types is None else self.token_types[rows],
            embedded=None if self.embedded is None else self.embedded.of(rows),
            draft_lens=None if self.draft_lens is None else self.draft_lens[chosen],
            segment=self.segment,
            cold=cold or {},
            ranks=None if self.ranks is None else self.ranks[chosen],
            to_encode=tuple(
                it._replace(sequence=int(chosen[: it.sequence].sum()))
                for it in self.to_encode
                if chosen[it.sequence]
            ),
            encoded_lens=None if self.encoded_lens is None else self.encoded_lens[chosen],
        )


class StagedSegment(NamedTuple):
    """A cold segment as attention of one layer reads it."""

    cache: KVCache | LatentCache
    """Blocks of the layer in other memory of the host, in a backend's own layout; they may lie apart."""
    block_ids: Sequence[int]
    """Numbers of the segment's blocks, or of those of several, in order."""


class SegmentSource(Protocol):
    """Cold segments of one KV group, one sequence after the other, those of each in ascending order.

    Every layer of the group takes all of them in this order. A segment that cannot be read is replaced by any
    numbers: the source remembers whose it was.
    """

    def take(self, values: int, index: int, count: int = 1) -> StagedSegment:
        """Segment number `index` of the layer whose cache has its values, or its latents, at this address.

        It stays until the layer takes another one or releases it. Of those that are in place, it may be taken
        together with those behind it, `count` in all.
        """

    def release(self, values: int) -> None:
        """The layer needs no further segment."""


@dataclass(frozen=True)
class ColdContexts:
    """The first segments of sequences, which lie outside of the cache. Queries see all of them."""

    counts: list[int]
    """Cold segments of each of the `s` sequences."""
    source: SegmentSource
    in_place: Sequence[bool]
    """True of each segment that stays until the layer releases it; neighbours that do may be taken together."""


class UnsupportedError(ConfigError):
    """A backend lacks what a weight or a model needs; the message is one sentence that says what."""


class DeviceLostError(Exception):
    """A device failed, or took too long: nothing more is computed on it, and the worker ends."""


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
    """[num_blocks, num_kv_heads, block_size] float32, of each token, in formats with scales."""
    value_scales: Tensor | None = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Tensors by field name, without absent scales."""
        return {name: tensor for name, tensor in vars(self).items() if tensor is not None}


@dataclass(frozen=True)
class LatentCache:
    """Latents of one layer, in blocks: one vector of each token, of which all heads make their K and V.

    The first `rank` elements of a vector are the latent, a head's values; with the `rope_dim` behind them, which
    are rotated, they are its key (multi-head latent attention, DeepSeek-V2).
    """

    latents: Tensor
    """[num_blocks, 1, ...]: block_size tokens of `width` elements, as the backend lays them out."""
    rank: int
    rope_dim: int
    latent_scales: Tensor | None = None
    """[num_blocks, 1, block_size] float32, of each token, in formats with scales."""
    index_dim: int = 0
    """Elements behind these, a token's key for an indexer; 0 without one."""

    @property
    def width(self) -> int:
        """Elements of a token."""
        return self.rank + self.rope_dim + self.index_dim

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Tensors by field name, without absent scales."""
        named = {"latents": self.latents, "latent_scales": self.latent_scales}
        return {name: tensor for name, tensor in named.items() if tensor is not None}


@dataclass(frozen=True, eq=False)
class StateCache:
    """States of one layer, in blocks whose memory would else hold K and V.

    A state is `units` alike of `floats` float32 numbers, one behind the other. The first half of the units lies
    where the keys of a block would, the others where its values would; of latents, in the halves of a block. Ranks
    of other engines, which hold other units, copy them from there; how the numbers of one unit are laid out is up
    to the backend.
    """

    memory: KVCache | LatentCache
    block_size: int
    """Tokens of a block, which holds the state behind its last computed token."""
    units: int
    floats: int
    offset: int = 0
    """Floats before the units in each half, which another state of the layer has."""

    def __post_init__(self) -> None:
        """Raises ValueError: a block has no room for the state."""
        for half, count in zip(self.halves(), self.units_of_halves, strict=True):
            if half.shape[1] < self.offset + count * self.floats:
                raise ValueError(
                    f"{count} states of {self.floats} floats from {self.offset} on do not fit into half a block "
                    f"of {half.shape[1]}."
                )

    @property
    def units_of_halves(self) -> tuple[int, int]:
        return (self.units + 1) // 2, self.units // 2

    @property
    def room(self) -> int:
        """Floats that the state takes of the larger half of a block."""
        return self.units_of_halves[0] * self.floats

    def halves(self) -> tuple[Tensor, Tensor]:
        """Both halves of all blocks, [num_blocks, floats] float32 each."""
        if isinstance(self.memory, LatentCache):
            block = self.memory.latents.flatten(1).view(uint8).view(float32)
            middle = block.shape[1] // 2
            return block[:, :middle], block[:, middle : 2 * middle]
        both = (self.memory.keys, self.memory.values)
        first, second = (half.flatten(1).view(uint8).view(float32) for half in both)
        return first, second

    @property
    def num_blocks(self) -> int:
        return len(self.halves()[0])


LayerMemory = KVCache | LatentCache | StateCache
"""Memory of a layer that goes on from step to step."""


@dataclass(frozen=True)
class HeadNorms:
    """RMS norms of each query and each key, before they are rotated (Qwen3).

    One without weights behind the rotation (Llama 4) is one of ones here: rotation keeps lengths.
    """

    queries: Tensor
    """[head_dim] float32."""
    keys: Tensor
    """[head_dim] float32."""
    eps: float


LinearT = TypeVar("LinearT", bound=LinearShape)
"""A weight as the backend wants it."""
MetadataT = TypeVar("MetadataT")
"""Metadata of attention: all that depends on the step and not on the layer, computed once for all layers."""
LinearT_co = TypeVar("LinearT_co", bound=LinearShape, covariant=True)


@dataclass(frozen=True)
class ExpertActivation:
    """Activation of an expert's gate, as the operation of a dense MLP of that name defines it."""

    kind: Literal["silu", "gelu_tanh", "swiglu_oai", "relu", "clamped_silu"] = "silu"
    """Squares of a ReLU are `relu` with gates that are ups (Nemotron-H). With `clamped_silu` activated gates are
    at most `limit`, and ups from its negative to it (Step 3.5)."""
    alpha: float = 1.0
    """Factor within the sigmoid of `swiglu_oai`."""
    limit: float = float("inf")
    """Limit of the gate and of `up` in `swiglu_oai`, and of what they are in `clamped_silu`."""


@dataclass(frozen=True, eq=False)
class Experts(Generic[LinearT_co]):
    """The feed-forward experts of a layer, or those in a row of them that one rank holds.

    Expert `first + i` computes `down[i](silu(gate[i](x)) * up[i](x))`, or with another activation; each map is
    one part.
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
    activation: ExpertActivation = ExpertActivation()
    correction: Tensor | None = None
    """[num_experts] float32, added to scores for the choice (`e_score_correction_bias`; Wang et al. 2024)."""


@dataclass(frozen=True, eq=False)
class HeadLinears(Generic[LinearT_co]):
    """A linear map of each head, of its own inputs; all are dense, of one shape, and without biases."""

    heads: tuple[LinearT_co, ...]

    @property
    def inputs(self) -> int:
        """Inputs of one head."""
        return self.heads[0].inputs

    @property
    def outputs(self) -> int:
        """Outputs of one head."""
        return self.heads[0].outputs


@dataclass(frozen=True)
class FutureTokens:
    """Tokens that a step takes from the results of the one before, which nobody has read."""

    rows: Sequence[int]
    """Rows of the step's `token_ids`; what these hold themselves is of no account."""
    token_ids: Tensor
    """[m] int64 on the device, as `PendingOutput` has it."""
    places: Sequence[int]
    """Elements of `token_ids`, one for each of `rows`."""


@dataclass(frozen=True)
class StepInput(Generic[MetadataT]):
    """Tensors and metadata that a step brings along instead of computing them."""

    tensors: Mapping[str, Tensor]
    """Inputs of the graph by name; and results that an earlier step computed, from which others are computed."""
    metadata: Mapping[int, MetadataT] = field(default_factory=dict)
    """Metadata of attention by KV group."""
    future_tokens: Sequence[FutureTokens] = ()
    """Tokens that only the device knows; steps of a backend that is not `OverlapBackend` have none."""

    def given(self, graph: Graph) -> list[str]:
        """Results that the step brings along."""
        return [name for name in graph.results if name in self.tensors]


class StepRows(NamedTuple):
    """Rows of a step's values."""

    tokens: int
    selected: int
    all_tokens: int
    """Tokens of all ranks, where each has its own."""
    all_selected: int

    def of(self, value: Value) -> int:
        return self[value.selected + 2 * value.gathered]


class NeededInputs:
    """Inputs that some nodes of a graph read, and results that they start from, found once for all steps."""

    def __init__(self, graph: Graph, nodes: Sequence[int], given: Sequence[str] = ()) -> None:
        read = graph.read_by(nodes)
        self.groups = [group for group, value in graph.metadata.items() if value.index in read]
        """KV groups whose metadata is read."""
        tensors = {name: value for name, value in graph.inputs.items() if value.index in read}
        tensors |= {name: graph.results[name] for name in given}
        self.names = frozenset(tensors)
        """Inputs that are read, and results that are brought along."""
        self._tensors = [
            (
                name,
                int64 if value.dtype == "int64" else float32,
                value.width,
                value.selected + 2 * value.gathered,
            )
            for name, value in tensors.items()
            if value.dtype != "counts"
        ]
        self._counts = [name for name, value in tensors.items() if value.dtype == "counts"]

    def check(self, step: StepInput[MetadataT]) -> StepRows:
        """Number of the step's tokens, and of its selected rows; of this rank's own, and of all ranks.

        Raises ValueError: the step lacks an input, or has another than the nodes read.
        """
        counts = [-1, -1, -1, -1]
        for name in self._counts:
            if name not in step.tensors:
                raise ValueError(f"A step of this graph needs {name}.")
            counts[2 + (name == "row_counts")] = int(step.tensors[name].sum())
        for name, wanted, width, kind in self._tensors:
            tensor = step.tensors.get(name)
            if tensor is None:
                if name == "adapters":
                    continue
                raise ValueError(f"A step of this graph needs {name}.")
            if tensor.dtype != wanted:
                raise ValueError(f"{name} is {tensor.dtype}, but {wanted} is needed.")
            shape = tensor.shape
            elements = 1 if len(shape) == 1 else shape[1:].numel()
            if elements != width:
                raise ValueError(f"Rows of {name} are of {elements}, not {width}.")
            if counts[kind] not in (-1, shape[0]):
                raise ValueError(
                    f"{name} of {shape[0]} rows does not fit inputs of {counts[kind]}."
                )
            counts[kind] = shape[0]
        for group in self.groups:
            if group not in step.metadata:
                raise ValueError(f"A step of this graph needs metadata of group {group}.")
        if counts[0] < 0 and "positions" in step.tensors:
            # Where positions are not told, nothing else may be of this rank's own tokens.
            counts[0] = len(step.tensors["positions"])
        return StepRows(*(max(0, count) for count in counts))


UNNAMED: WeightNames = MappingProxyType({})


class Memory(Protocol):
    """The memory that a rank computes in, of which weights, caches and activations take theirs."""

    on_host: bool
    """True if it is the host's, which the workers of a host share; else a rank has it for itself."""

    def free_bytes(self) -> int:
        """Bytes that can still be taken; what is given back on demand, such as a page cache, is free."""

    def taken_bytes(self) -> int:
        """Bytes that this process has taken and still needs."""


class Compiled(Protocol[MetadataT]):
    """A graph as a backend runs it."""

    def operations(self, results: Sequence[str]) -> Sequence[Operation]:
        """Operations of steps that want these results, in order; empty where they have spans of their own."""

    def __call__(self, step: StepInput[MetadataT], results: Sequence[str]) -> tuple[Tensor, ...]:
        """The results of these names. Nodes that none of them needs are not computed."""

    def traced(
        self, step: StepInput[MetadataT], results: Sequence[str], tracer: Tracer
    ) -> tuple[tuple[Tensor, ...], Sequence[int]]:
        """The same results, and how many nanoseconds each of `operations` took, by the clock of the device.

        Where there are none, each node becomes a span of the tracer's instead.
        """

    def profile(self, step: StepInput[MetadataT], results: Sequence[str]) -> int:
        """Bytes of memory that a step like this takes at most beside weights, caches and inputs: what it works in,
        and its results.

        A backend that can count them computes nothing. Others compute the step, which writes to blocks that it
        names, and take the highest mark of their memory; all ranks of a group do so at once.
        """


class Backend(Protocol[LinearT_co, MetadataT]):
    """A device, with all that is done once for a model or once for a step."""

    capabilities: Capabilities
    device: device
    """Device on which weights, caches and activations lie."""
    group: Collectives
    """The ranks that a graph adds up and gathers over; this one alone before `join`."""
    memory: Memory
    arithmetic: str
    """Name such as `cpu (avx2)`: backends of one arithmetic compute the same bits, whatever the machine."""

    def join(self, group: HostGroup) -> None:
        """Becomes a rank of a group of several, once, before any weight is prepared or graph compiled.

        Raises UnsupportedError: the backend does not compute on several ranks.
        """

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

        In formats with scales, a token's K and its V have one per head; `reference.attention` rounds as all do.
        """

    def allocate_latent_cache(
        self,
        num_blocks: int,
        block_size: int,
        rank: int,
        rope_dim: int,
        dtype: dtype,
        kv_dtype: dtype | None = None,
        new: NewTensor = new_tensor,
        index_dim: int = 0,
    ) -> LatentCache:
        """The cache of one layer with latent attention; dtypes are as for `allocate_kv_cache`.

        In formats with scales, a token has one. Raises UnsupportedError: the backend has no latent attention.
        """

    def quantize_int8(self, values: Tensor, *, symmetric: bool) -> Int8Weight:
        """Quantizes a weight [out, in]; scales are not finite where weights are not.

        A `symmetric` weight, which some file formats want, has no zero points.
        """

    def quantize_int4(self, values: Tensor, group_size: int) -> GroupedWeight:
        """The same in groups that divide the inputs."""

    def quantize_blocks(self, values: Tensor, stored_format: BlockFormat) -> BlockWeight:
        """The same in blocks of whole rows; see `pagoda.backend.block_rounding.quantize_blocks`."""

    def prepare_linear(
        self, parts: Sequence[LinearWeight], bias: Tensor | None, dtype: dtype
    ) -> LinearT_co:
        """Linear maps of the same inputs, as one, in the form that `linear` is fastest with.

        Their outputs follow one another, and the bias [out] is of all of them; dense ones are kept in `dtype`.
        Raises UnsupportedError: the backend has no such weights; `Capabilities.weight_formats` says so beforehand.
        """

    def set_low_rank(
        self, maps: LowRankMaps, adapter: int, parts: Sequence[LowRank | None]
    ) -> None:
        """Gives an adapter its parts of a layer's maps, in place of those that it had."""

    def remove_low_rank(self, maps: LowRankMaps, adapter: int) -> None:
        """Forgets an adapter's parts, if there are any."""

    def sample(self, logits: Tensor, table: SamplingTable, slots: Sequence[int]) -> SampledRows:
        """The next token of each of some slots of the table from its row of logits [slots, vocab] float32, which
        are used up. Raises ValueError: they do not fit each other; IndexError: the table has no such slot.

        `pagoda.backend.sampling` says how tokens are chosen; all backends choose the same ones of the same logits.
        The table is what it is now: its arrays stay where they are, and elements change from call to call.
        """

    def score(self, logits: Tensor, token_ids: Tensor, num_top: int) -> ScoredRows:
        """Log-probabilities of one token [rows] int64 of each row of logits [rows, vocab] float32, and of the
        `num_top` likeliest: the same bits as `sample` reports of a token that it draws."""

    def attention_metadata(
        self, batch: TokenBatch, num_heads: int, cache: LayerMemory, group: int = 0
    ) -> MetadataT:
        """Metadata of a step, the same for all layers of a KV group; `cache` is any layer's."""

    def compile(self, graph: Graph, names: WeightNames = UNNAMED) -> Compiled[MetadataT]:
        """The graph, as fast as the backend has it; operations are named after the weights that they read."""


def check_operations(needed: Collection[str], capabilities: Capabilities, arithmetic: str) -> None:
    """Raises UnsupportedError: a backend lacks some of the operations, which computes with `arithmetic`."""
    lacking = sorted(set(needed).intersection(capabilities.lacks_operations))
    if lacking:
        raise UnsupportedError(
            f"{arithmetic} lacks {', '.join(lacking)}, which this model needs; choose another --backend."
        )
