# SPDX-License-Identifier: Apache-2.0
"""Plans say which bytes go where; checked by copying bytes between ranks that are cut in any way."""

from __future__ import annotations

import random
from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagoda.backend.reference.backend import ReferenceBackend
from pagoda.checkpoints.config_json import parse_model_config
from pagoda.messages.transfers import KVPart, KVPeer, KVRank
from pagoda.model.sharding import shard_of
from pagoda.parallel.config import ParallelConfig
from pagoda.plugins.disaggregation.worker.plan import (
    OwnPart,
    PlanError,
    Run,
    find_runs,
    make_spans,
    make_staged_spans,
    own_parts,
    plan_slices,
)
from pagoda.worker.kv.store import HostKVStore
from pagoda.worker.memory_plan import LayerPlace

NUM_BLOCKS = 9
LATENT_MODEL = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "topk_method": "greedy",
    "first_k_dense_replace": 1,
    "norm_topk_prob": False,
    "max_position_embeddings": 64,
}
HEAD_BYTES = {"keys": 6, "values": 4, "key_scales": 2}

Memory = list[tuple[KVPart, bytearray]]


def content(layer: int, kind: str, block: int, head: int) -> bytes:
    return random.Random(f"{layer} {kind} {block} {head}").randbytes(HEAD_BYTES[kind])


def make_rank(layers: range, heads: range, *, filled: bool) -> Memory:
    memory: Memory = []
    for layer in layers:
        for kind, head_bytes in HEAD_BYTES.items():
            part = KVPart(
                layer,
                kind,
                heads.start,
                len(heads),
                head_bytes,
                region=len(memory),
                stride=len(heads) * head_bytes,
            )
            data = b"".join(
                content(layer, kind, block, head) if filled else bytes(head_bytes)
                for block in range(NUM_BLOCKS)
                for head in heads
            )
            memory.append((part, bytearray(data)))
    return memory


