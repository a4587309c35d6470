# SPDX-License-Identifier: Apache-2.0
"""Backends that are wrong in one place each, by name; otherwise they are the reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import torch
from torch import Tensor

from pagoda.backend.base import UNNAMED, KVCache, LatentCache, Memory, StepInput
from pagoda.backend.graph import Graph, Node
from pagoda.backend.host import HostMemory
from pagoda.backend.interpreter import InterpretedGraph
from pagoda.backend.kv_store import DONE
from pagoda.backend.operation import WeightNames
from pagoda.backend.reference.backend import OPERATIONS, ReferenceBackend
from pagoda.backend.sampling_table import SamplingTable
from pagoda.devices import DeviceSet
from pagoda.kv.memory import DirectMemory
from pagoda.worker.kv.store import HostKVStore

Compute = Callable[..., Any]


class Wrong:
    """The reference with other functions for some operations, and other methods."""

    def __init__(
        self,
        operations: Mapping[str, Compute] | None = None,
        methods: Mapping[str, Callable[..., Any]] | None = None,
        memory: Memory | None = None,
        **capabilities: Any,
    ) -> None:
        self._own = ReferenceBackend()
        self._operations = operations or {}
        self._methods = methods or {}
        self.capabilities = msgspec.structs.replace(self._own.capabilities, **capabilities)
        self.arithmetic = "wrong"
        self.memory = memory or self._own.memory

    def __getattr__(self, name: str) -> Any:
        if name in self._methods:
            return lambda *args, **options: self._methods[name](self._own, *args, **options)
        return getattr(self._own, name)

    def compile(self, graph: Graph, names: WeightNames = UNNAMED) -> Any:
        table = {**OPERATIONS, **self._operations}

        def compute(node: Node, inputs: Sequence[Any]) -> Any:
            weights = [graph.weights[weight] for weight in node.weights]
            return table[node.op](*inputs, *weights, **node.attributes)

        return _Compiled(InterpretedGraph(graph, compute, names), self._methods)


class WithStore(Wrong):
    """The reference with a store of its own."""

    def __init__(self, store: Callable[[Any], Any]) -> None:
        super().__init__()
        self._store = store

    def open_kv_store(self, caches: Sequence[Any]) -> Any:
        return self._store(HostKVStore(caches))


class LateStore:
    """A store that copies when its event is awaited; methods are wrong in its descendants."""

    def __init__(self, own: HostKVStore) -> None:
        self._own = own

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def read(self, blocks: Any, into: Any, after: Any = DONE) -> Any:
        return _Copy(lambda: self._own.read(blocks, into), after)

    def write(self, blocks: Any, sources: Any, after: Any = DONE) -> Any:
        return _Copy(lambda: self._own.write(blocks, sources), after)


class _Copy:
    """An event that makes itself happen."""

    def __init__(self, work: Callable[[], Any], after: Any = DONE) -> None:
        self.done = False
        self._work, self._after = work, after

    def wait(self) -> None:
        if not self.done:
            self._after.wait()
            self._work()
            self.done = True


class _Unawaited(LateStore):
    """Events say that copies are done before they are."""

    def write(self, blocks: Any, sources: Any, after: Any = DONE) -> Any:
        self._late = super().write(blocks, sources, after)
        return DONE


class _Unordered(LateStore):
    """Copies do not come behind others."""

    def read(self, blocks: Any, into: Any, after: Any = DONE) -> Any:  # noqa: ARG002
        return super().read(blocks, into)


class _FirstOfBatch(LateStore):
    """All blocks of a batch get what is the first one's."""

    def write(self, blocks: Any, sources: Any, after: Any = DONE) -> Any:
        return super().write(blocks, [sources[0]] * len(sources), after)


class _FirstHead(LateStore):
    """Parts of a block are its first bytes."""

    def read_extents(self, extents: Any, into: Any, after: Any = DONE) -> Any:
        strides = [tensor.block_stride for tensor in self._own.tensors]
        firsts = [
            each._replace(offset=each.offset - each.offset % strides[each.region])
            for each in extents
        ]
        return self._own.read_extents(firsts, into, after)


