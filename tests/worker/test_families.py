# SPDX-License-Identifier: Apache-2.0
"""Every family answers as transformers does: batched, cut, cached, preempted and split over ranks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from driver import Driver, answer_differences, in_float64, load, rounding
from family_models import FAMILIES, TEXT_PARTS, make_model, of_one_layer
from gguf_families import ROWS
from gguf_models import ARCHITECTURES, save_gguf
from in_process import InProcessEngine, Oracle, save_oracle
from own_code_models import OWN_CODE, as_makers_publish, make_like
from published_models import as_published
from scan_models import NEVER_ONE_LAYER
from tiny_models import continuation

from pagoda.checkpoints.config_json import read_model_config
from pagoda.checkpoints.families import FAMILIES as KNOWN
from pagoda.errors import ConfigError
from pagoda.messages.frontend import GenerateRequest, Work
from pagoda.messages.kv_groups import KVKind
from pagoda.messages.sampling_params import SamplingParams
from pagoda.model.sharding import least_block_size
from pagoda.parallel.config import ParallelConfig

LENGTH = 64
CONTEXT = 224
"""Holds the longest prompt and its answer."""
_BY_ALIAS = {alias: family for family in KNOWN.values() for alias in family.aliases}
IN_GGUF = [
    name
    for name, (kind, _) in FAMILIES.items()
    if {**_BY_ALIAS, **KNOWN}[kind].gguf is not None
    and kind.removesuffix("ForCausalLM") in ARCHITECTURES
    and name not in ROWS
    and not name.endswith(
        (
            "-scale",
            "-mixed",
            "-groups",
            "-bias",
            "-chunked",
            "-unnormed",
            "next-dense",
            "-ntk",
            "-12b",
            "-plus",
            "-relu2",
        )
    )
]
"""Others have what files do not say."""
IN_GGUF += ["glm4-moe-lite"]
"""In files these are of Granite 3's architectures, and of DeepSeek-V3's."""
_PREFIX = list(range(100, 196))

WAYS: dict[str, dict[str, Any]] = {
    "batched": {},
    "chunked": {"block_size": 4, "max_num_batched_tokens": 7},
    "prefix-cached": {"enable_prefix_caching": True},
    "preempted": {"block_size": 4, "max_num_batched_tokens": 64},
    "tp 2": {"parallel": ParallelConfig(tensor_parallel_size=2)},
    "pp 2": {"parallel": ParallelConfig(pipeline_parallel_size=2)},
    "reference": {"backend": "reference", "max_num_batched_tokens": 37},
}


@pytest.fixture(scope="module", params=[*FAMILIES, *TEXT_PARTS, *OWN_CODE])
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    """A family, with prompts of which some begin alike."""
    rng = random.Random(5)
    tails = [[rng.randrange(320) for _ in range(length)] for length in (120, 7, 1, 30)]
    prompts = [*tails[:2], _PREFIX + tails[2], _PREFIX + tails[3]]
    directory = tmp_path_factory.mktemp("model")
    make = make_like if request.param in OWN_CODE else make_model
    oracle = save_oracle(directory, make(request.param), prompts, LENGTH)
    if request.param in TEXT_PARTS:
        as_published(directory)
    if request.param in OWN_CODE:
        as_makers_publish(request.param, directory)
    assert len({tuple(tokens) for tokens in oracle.expected}) == len(prompts)
    return oracle


@pytest.mark.parametrize("way", WAYS)
def test_greedy_answers_are_those_of_transformers(way: str, oracle: Oracle) -> None:
    spec = read_model_config(oracle.directory)
    layers, least = spec.layers, least_block_size(spec, 4)
    options = {"backend": "auto", "max_model_len": CONTEXT} | WAYS[way]
    if way == "pp 2" and spec.is_whole:
        with pytest.raises(ConfigError, match="pipeline-parallel-size 2 does not go"):
            InProcessEngine(oracle.directory, **options)
        return
    size = options.get("block_size", 16)
    while size < least:  # blocks have room for states
        size *= 2
    options["block_size"] = size
    engine = InProcessEngine(oracle.directory, **options)
    if way == "preempted":
        num_blocks = 3 + sum(
            group.most_blocks(0, CONTEXT, CONTEXT)
            if group.kind is KVKind.STATE
            else -(-CONTEXT // size)
            for group in engine.kv_groups
        )
        engine = InProcessEngine(oracle.directory, num_blocks=num_blocks, **options)
    assert engine.answer(oracle.requests) == oracle.expected
    if way == "prefix-cached":
        assert engine.answer(oracle.requests) == oracle.expected
        multiple = max(group.block_size for group in engine.kv_groups)
        assert engine.load().num_prefix_hit_tokens >= len(_PREFIX) // multiple * multiple
    windows = [layer.attention.window for layer in layers]
    # A small pool holds all requests where blocks behind windows, or older states, are freed.
    if None in windows and any(layer.state is None for layer in layers):
        assert (engine.load().num_preemptions > 0) is (way == "preempted")


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in NEVER_ONE_LAYER])
def test_log_probabilities_of_one_layer(name: str, tmp_path: Path) -> None:
    model = make_model(name, **of_one_layer(name))
    model.save_pretrained(tmp_path)
    runner = load(tmp_path, max_model_len=128)
    exact = in_float64(model)
    assert answer_differences(runner, exact).max() < max(5e-5, rounding(model, exact))


def test_experts_that_transformers_saves_the_other_way_round(tmp_path: Path) -> None:
    """Files of its makers have experts of Qwen3-VL by inputs, those of transformers 5 by outputs."""
    prompts = [[random.Random(7).randrange(320) for _ in range(50)]]
    oracle = save_oracle(tmp_path, make_model("qwen3-vl-moe"), prompts, LENGTH)
    engine = InProcessEngine(tmp_path, max_model_len=CONTEXT)
    assert engine.answer(oracle.requests) == oracle.expected


def test_norms_of_all_heads_span_ranks_that_share_keys(tmp_path: Path) -> None:
    """Four ranks for two KV heads: each key counts twice in the sum of squares of all."""
    prompts = [[random.Random(7).randrange(320) for _ in range(50)]]
    oracle = save_oracle(tmp_path, make_model("olmo2"), prompts, LENGTH)
    parallel = ParallelConfig(tensor_parallel_size=4)
    engine = InProcessEngine(tmp_path, max_model_len=CONTEXT, parallel=parallel)
    assert engine.answer(oracle.requests) == oracle.expected


@pytest.mark.parametrize("name", IN_GGUF)
def test_gguf_files_answer_as_transformers_does(name: str, tmp_path: Path) -> None:
    model = make_model(name)
    save_gguf(model, tmp_path / "m.gguf")
    prompt = [random.Random(0).randrange(320) for _ in range(100)]
    driver = Driver(load(tmp_path / "m.gguf", dtype="float32", max_model_len=CONTEXT))
    driver.start(0, prompt)
    driver.run([0], LENGTH)
    assert driver.output(0) == continuation(model, prompt, LENGTH)


@pytest.mark.parametrize("name", ["exaone", "internlm2", "orion"])
def test_gguf_files_of_families_with_code_of_their_own(name: str, tmp_path: Path) -> None:
    model = make_like(name)
    save_gguf(model, tmp_path / "m.gguf", architecture=name)
    prompt = [random.Random(0).randrange(320) for _ in range(100)]
    driver = Driver(load(tmp_path / "m.gguf", dtype="float32", max_model_len=CONTEXT))
    driver.start(0, prompt)
    driver.run([0], LENGTH)
    assert driver.output(0) == continuation(model, prompt, LENGTH)


def test_windows_hold_a_quarter_of_the_kv_of_a_long_context(tmp_path: Path) -> None:
    """At 32,768 tokens of a model with one of six layers full, as Gemma 3 has them."""
    length, answer = 32_768, 16
    model = make_model("gemma3", max_position_embeddings=length, sliding_window=1024)
    model.save_pretrained(tmp_path)
    full = model.config.num_hidden_layers * length // 16
    sampling = SamplingParams(temperature=0, seed=0, max_tokens=answer)
    prompt = [random.Random(3).randrange(320) for _ in range(length - answer)]
    request = GenerateRequest(request_id="long", prompt_token_ids=prompt, work=Work(sampling))
    engine = InProcessEngine(tmp_path, max_model_len=length, num_blocks=full // 4)
    num_tokens, held = 0, full
    for chunk in engine.chunks([request]):
        num_tokens += len(chunk.token_ids)
        if chunk.finish_reason is None:
            held = engine.load().num_blocks - engine.load().num_free_blocks
    assert num_tokens == answer
    assert engine.load().num_preemptions == 0
    assert held < 0.2 * full


def test_frequencies_for_long_contexts(tmp_path: Path) -> None:
    """Long factors hold for all sequences of a server that takes sequences beyond the original length."""
    model = make_model("phi3-longrope", original_max_position_embeddings=64)
    oracle = save_oracle(tmp_path, model, [list(range(100, 200))], LENGTH)
    engine = InProcessEngine(tmp_path, max_model_len=CONTEXT)
    assert engine.answer(oracle.requests) == oracle.expected


def test_frequencies_for_long_contexts_are_told_with_the_flag_that_avoids_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_model("phi3-longrope", original_max_position_embeddings=64).save_pretrained(tmp_path)
    for length, told in ((64, []), (65, ["--max-model-len 64 takes the model's own"])):
        caplog.clear()
        load(tmp_path, max_model_len=length)
        said = [record.getMessage() for record in caplog.records if "LongRoPE" in record.msg]
        assert len(said) == len(told)
        assert all(part in message for part, message in zip(told, said, strict=True))