def cuts(num_layers: int, num_heads: int, stages: int, ranks: int) -> list[tuple[range, range]]:
    """Layers and heads of every rank, as `Shard` shares them out."""
    per_rank = max(1, num_heads // ranks)
    layers = [
        range(num_layers * s // stages, num_layers * (s + 1) // stages) for s in range(stages)
    ]
    firsts = [rank * num_heads // ranks for rank in range(ranks)]
    return [(stage, range(first, first + per_rank)) for stage in layers for first in firsts]


@given(
    st.data(),
    st.integers(0, 3),
    st.integers(0, 3),
    st.integers(0, 3),
    st.integers(1, 4),
)
def test_every_rank_gets_what_it_needs(
    data: st.DataObject, log_heads: int, log_there: int, log_here: int, num_layers: int
) -> None:
    num_heads = 2**log_heads
    stages_there, stages_here = (data.draw(st.integers(1, num_layers)) for _ in range(2))
    pairs = data.draw(
        st.lists(
            st.tuples(st.integers(0, NUM_BLOCKS - 1), st.integers(0, NUM_BLOCKS - 1)),
            unique_by=lambda pair: pair[1],
            max_size=NUM_BLOCKS,
        )
    )
    sources, targets = [there for there, _ in pairs], [here for _, here in pairs]
    theirs = [
        make_rank(layers, heads, filled=True)
        for layers, heads in cuts(num_layers, num_heads, stages_there, 2**log_there)
    ]
    ranks = tuple(
        KVRank(parts=tuple(part for part, _ in rank), num_blocks=NUM_BLOCKS, descriptors={})
        for rank in theirs
    )
    peer = KVPeer(peer_id="p", ranks=ranks)
    for number, (layers, heads) in enumerate(cuts(num_layers, num_heads, stages_here, 2**log_here)):
        own = make_rank(layers, heads, filled=False)
        parts = [OwnPart(part, NUM_BLOCKS) for part, _ in own]
        bases = [10_000 * region for region in range(len(own))]
        read = 0
        for rank, slices in plan_slices(parts, number, peer).items():
            spans = make_spans(slices, find_runs(sources, targets), bases)
            staged, places = make_staged_spans(slices, find_runs(sources, targets), 500)
            assert [span[:3] for span in staged] == [span[:3] for span in spans]
            assert [span.target for span in spans] == [
                bases[place.region] + place.offset for place in places
            ]
            sizes = [place.num_bytes for place in places]
            assert sizes == [span.num_bytes for span in spans]
            assert [span.target for span in staged] == [*accumulate(sizes, initial=500)][:-1]
            for span in spans:
                memory = theirs[rank][span.region][1]
                assert span.offset + span.num_bytes <= len(memory)
                index, at = divmod(span.target, 10_000)
                own[index][1][at : at + span.num_bytes] = memory[span.offset :][: span.num_bytes]
                read += span.num_bytes
        assert read == len(pairs) * sum(part.num_bytes for part, _ in own), "nothing twice"
        for part, memory in own:
            size = part.num_bytes
            for there, here in pairs:
                wanted = [content(part.layer, part.kind, there, head) for head in heads]
                assert memory[here * size : (here + 1) * size] == b"".join(wanted)


def test_blocks_that_follow_one_another_are_one_span() -> None:
    parts = [OwnPart(KVPart(0, "keys", 0, 2, 6, stride=12), 8)]
    peer = KVPeer(
        peer_id="p", ranks=(KVRank(parts=(parts[0].part,), num_blocks=8, descriptors={}),)
    )
    slices = plan_slices(parts, 0, peer)[0]
    (first, second) = make_spans(slices, find_runs([2, 3, 4, 7], [0, 1, 2, 3]), [1000])
    assert (first.offset, first.num_bytes, first.target) == (24, 36, 1000)
    assert (second.offset, second.num_bytes, second.target) == (84, 12, 1036)


def test_ranks_that_have_the_same_heads_share_the_work() -> None:
    """Four ranks here, two of which have each head; there two ranks have all of them."""
    whole = KVRank(parts=(KVPart(0, "keys", 0, 2, 6, stride=12),), num_blocks=8, descriptors={})
    peer = KVPeer(peer_id="p", ranks=(whole, whole))
    chosen = [
        next(
            iter(
                plan_slices([OwnPart(KVPart(0, "keys", rank // 2, 1, 6, stride=6), 8)], rank, peer)
            )
        )
        for rank in range(4)
    ]
    assert sorted(chosen) == [0, 0, 1, 1]


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=12))
def test_runs_are_the_same_blocks(pairs: list[tuple[int, int]]) -> None:
    runs = find_runs([there for there, _ in pairs], [here for _, here in pairs])
    again = [(run.source + n, run.target + n) for run in runs for n in range(run.length)]
    assert again == pairs


def test_runs_are_as_long_as_they_can_be() -> None:
    assert find_runs([1, 2, 3, 9, 10], [4, 5, 6, 7, 8]) == [Run(1, 4, 3), Run(9, 7, 2)]
    with pytest.raises(ValueError, match="zip"):
        find_runs([1, 2], [1])


@pytest.mark.parametrize(
    ("theirs", "clause"),
    [
        (KVPart(0, "keys", 0, 1, 6, stride=6), "it has no keys of head 1 of layer 0"),
        (KVPart(1, "keys", 0, 2, 6, stride=12), "it has no keys of head 0 of layer 0"),
        (KVPart(0, "values", 0, 2, 6, stride=12), "it has no keys of head 0 of layer 0"),
        (KVPart(0, "keys", 0, 2, 8, stride=16), "8 bytes per block, here they have 6"),
    ],
)
def test_kv_that_does_not_fit(theirs: KVPart, clause: str) -> None:
    rank = KVRank(parts=(theirs,), num_blocks=8, descriptors={})
    parts = [OwnPart(KVPart(0, "keys", 0, 2, 6, stride=12), 8)]
    with pytest.raises(PlanError, match=clause):
        plan_slices(parts, 0, KVPeer(peer_id="p", ranks=(rank,)))


def test_every_rank_gives_and_takes_latents_whole() -> None:
    """Two ranks here read from four there, each from one, whatever heads they compute."""
    config = parse_model_config(LATENT_MODEL, source="test")
    backend = ReferenceBackend()

    def parts(ranks: int) -> list[tuple[OwnPart, ...]]:
        parallel = ParallelConfig(tensor_parallel_size=ranks)
        places = [LayerPlace(0, layer) for layer in range(config.num_layers)]
        caches = [
            backend.allocate_latent_cache(NUM_BLOCKS, 16, 24, 8, torch.float32, torch.int8)
            for _ in places
        ]
        return [
            own_parts(HostKVStore(caches), shard_of(config, parallel, place), places)
            for place in parallel.places(0)
        ]

    theirs = tuple(
        KVRank(parts=tuple(own.part for own in rank), num_blocks=NUM_BLOCKS, descriptors={})
        for rank in parts(4)
    )
    for number, ours in enumerate(parts(2)):
        (read,) = plan_slices(ours, number, KVPeer(peer_id="p", ranks=theirs)).items()
        rank, slices = read
        assert rank == number
        assert sorted(piece.num_bytes for piece in slices) == [16 * 4] * 2 + [16 * 32] * 2
        assert all(piece.is_whole for piece in slices)