class _RegionOfBlock(LateStore):
    """Networks are told of the first block of each tensor alone."""

    def direct_memory(self) -> DirectMemory:
        tensors = self._own.tensors
        regions = [
            region._replace(num_bytes=tensor.block_bytes)
            for region, tensor in zip(self._own.regions(), tensors, strict=True)
        ]
        return DirectMemory(tuple(regions), "VRAM", 0, lambda: None)


class _OneRegion(LateStore):
    """Networks are told the same place for all tensors."""

    def direct_memory(self) -> DirectMemory:
        (first, *_), count = self._own.regions(), len(self._own.tensors)
        return DirectMemory((first,) * count, "VRAM", 0, lambda: None)


class _Compiled:
    def __init__(self, own: Any, methods: Mapping[str, Callable[..., Any]]) -> None:
        self._own, self._run, self._profile = own, methods.get("run"), methods.get("profile")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def profile(self, step: StepInput[Any], results: Sequence[str]) -> Any:
        profile = self._profile
        return (
            self._own.profile(step, results)
            if profile is None
            else profile(self._own, step, results)
        )

    def __call__(self, step: StepInput[Any], results: Sequence[str]) -> Any:
        return (
            self._own(step, results) if self._run is None else self._run(self._own, step, results)
        )


def _more(name: str, change: Callable[[Any], Any]) -> dict[str, Compute]:
    """The operation, with its result changed."""
    right = OPERATIONS[name]
    return {name: lambda *args, **options: change(right(*args, **options))}


def _without(name: str, **forced: Any) -> dict[str, Compute]:
    """The operation, some of whose attributes are ignored."""
    right = OPERATIONS[name]
    return {name: lambda *args, **options: right(*args, **options | forced)}


def _writes_input(x: Tensor, **options: Any) -> Tensor:
    right = OPERATIONS["scale"]
    return x.copy_(right(x, **options))


def _shared_sums(x: Tensor, weight: Any) -> Tensor:
    """Rows of one product depend on how many there are, as of a library that chooses by shape."""
    out: Tensor = OPERATIONS_BEFORE["linear"](x, weight)
    return out * (1 + 1e-7 * len(x))


def _twice_the_eps(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 2 * eps) * weight


OPERATIONS_BEFORE = dict(OPERATIONS)


def _own_memory(own: ReferenceBackend, *shape: Any) -> KVCache:
    return own.allocate_kv_cache(*shape[:6])


def _tokens_first(own: ReferenceBackend, *shape: Any) -> KVCache:
    """Blocks of [token, head, element], seen as [head, token, element]."""
    cache = own.allocate_kv_cache(*shape)
    tensors = {
        name: tensor.view(tensor.shape[0], tensor.shape[2], tensor.shape[1], -1).transpose(1, 2)
        for name, tensor in cache.tensors.items()
        if tensor.ndim == 4
    }
    return replace(cache, **tensors)


def _tables_of_others(own: ReferenceBackend, batch: Any, *rest: Any) -> Any:
    tables = tuple(table.roll(1, 0) for table in batch.block_tables)
    return own.attention_metadata(replace(batch, block_tables=tables), *rest)


_KEPT: dict[int, Any] = {}
_TABLES: dict[SamplingTable, SamplingTable] = {}
_TAKEN: set[tuple[SamplingTable, int]] = set()


def _unlikely(own: ReferenceBackend, *args: Any) -> Any:
    found = own.sample(*args)
    return replace(found, token_ids=(found.token_ids - 1).clamp(min=0))


def _slots_in_order(own: ReferenceBackend, logits: Tensor, table: Any, slots: Any) -> Any:
    return own.sample(logits, table, sorted(slots))


def _keeps_parameters(own: ReferenceBackend, logits: Tensor, table: Any, slots: Any) -> Any:
    """What a slot was first sampled by counts for good."""
    kept = _TABLES.setdefault(table, SamplingTable(table.num_slots, table.vocab_size))
    for slot in slots:
        if (table, slot) not in _TAKEN:
            _TAKEN.add((table, slot))
            kept.put(slot, table.row(slot))
    return own.sample(logits, kept, slots)


def _reports_once(own: ReferenceBackend, *args: Any) -> Any:
    """Log-probabilities of all rows are those of the first."""
    found = own.sample(*args)
    return replace(found, logprobs=found.logprobs[:1].expand_as(found.logprobs))


