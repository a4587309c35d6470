"""Replicas, ranks, stages and tiers of KV give the tokens of one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from real_model import LANGUAGES, TEXTS, Oracle

from pagoda import LLM, SamplingParams
from pagoda.errors import ConfigError

MAX_TOKENS = 24
DTYPES = ("float32", "bfloat16")
SAME_BITS: dict[str, dict[str, Any]] = {
    "pp 2": {"pipeline_parallel_size": 2},
    "dp 2": {"data_parallel_size": 2},
    "chunks and preemption": {"max_num_batched_tokens": 64, "num_kv_blocks": 60, "block_size": 16},
    "KV tiers": {"num_kv_blocks": 40, "block_size": 16, "kv_host_bytes": "64MiB"},
}
"""Options that change nothing of the arithmetic."""


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


def answers(oracle: Oracle, dtype: str, rounds: int = 1, **options: Any) -> list[list[int]]:
    """What the last of several rounds of the same prompts gave."""
    with LLM(str(oracle.directory), dtype=dtype, max_model_len=512, **options) as llm:
        for _ in range(rounds):
            outputs = llm.generate(prompts(), sampling(), use_tqdm=False)
    return [list(it.outputs[0].token_ids) for it in outputs]


@pytest.fixture(scope="module", params=DTYPES)
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def alone(oracle: Oracle, dtype: str) -> list[list[int]]:
    return answers(oracle, dtype)


@pytest.mark.parametrize("name", SAME_BITS)
def test_same_tokens(name: str, oracle: Oracle, dtype: str, alone: list[list[int]]) -> None:
    rounds = 2 if name == "KV tiers" else 1
    assert answers(oracle, dtype, rounds, **SAME_BITS[name]) == alone


def test_three_ranks(oracle: Oracle, dtype: str, alone: list[list[int]]) -> None:
    """Ranks add up parts in another order, and bfloat16 rounds what differs in the last bit to another number."""
    three = answers(oracle, dtype, tensor_parallel_size=3)
    num_same = sum(a == b for a, b in zip(alone, three, strict=True))
    print(f"three ranks, {dtype}: {num_same} of {len(alone)} answers are the same")
    assert num_same >= (len(alone) - 1 if dtype == "float32" else len(alone) // 3)


def test_two_ranks_cannot_share_nine_heads(gguf: Path) -> None:
    message = r"--tensor-parallel-size 2 does not divide the 9 attention heads .* is 1 or 3\.$"
    with pytest.raises(ConfigError, match=message):
        LLM(str(gguf), tensor_parallel_size=2)
