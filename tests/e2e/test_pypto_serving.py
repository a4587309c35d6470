# SPDX-License-Identifier: Apache-2.0
"""Engines on the model of the Ascend device answer as the reference does, whatever happens to the device."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from handoff_engines import ask_all, engine_config, handed_over, short_requests

from benchmarks.pypto.device import counted, installed, model_directory, violations
from benchmarks.pypto.serving import PAGE, requests, serve
from pagoda.cli.openai_client import OpenAIClient
from pagoda.cli.server_process import server_process
from pagoda.fleet.engine_client import EngineClient
from pagoda.llm.llm import LLM
from pagoda.messages.frontend import GenerateRequest
from pagoda.messages.sampling_params import SamplingParams
from pagoda.text.embeddings import EmbeddingError

FEW: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 160, "threads": 1}
TINY = FEW | {"dtype": "float32", "max_model_len": 512}


def crossing(count: int) -> list[GenerateRequest]:
    """Requests with common beginnings, whose answers go on from one page to the next."""
    found = requests(count, seed=3, pages=1, max_tokens=24)
    stem = [7 * at % 900 for at in range(2 * PAGE - 12)]
    return [
        msgspec.structs.replace(
            request,
            prompt_token_ids=[*stem[: PAGE * (number % 2)], *stem[number : PAGE - 12 + number]],
        )
        for number, request in enumerate(found)
    ]


CROSSING = [*crossing(10), *requests(6, seed=1, pages=2, max_tokens=16)]
HANDED = short_requests(
    [[(7 * at + 31 * seed) % 900 for at in range(420 - 100 * seed)] for seed in range(3)]
)


@pytest.fixture(scope="module")
def expected() -> Mapping[str, list[int] | str]:
    """Tokens that the reference gives for each request, by id."""
    asked = [*CROSSING, *HANDED]
    served = asyncio.run(serve(asked, "reference", num_kv_blocks=128, **TINY))
    return dict(zip((each.request_id for each in asked), served.answers, strict=True))


async def test_losses_of_the_device_preemption_and_prefix_hits_change_no_token(
    tmp_path: Path, expected: Mapping[str, list[int]]
) -> None:
    with installed(log=str(tmp_path), fail_at=[25, 70]):
        own = await serve(CROSSING, "pypto", num_kv_blocks=8, **TINY)
    assert own.answers == [expected[request.request_id] for request in CROSSING]
    assert violations(tmp_path) == []
    assert counted(tmp_path)["failures"] == own.load.num_worker_restarts == 2
    assert own.load.num_preemptions > 0
    assert own.load.num_prefix_hit_tokens > 0


async def test_a_model_of_qwen3_14bs_form_in_bfloat16(tmp_path: Path) -> None:
    model = model_directory(tmp_path / "model", "qwen3-small")
    options = FEW | {"load_format": "dummy", "max_model_len": 1024, "num_kv_blocks": 32}
    asked = requests(8, seed=2, pages=2, max_tokens=12)
    expected = await serve(asked, "reference", model, **options)
    with installed(contracts=["qwen3-small"], log=str(tmp_path)):
        own = await serve(asked, "pypto", model, "npu:0+npu:1", **options)
    assert own.answers == expected.answers
    assert violations(tmp_path) == []
    assert counted(tmp_path)["decode"] > 0


def test_scores_of_prompts_are_given_and_embeddings_are_not(tmp_path: Path) -> None:
    prompts = ["17 + 25 =", "a b c d e f g h " * 20]
    sampling = [
        SamplingParams(temperature=0.0, max_tokens=6, prompt_logprobs=1, logprobs=2),
        SamplingParams(temperature=0.8, seed=3, max_tokens=6, min_p=0.05),
    ]

    def answers(llm: LLM) -> list[Any]:
        outputs = [output for each in sampling for output in llm.generate(prompts, each)]
        return [(output.outputs[0].token_ids, output.prompt_logprobs) for output in outputs]

    with LLM(backend="reference", block_size=PAGE, num_kv_blocks=32, **TINY) as llm:
        expected = answers(llm)
    with (
        installed(log=str(tmp_path)),
        LLM(backend="pypto", num_kv_blocks=32, **TINY) as llm,
    ):
        assert answers(llm) == expected
        with pytest.raises(EmbeddingError, match="gives tokens alone, and no embeddings"):
            llm.embed("17 + 25 =")
    assert violations(tmp_path) == []


async def test_a_server_copies_no_row_of_logits_for_qwen3s_own_sampling(tmp_path: Path) -> None:
    prompts = [f"{number} + 25 = ? " * 10 for number in (17, 4, 230, 61)]
    kinds = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}, {"temperature": 0.0}

    async def answers(url: str) -> list[str]:
        async with OpenAIClient(url) as client:
            model = await client.first_model()
            asked = [
                {
                    "model": model,
                    "prompt": prompt,
                    "max_tokens": 16,
                    "seed": seed,
                    **kinds[seed > 2],
                }
                for seed, prompt in enumerate(prompts)
            ]
            given = await asyncio.gather(*(client.post("/v1/completions", body) for body in asked))
        return [answer.choices[0].text for answer in given]

    flags = ["--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "8"]
    flags += ["--block-size", str(PAGE), "--num-kv-blocks", "32", "--log-level", "warning"]
    with server_process([*flags, "--backend", "reference"]) as server:
        expected = await answers(server.base_url)
    with installed(log=str(tmp_path)), server_process([*flags, "--backend", "pypto"]) as server:
        assert await answers(server.base_url) == expected
    found = counted(tmp_path)
    assert found["topk_select"] > 0
    assert found["downloads"] == found["violations"] == 0


async def test_prefill_and_decode_on_two_hosts_of_two_chips(
    tmp_path: Path, expected: Mapping[str, list[int]]
) -> None:
    key = tmp_path / "key"
    key.write_bytes(os.urandom(16).hex().encode())
    few = TINY | {"block_size": PAGE, "num_kv_blocks": 24, "backend": "pypto"}
    with installed(log=str(tmp_path)):
        own = await handed_over(
            engine_config(key, "prefill", devices="npu:0+npu:1", **few),
            engine_config(key, "decode", devices="npu:2+npu:3", **few),
            HANDED,
        )
    assert own == [expected[request.request_id] for request in HANDED]
    assert violations(tmp_path) == []


async def test_kv_comes_back_from_host_memory_and_disk(
    tmp_path: Path, expected: Mapping[str, list[int]]
) -> None:
    log, disk = tmp_path / "log", tmp_path / "kv"
    log.mkdir()
    block_bytes = 2 * 4 * 2 * 64 * PAGE * 4
    few = TINY | {"block_size": PAGE, "num_kv_blocks": 6}
    tiers = {
        "kv_host_bytes": 4 * block_bytes,
        "kv_disk_path": str(disk),
        "kv_disk_bytes": 1 << 28,
        "kv_disk_min_touches": 1,
    }
    others = [[(11 * at + 17 * seed) % 900 for at in range(300)] for seed in range(4)]
    key = tmp_path / "key"
    key.write_bytes(os.urandom(16).hex().encode())
    with installed(log=str(log)):
        config = engine_config(key, "decode", backend="pypto", **few, **tiers)
        replica = EngineClient(config).replica
        await replica.start()
        try:
            for asked in (HANDED, short_requests(others), HANDED):
                own = await ask_all(replica, asked, "one")
            loaded = {tier.name: tier.num_loaded for tier in (await replica.load()).tiers}
        finally:
            await replica.close()
    assert [each.token_ids for each in own] == [expected[each.request_id] for each in HANDED]
    assert loaded["host"] + loaded["disk"] > 0
    assert violations(log) == []