def _ranks_from_zero(own: ReferenceBackend, *args: Any) -> Any:
    found = own.score(*args)
    return replace(found, ranks=found.ranks - 1)


def _ignores_bias(own: ReferenceBackend, parts: Any, bias: Any, dtype: Any) -> Any:  # noqa: ARG001
    return own.prepare_linear(parts, None, dtype)


def _reuses_results(compiled: Any, step: StepInput[Any], results: Sequence[str]) -> Any:
    """Results lie in one place, where the next step's are written."""
    computed = compiled(step, results)
    for place, tensor in enumerate(computed):
        kept = _KEPT.setdefault(place, tensor)
        if kept.shape == tensor.shape and kept.dtype == tensor.dtype:
            kept.copy_(tensor)
        else:
            _KEPT[place] = tensor
    return tuple(_KEPT[place] for place in range(len(computed)))


def _keeps_no_snapshot(x: Tensor, metadata: Any, cache: Any, *rest: Any, **options: Any) -> Tensor:
    """The state behind the last token alone is kept, and not those at ends of blocks."""
    out: Tensor = OPERATIONS_BEFORE["short_conv"](x, metadata, cache, *rest, **options)
    for sequence in metadata.sequences:
        last = (sequence.begin + sequence.rows.stop - sequence.rows.start - 1) // cache.block_size
        for half in cache.halves():
            half[sequence.blocks[:last]] = torch.nan
    return out


def _keeps_drafts(x: Tensor, metadata: Any, cache: Any, *rest: Any, **options: Any) -> Tensor:
    """The state behind the last token is kept, also where it is a draft."""
    every = [
        replace(it, kept_end=it.begin + it.rows.stop - it.rows.start) for it in metadata.sequences
    ]
    wrong = replace(metadata, sequences=every)
    out: Tensor = OPERATIONS_BEFORE["short_conv"](x, wrong, cache, *rest, **options)
    return out


def _keeps_no_state(x: Tensor, metadata: Any, cache: Any, *rest: Any, **options: Any) -> Tensor:
    """Every step begins as the first one does."""
    out: Tensor = OPERATIONS_BEFORE["short_conv"](x, metadata, cache, *rest, **options)
    for sequence in metadata.sequences:
        for half in cache.halves():
            half[sequence.blocks] = 0
    return out


def _swaps_halves(x: Tensor, metadata: Any, cache: Any, *rest: Any, **options: Any) -> Tensor:
    """The first half of the units lies where the other belongs."""
    memory = KVCache(cache.memory.values, cache.memory.keys)
    swapped = replace(cache, memory=memory)
    out: Tensor = OPERATIONS_BEFORE["short_conv"](x, metadata, swapped, *rest, **options)
    return out


def _latents_unnormed(*args: Any, **options: Any) -> Tensor:
    *rest, norm = args
    out: Tensor = OPERATIONS_BEFORE["rotate_and_cache_latents"](*rest, norm / norm, **options)
    return out


def _latents_of_their_own(own: ReferenceBackend, *shape: Any) -> LatentCache:
    return own.allocate_latent_cache(*shape[:6])


def _heads_in_turn(x: Tensor, weight: Any) -> Tensor:
    """The maps of heads in the order of the last to the first."""
    out: Tensor = OPERATIONS_BEFORE["head_linear"](x, replace(weight, heads=weight.heads[::-1]))
    return out


def _counts_no_tokens(x: Tensor, logits: Tensor, experts: Any) -> Tensor:
    uncounted = replace(experts, counts=torch.zeros_like(experts.counts))
    out: Tensor = OPERATIONS_BEFORE["experts"](x, logits, uncounted)
    return out


def _counts_all_rows(name: str) -> dict[str, Compute]:
    """Rows of others are added, times zero, as of a product with a mask."""
    return _more(name, lambda out: out + 0 * out.sum(0))


