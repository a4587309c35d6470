# SPDX-License-Identifier: Apache-2.0
"""Parts of a model that ranks hold, which together are the whole."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from block_weights import make_blocks
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pagoda.backend.reference.backend import ReferenceBackend
from pagoda.backend.weights import (
    BlockWeight,
    DenseWeight,
    GroupedWeight,
    LinearWeight,
    dequantize,
    weight_bytes,
    weight_format,
)
from pagoda.checkpoints.checkpoint_quantization import CheckpointQuantization, GroupScheme
from pagoda.checkpoints.config_json import parse_model_config
from pagoda.checkpoints.gguf.config import BLOCKS
from pagoda.checkpoints.linears import LinearRole, LinearSpec
from pagoda.checkpoints.model_spec import ModelSpec
from pagoda.checkpoints.presets import PRESETS
from pagoda.checkpoints.weight_formats import (
    DenseFormat,
    Fp8Format,
    Quantization,
    WeightFormat,
    part_format,
)
from pagoda.errors import ConfigError
from pagoda.model.quantization import QuantizationOnLoad
from pagoda.model.sharding import (
    LinearShard,
    Shard,
    check_quantized_parts,
    shard_of,
    split_layers,
    take_part,
    whole,
)
from pagoda.parallel.config import ParallelConfig, channel_share
from pagoda.plugins.backend_check.products import fp8_weight

LAYER = LinearSpec("a.b", 48, 256, LinearRole.MLP_IN)


def model(**changes: Any) -> ModelSpec:
    return parse_model_config(PRESETS["qwen3-0.6b"] | changes, source="test")


def shards(config: ModelSpec, tp: int, pp: int = 1) -> list[Shard]:
    parallel = ParallelConfig(tensor_parallel_size=tp, pipeline_parallel_size=pp)
    return [shard_of(config, parallel, place) for place in parallel.places(0)]


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (4, 1), (8, 1), (1, 3), (2, 2), (16, 7)])
def test_ranks_hold_every_weight_once(tp: int, pp: int) -> None:
    config = model(vocab_size=500, hidden_size=64, intermediate_size=192, head_dim=4)
    held: dict[str, Tensor] = {}
    for shard in shards(config, tp, pp):
        for linear in shard.linears():
            counts = held.setdefault(linear.name, torch.zeros(linear.outputs, linear.inputs))
            part = shard.part_of(linear)
            counts[
                part.outputs.start : part.outputs.stop, part.inputs.start : part.inputs.stop
            ] += 1
    assert held.keys() == {m.name for m in whole(config).linears()}
    for name, counts in held.items():
        # The eight KV heads are held twice by 16 ranks; a tied table is needed at both ends of a pipeline.
        shared = name.endswith(("k_proj", "v_proj"))
        times = 2 if (tp == 16 and shared) or (pp > 1 and name == "model.embed_tokens") else 1
        assert bool((counts == times).all()), name


def test_queries_find_their_keys_on_their_rank() -> None:
    config = model()
    queries_per_kv = config.num_heads // config.num_kv_heads
    for tp in (2, 4, 8, 16):
        for shard in shards(config, tp):
            queries = shard.heads
            keys = {query // queries_per_kv for query in queries}
            assert keys == set(shard.kv_heads)


@pytest.mark.parametrize(
    ("channels", "tp", "unit", "largest"),
    [
        (3072, 4, 128, 768),
        (768, 4, 64, 192),
        (768, 8, 32, 96),
        (11008, 4, 128, 2816),
        (8960, 4, 128, 2304),
        (5632, 8, 64, 704),
        (192, 2, 32, 96),
        (96, 2, 32, 64),
        (100, 3, 1, 34),
        (33, 16, 1, 3),
    ],
)
def test_channels_are_cut_between_groups(channels: int, tp: int, unit: int, largest: int) -> None:
    shares = [channel_share(channels, rank, tp) for rank in range(tp)]
    assert all(share.start % unit == share.stop % unit == 0 for share in shares)
    assert max(map(len, shares)) == largest


@given(st.integers(1, 5000), st.integers(1, 64))
def test_no_rank_goes_without_channels(count: int, tp: int) -> None:
    shares = [channel_share(count, rank, tp) for rank in range(tp)]
    assert [channel for share in shares for channel in share] == list(range(count))
    assert count < tp or all(shares)


def test_bytes_of_all_ranks_add_up() -> None:
    config = model()
    norms = 28 * (2 * 1024 + 2 * 128) + 1024
    together = sum(shard.weight_bytes(None, 2) for shard in shards(config, 4))
    assert together == whole(config).weight_bytes(None, 2) + 3 * 4 * norms


@pytest.mark.parametrize("tied", [True, False])
def test_a_forward_pass_reads_all_weights_but_the_tables(tied: bool) -> None:
    config = model(tie_word_embeddings=tied)
    table = config.embedding.outputs * config.embedding.inputs
    everything = whole(config)
    tables = table if tied else 2 * table
    assert everything.forward_bytes(None, 1) == everything.weight_bytes(None, 1) - tables
    assert everything.flops_per_token() == 2 * (_cost(config, everything.layers) - table)
    for stage in shards(config, 1, 2):
        assert stage.forward_bytes(None, 1) == stage.weight_bytes(None, 1) - table
    parts = shards(config, 4)
    assert sum(part.flops_per_token() for part in parts) == everything.flops_per_token()


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_ranks_share_the_bytes_of_experts(expert_parallel: bool) -> None:
    config = parse_model_config(PRESETS["mixtral-8x7b"] | {"num_hidden_layers": 2}, source="test")
    everything = whole(config).expert_bytes(None, 2)
    assert everything == 2 * 2 * 8 * 3 * config.hidden_size * 14336
    parallel = ParallelConfig(tensor_parallel_size=4, expert_parallel=expert_parallel)
    ranks = [shard_of(config, parallel, place) for place in parallel.places(0)]
    assert [it.expert_bytes(None, 2) for it in ranks] == [everything // 4] * 4
    assert whole(model()).expert_bytes(None, 2) == 0


def _cost(config: ModelSpec, layers: range) -> int:
    head = config.head.outputs * config.head.inputs if layers.stop == config.num_layers else 0
    return head + sum(config.weights_per_token(layer) for layer in layers)


@given(st.integers(1, 9), st.data(), st.sampled_from([100, 20_000, 151_936]))
def test_layers_are_split_by_cost(num_layers: int, data: st.DataObject, vocab: int) -> None:
    config = model(num_hidden_layers=num_layers, vocab_size=vocab)
    num_stages = data.draw(st.integers(1, num_layers))
    stages = split_layers(config, num_stages)
    assert len(stages) == num_stages
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))
    assert all(stages)
    cheapest = min(
        max(_cost(config, range(a, b)) for a, b in itertools.pairwise([0, *cuts, num_layers]))
        for cuts in itertools.combinations(range(1, num_layers), num_stages - 1)
    )
    assert max(_cost(config, stage) for stage in stages) == cheapest


def test_a_large_head_leaves_the_last_stage_fewer_layers() -> None:
    first, last = split_layers(model(), 2)
    assert len(first) > len(last) + 5


BLOCK_KINDS = ("Q4_1", "Q2_K", "Q4_K", "IQ4_XS", "IQ1_S", "IQ2_XS", "IQ3_S", "TQ1_0")


def _weights() -> dict[str, LinearWeight]:
    ops = ReferenceBackend()
    values = torch.randn(48, 256, generator=torch.Generator().manual_seed(1))
    grouped = ops.quantize_int4(values, 64)
    order = torch.randperm(256, generator=torch.Generator().manual_seed(2))
    offsets = torch.randn(grouped.scales.shape).half()
    return {
        "dense": DenseWeight(values),
        "int8": ops.quantize_int8(values, symmetric=True),
        "int4": grouped,
        "offsets": GroupedWeight(grouped.codes, grouped.scales, offsets, 4, 64),
        "fp8": fp8_weight(48, 256, 64),
        "fp8 by output": fp8_weight(48, 256, None),
        "ordered": GroupedWeight(grouped.codes, grouped.scales, offsets, 4, 64, order),
        **{kind: make_blocks(BLOCKS[kind], 48, 256, 3) for kind in BLOCK_KINDS},
    }


@pytest.mark.parametrize("kind", _weights())
def test_parts_of_weights_are_parts_of_their_numbers(kind: str) -> None:
    weight = _weights()[kind]
    numbers = dequantize(weight)
    for outputs, inputs in (
        (range(48), range(256)),
        (range(16, 32), range(256)),
        (range(48), range(64, 192)),
    ):
        part = take_part(LAYER, weight, LinearShard(outputs, inputs), torch.float32)
        assert torch.equal(dequantize(part), numbers[outputs][:, inputs])
        for tensor in vars(part).values():
            assert not isinstance(tensor, Tensor) or tensor.is_contiguous()


@pytest.mark.parametrize(
    "kind", ["int8", "int4", "offsets", "fp8", "fp8 by output", "ordered", *BLOCK_KINDS]
)
def test_parts_do_not_keep_the_memory_of_the_whole(kind: str) -> None:
    for part in (LinearShard(range(16, 32), range(256)), LinearShard(range(48), range(64, 192))):
        held = take_part(LAYER, _weights()[kind], part, torch.float32)
        for tensor in vars(held).values():
            if isinstance(tensor, Tensor):
                assert tensor.untyped_storage().nbytes() == tensor.nbytes


@pytest.mark.parametrize("kind", ["int4", "offsets"])
def test_groups_are_cut_into_smaller_ones_of_the_same_scale(kind: str) -> None:
    weight = _weights()[kind]
    part = take_part(LAYER, weight, LinearShard(range(48), range(32, 160)), torch.float32)
    assert isinstance(part, GroupedWeight)
    assert part.group_size == 32
    assert torch.equal(dequantize(part), dequantize(weight)[:, 32:160])


@pytest.mark.parametrize(
    ("size", "cut", "stored_format"),
    [
        (None, range(5, 201), Fp8Format(None)),
        (128, range(96, 200), Fp8Format(32)),
        (96, range(96, 192), Fp8Format(96)),
        (96, range(32, 200), Fp8Format(32)),
        (64, range(64, 200), Fp8Format(64)),
        (64, range(16, 200), DenseFormat()),
    ],
)
def test_8_bit_floats_are_cut_anywhere(
    size: int | None, cut: range, stored_format: WeightFormat
) -> None:
    """Groups become smaller ones that kernels take, of which the last may be cut off, or else all become dense."""
    layer, weight = LinearSpec("a.b", 48, 200, LinearRole.MLP_OUT), fp8_weight(48, 200, size)
    part = take_part(layer, weight, LinearShard(range(3, 40), cut), torch.float32)
    assert weight_format(part) == part_format(weight_format(weight), 200, cut) == stored_format
    assert torch.equal(dequantize(part), dequantize(weight)[3:40, cut.start : cut.stop])
    groups = 0 if isinstance(part, DenseWeight) else part.scales.numel() * 4
    assert weight_bytes(part, torch.float32) == part.values.nbytes + groups


def test_the_smallest_groups_are_not_cut() -> None:
    part = LinearShard(range(48), range(16, 256))
    with pytest.raises(ConfigError) as caught:
        take_part(LAYER, _weights()["int4"], part, torch.float32)
    assert str(caught.value) == (
        "the 256 inputs of a.b.weight, quantized in groups, cannot be cut into parts such as 16 to 256; "
        "take a smaller --tensor-parallel-size."
    )


def _check_parts(quantization: Quantization, tp: int, **changes: Any) -> None:
    parallel = ParallelConfig(tensor_parallel_size=tp)
    check_quantized_parts(model(**changes), quantization, parallel)


GPTQ, ACT_ORDER = (
    CheckpointQuantization(
        "gptq", targets=(("Linear", GroupScheme(4, 128, symmetric=True, act_order=ordered)),)
    )
    for ordered in (False, True)
)
QWEN_0_5B = {
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_size": 896,
    "intermediate_size": 4864,
}
NARROW = {"head_dim": 40, "num_attention_heads": 16, "intermediate_size": 1280}


@pytest.mark.parametrize(
    ("changes", "tp"),
    [
        ({"intermediate_size": 11008}, 4),
        ({"intermediate_size": 8960}, 4),
        ({"intermediate_size": 5632}, 8),
        (QWEN_0_5B, 2),
        (QWEN_0_5B, 14),
    ],
)
def test_ordinary_quantized_models_can_be_split(changes: dict[str, Any], tp: int) -> None:
    _check_parts(GPTQ, tp, **changes)
    _check_parts(QuantizationOnLoad(32), tp, **changes)
    _check_parts(QuantizationOnLoad(None), tp, **changes)


@pytest.mark.parametrize(
    ("quantization", "tp", "changes", "cut", "nearest"),
    [
        (GPTQ, 8, NARROW, (640, 80), "4."),
        (
            QuantizationOnLoad(128),
            2,
            QWEN_0_5B,
            (896, 448),
            "1, or take a smaller --quantization-group-size.",
        ),
    ],
)
def test_parts_that_cannot_be_held_are_refused_before_loading(
    quantization: Quantization, tp: int, changes: dict[str, int], cut: tuple[int, int], nearest: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        _check_parts(quantization, tp, **changes)
    assert str(caught.value) == (
        f"--tensor-parallel-size {tp} cuts the {cut[0]} inputs of model.layers.0.self_attn.o_proj.weight inside "
        f"its groups of 128, into parts such as 0 to {cut[1]}; the nearest that does not is {nearest}"
    )


def test_parts_of_narrow_heads() -> None:
    _check_parts(GPTQ, 4, **NARROW)
    _check_parts(ACT_ORDER, 8, **NARROW)


@pytest.mark.parametrize(("start", "block_size"), [(0, 128), (128, 128), (64, 64), (32, 32)])
def test_blocks_are_cut_into_smaller_ones_of_the_same_scale(start: int, block_size: int) -> None:
    for kind in ("Q6_K", "IQ2_XXS", "TQ1_0", "TQ2_0"):
        weight = make_blocks(BLOCKS[kind], 48, 256, 3)
        part = take_part(
            LAYER, weight, LinearShard(range(48), range(start, start + 128)), torch.float32
        )
        assert isinstance(part, BlockWeight)
        assert part.stored_format.block_size == block_size
        assert torch.equal(dequantize(part), dequantize(weight)[:, start : start + 128])


def test_blocks_are_not_cut_inside_32_inputs() -> None:
    weight = make_blocks(BLOCKS["Q6_K"], 48, 256, 3)
    with pytest.raises(ConfigError, match=r"such as 16 to 144; take a smaller"):
        take_part(LAYER, weight, LinearShard(range(48), range(16, 144)), torch.float32)
    stored_format = weight_format(weight)

    class Stored:
        summary = "Q6_K"

        def format_of(self, linear: LinearSpec) -> WeightFormat:
            return stored_format if linear.role is LinearRole.ATTENTION_OUT else DenseFormat()

    config = model(num_attention_heads=16, num_key_value_heads=8, head_dim=16, hidden_size=256)
    check_quantized_parts(config, Stored(), ParallelConfig(tensor_parallel_size=8))
    with pytest.raises(ConfigError) as caught:
        check_quantized_parts(config, Stored(), ParallelConfig(tensor_parallel_size=16))
    assert str(caught.value) == (
        "--tensor-parallel-size 16 cuts the 256 inputs of model.layers.0.self_attn.o_proj.weight inside its "
        "blocks, which can be cut at multiples of 32 only, into parts such as 0 to 16; the nearest that does not "
        "is 8."
    )
