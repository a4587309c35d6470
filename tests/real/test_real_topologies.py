# SPDX-License-Identifier: Apache-2.0
"""Replicas, ranks, stages, tiers of KV, and prefill and decode apart give the tokens of one device."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest
from ports import free_ports
from real_model import LANGUAGES, TEXTS, Oracle

from pagoda import LLM, SamplingParams
from pagoda.cli.openai_client import OpenAIClient
from pagoda.cli.server_process import server_process
from pagoda.errors import ConfigError

MAX_TOKENS, CONTEXT = 24, 640
DTYPES = ("float32", "bfloat16")
SAME_BITS: dict[str, dict[str, Any]] = {
    "pp 2": {"pipeline_parallel_size": 2},
    "dp 2": {"data_parallel_size": 2},
    "chunks and preemption": {"max_num_batched_tokens": 64, "num_kv_blocks": 60, "block_size": 16},
    "KV tiers": {"num_kv_blocks": 40, "block_size": 16, "kv_host_bytes": "64MiB"},
}
"""Options that change nothing of the arithmetic."""


class Answer(NamedTuple):
    token_ids: list[int]
    text: str


def prompts() -> list[str]:
    """Twelve beginnings of real text of up to 800 characters; four share a beginning."""
    texts = [(TEXTS / f"{name}.txt").read_text("utf-8") for name in LANGUAGES]
    pieces = [text[at : at + 260] for text in texts for at in (0, 400)]
    return [*pieces, *(texts[0][:600] + text[:200] for text in texts)]


def sampling() -> list[SamplingParams]:
    """Half of the answers are drawn."""
    hot = {"temperature": 0.8, "top_p": 0.95, "repetition_penalty": 1.1}
    return [
        SamplingParams(seed=i, max_tokens=MAX_TOKENS, ignore_eos=True, **hot)
        if i % 2
        else SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
        for i in range(len(prompts()))
    ]


def answers(oracle: Oracle, dtype: str, rounds: int = 1, **options: Any) -> list[Answer]:
    """What the last of several rounds of the same prompts gave."""
    with LLM(str(oracle.directory), dtype=dtype, max_model_len=CONTEXT, **options) as llm:
        for _ in range(rounds):
            outputs = llm.generate(prompts(), sampling(), use_tqdm=False)
    return [Answer(list(it.outputs[0].token_ids), it.outputs[0].text) for it in outputs]


@pytest.fixture(scope="module", params=DTYPES)
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def alone(oracle: Oracle, dtype: str) -> list[Answer]:
    return answers(oracle, dtype)


@pytest.mark.parametrize("name", SAME_BITS)
def test_same_tokens(name: str, oracle: Oracle, dtype: str, alone: list[Answer]) -> None:
    rounds = 2 if name == "KV tiers" else 1
    assert answers(oracle, dtype, rounds, **SAME_BITS[name]) == alone


def test_three_ranks(oracle: Oracle, dtype: str, alone: list[Answer]) -> None:
    """Ranks add up parts in another order, and bfloat16 rounds what differs in the last bit to another number."""
    three = answers(oracle, dtype, tensor_parallel_size=3)
    num_same = sum(a == b for a, b in zip(alone, three, strict=True))
    print(f"three ranks, {dtype}: {num_same} of {len(alone)} answers are the same")
    assert num_same >= (len(alone) - 1 if dtype == "float32" else len(alone) // 3)


def test_two_ranks_cannot_share_nine_heads(gguf: Path) -> None:
    message = r"--tensor-parallel-size 2 does not divide the 9 attention heads .* is 1 or 3\.$"
    with pytest.raises(ConfigError, match=message):
        LLM(str(gguf), tensor_parallel_size=2)


class Pod(NamedTuple):
    router_url: str
    decode_url: str


@pytest.fixture
def pod(tmp_path: Path, oracle: Oracle, dtype: str) -> Iterator[Pod]:
    """A host that computes prompts, one that generates, and a router that one of them has joined."""
    key = tmp_path / "cluster.key"
    key.write_text(secrets.token_hex(32), encoding="utf-8")
    address = f"127.0.0.1:{free_ports(1)[0]}"
    common = [str(oracle.directory), "--cluster-key-file", str(key), "--log-level", "warning"]
    host = [
        "--join",
        address,
        "--dtype",
        dtype,
        "--max-model-len",
        str(CONTEXT),
        "--block-size",
        "16",
    ]
    listen = ["--join-listen", address, "--remote-prefill-min-tokens", "32"]
    with ExitStack() as stack:
        _, decode = (
            stack.enter_context(server_process([*common, *host, "--role", role]))
            for role in ("prefill", "decode")
        )
        router = stack.enter_context(server_process([*common, *listen], "route"))
        yield Pod(router.base_url, decode.base_url)


def test_prefill_and_decode_apart(pod: Pod, alone: list[Answer]) -> None:
    texts, num_fetched = asyncio.run(_ask(pod))
    assert texts == [answer.text for answer in alone]
    assert num_fetched > 0


async def _ask(pod: Pod) -> tuple[list[str], int]:
    """Texts of all answers, and the blocks of KV that the decode host fetched."""
    names = ("temperature", "top_p", "repetition_penalty", "seed", "max_tokens", "ignore_eos")
    async with OpenAIClient(pod.router_url) as client, aiohttp.ClientSession() as session:

        async def load(url: str) -> dict[str, Any]:
            async with session.get(f"{url}/v1/load") as response:
                return dict(await response.json())

        async def ask(prompt: str, params: SamplingParams) -> str:
            body = {name: getattr(params, name) for name in names}
            answer = await client.post("/v1/completions", {"model": model, "prompt": prompt} | body)
            return str(answer.choices[0].text)

        async with asyncio.timeout(60):
            while [it["state"] for it in (await load(pod.router_url))["replicas"]] != ["ready"] * 2:
                await asyncio.sleep(0.05)
        model = await client.first_model()
        texts = await asyncio.gather(*map(ask, prompts(), sampling()))
        return texts, int((await load(pod.decode_url))["tiers"][-1]["num_loaded"])