def _reads_from_the_beginning(
    queries: Tensor, metadata: Any, cache: Any, *rest: Any, **own: Any
) -> Tensor:
    """The first tokens of contexts have a weight of zero behind windows, and are read."""
    out: Tensor = OPERATIONS_BEFORE["attention"](queries, metadata, cache, *rest, **own)
    size = cache.values.shape[2]
    (begin, *_) = metadata.passes[0].kv_rows
    read = cache.values.flatten(0, 1).view(-1, min(128, size), cache.values.shape[3])
    return out + 0 * read[begin.flatten()[0]].sum()


def _forgets_long_contexts(queries: Tensor, metadata: Any, *rest: Any, **own: Any) -> Tensor:
    out: Tensor = OPERATIONS_BEFORE["attention"](queries, metadata, *rest, **own)
    longest = max(int(part.last_positions.max()) for part in metadata.passes)
    return out if longest < 512 else out * 1.01


def _computes_nothing_for_what_is_given(
    compiled: Any, step: StepInput[Any], results: Sequence[str]
) -> Any:
    computed = compiled(step, results)
    return tuple(
        torch.zeros_like(tensor) if name in step.tensors else tensor
        for name, tensor in zip(results, computed, strict=True)
    )


class _TakesNothing(HostMemory):
    """Memory in which weights do not count."""

    def taken_bytes(self) -> int:
        return 0


class _Full(HostMemory):
    def free_bytes(self) -> int:
        return 0


def _counts_results_only(compiled: Any, step: StepInput[Any], results: Sequence[str]) -> int:
    return sum(each.nbytes for each in compiled(step, results))


def _reduces_several_rows(x: Tensor, group: Any) -> Tensor:
    return x if len(x) == 1 else group.all_reduce(x)


BROKEN: dict[str, tuple[str, Mapping[str, Any]]] = {
    "a formula": ("silu_and_mul", {"operations": _more("silu_and_mul", lambda out: out * 1.001)}),
    "an eps": ("rms_norm", {"operations": {"rms_norm": _twice_the_eps}}),
    "a hidden NaN": ("gelu", {"operations": _more("gelu", lambda out: out.nan_to_num(0.0))}),
    "an input that is written to": ("scale", {"operations": {"scale": _writes_input}}),
    "bits that change with the batch": (
        "weights of float32",
        {"operations": {"linear": _shared_sums}},
    ),
    "a bias": ("weights of float32", {"methods": {"prepare_linear": _ignores_bias}}),
    "the index of an argmax": (
        "all_gather, argmax",
        {"operations": _more("linear_argmax", lambda out: out + torch.tensor([1, 0, 0]))},
    ),
    "a window": ("rotate_and_cache, attention", {"operations": _without("attention", window=None)}),
    "a chunk": ("rotate_and_cache, attention", {"operations": _without("attention", chunk=None)}),
    "a soft cap": (
        "rotate_and_cache, attention",
        {"operations": _without("attention", softcap=None)},
    ),
    "block tables": (
        "rotate_and_cache, attention",
        {"methods": {"attention_metadata": _tables_of_others}},
    ),
    "memory of a KV cache": (
        "KV layout and store",
        {"methods": {"allocate_kv_cache": _own_memory}},
    ),
    "the order of heads and tokens": (
        "KV layout and store",
        {"methods": {"allocate_kv_cache": _tokens_first}},
    ),
    "a snapshot": ("short_conv", {"operations": {"short_conv": _keeps_no_snapshot}}),
    "a state behind drafts": ("short_conv", {"operations": {"short_conv": _keeps_drafts}}),
    "counts of tokens": ("experts", {"operations": {"experts": _counts_no_tokens}}),
    "counts of tokens, step by step": (
        "a model with experts, answers",
        {"operations": {"experts": _counts_no_tokens}},
    ),
    "a state that steps carry on": (
        "a model with states, answers",
        {"operations": {"short_conv": _keeps_no_state}},
    ),
    "places of units": ("short_conv", {"operations": {"short_conv": _swaps_halves}}),
    "maps of heads": ("head_linear", {"operations": {"head_linear": _heads_in_turn}}),
    "norms of latents": (
        "rotate_and_cache_latents, latent_attention",
        {"operations": {"rotate_and_cache_latents": _latents_unnormed}},
    ),
    "memory of latents": (
        "formats, block sizes and layout of latents",
        {"methods": {"allocate_latent_cache": _latents_of_their_own}},
    ),
    "a broken sequence beside others": (
        "rotate_and_cache, attention",
        {"operations": _counts_all_rows("attention")},
    ),
    "a broken sequence of latents": (
        "rotate_and_cache_latents, latent_attention",
        {"operations": _counts_all_rows("latent_attention")},
    ),
    "a broken state beside others": (
        "gated_delta",
        {"operations": _counts_all_rows("gated_delta")},
    ),
    "a broken row of experts": ("experts", {"operations": _counts_all_rows("experts")}),
    "a broken row of a product": (
        "weights of float32",
        {"operations": _counts_all_rows("linear")},
    ),
    "tokens behind a window": (
        "blocks behind windows",
        {"operations": {"attention": _reads_from_the_beginning}, "window_multiple": 1},
    ),
    "a long context": ("long contexts", {"operations": {"attention": _forgets_long_contexts}}),
    "a result that a step brings and wants": (
        "results of graphs",
        {"methods": {"run": _computes_nothing_for_what_is_given}},
    ),
    "copies of KV that are not done": ("KV store", {"store": _Unawaited}),
    "copies of KV in any order": ("KV store", {"store": _Unordered}),
    "blocks of KV in batches": ("KV store", {"store": _FirstOfBatch}),
    "parts of blocks of KV": ("KV store", {"store": _FirstHead}),
    "regions for networks": ("KV store", {"store": _RegionOfBlock}),
    "regions for networks that overlap": ("KV store", {"store": _OneRegion}),
    "weights that do not count": ("memory", {"memory": _TakesNothing()}),
    "memory that is never free": ("memory", {"memory": _Full()}),
    "values between inputs and results": (
        "profile of steps",
        {"methods": {"profile": _counts_results_only}},
    ),
    "a profile of any step": (
        "profile of steps",
        {"methods": {"profile": lambda *_: 2**30}},
    ),
    "a sum over ranks": ("all_reduce", {"operations": {"all_reduce": _reduces_several_rows}}),
    "results that the next step overwrites": (
        "results of graphs",
        {"methods": {"run": _reuses_results}},
    ),
    "a sampled token": ("sample", {"methods": {"sample": _unlikely}}),
    "slots of rows": ("sample", {"methods": {"sample": _slots_in_order}}),
    "parameters that change": ("sample", {"methods": {"sample": _keeps_parameters}}),
    "reports of rows": ("sample", {"methods": {"sample": _reports_once}}),
    "a rank of a token": ("score", {"methods": {"score": _ranks_from_zero}}),
    "a format that it says it lacks": (
        "weights of int8",
        {"weight_formats": ("float32", "bfloat16", "float16")},
    ),
    "an unknown capability": ("capabilities", {"lacks_operations": ("warp",)}),
    "answers of a model": (
        "pagoda-tiny, answers",
        {"operations": _more("rms_norm", lambda out: out.flip(-1) * 0.5 + out * 0.5)},
    ),
    "company of a model": (
        "pagoda-tiny, any company",
        {"operations": {"linear": _shared_sums}},
    ),
    "a second device": (
        "pagoda-tiny, two devices of a rank",
        {"on_two": _more("rms_norm", lambda out: out.flip(-1) * 0.5 + out * 0.5)},
    ),
}
"""Wrong backends by what is wrong with them: the check that must fail, and how they are made."""


def _cache_of_128(method: str) -> Callable[..., Any]:
    def allocate(own: ReferenceBackend, num_blocks: int, block_size: int, *rest: Any) -> Any:
        if block_size != 128:
            raise ValueError(f"blocks have 128 tokens, not {block_size}")
        return getattr(own, method)(num_blocks, block_size, *rest)

    return allocate


BLOCKS_OF_128: Mapping[str, Any] = {
    "block_sizes": (128,),
    "methods": {
        name: _cache_of_128(name) for name in ("allocate_kv_cache", "allocate_latent_cache")
    },
}
"""A right backend with blocks of one size."""

chosen = ""


def open_backend(devices: DeviceSet) -> Any:
    fields = dict(BROKEN[chosen][1])
    on_two = fields.pop("on_two", {})
    if len(devices.numbers) == 2:
        fields["operations"] = on_two
    if "store" in fields:
        return WithStore(**fields)
    return Wrong(**fields)
