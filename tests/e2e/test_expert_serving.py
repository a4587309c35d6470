# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts over processes answers as transformers does, and says which experts were used."""

from __future__ import annotations

import urllib.request
from pathlib import Path

import msgspec
import pytest
import torch
import transformers
from metrics_text import series

from pagoda.checkpoints.resolve import resolve_model
from pagoda.cli.server_process import server_process

LENGTH, PROMPT = 12, [5, 300, 77, 260, 12, 9, 411, 42]
NUM_EXPERTS, PER_TOKEN, LAYERS = 6, 2, 2


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("experts")
    tokenizer = resolve_model(None, load_format="auto").directory
    assert tokenizer is not None
    vocab_size = msgspec.json.decode((tokenizer / "config.json").read_bytes())["vocab_size"]
    torch.manual_seed(3)
    config = transformers.Qwen3MoeConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=PER_TOKEN,
        max_position_embeddings=256,
        initializer_range=0.3,
        eos_token_id=None,
    )
    transformers.Qwen3MoeForCausalLM(config).float().save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_bytes((tokenizer / name).read_bytes())
    return path


def _post(url: str, body: dict[str, object]) -> dict[str, list[dict[str, list[int]]]]:
    request = urllib.request.Request(
        url, msgspec.json.encode(body), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return msgspec.json.decode(answer.read())


def _counters(url: str, name: str) -> list[int]:
    with urllib.request.urlopen(url, timeout=60) as answer:
        text = answer.read().decode()
    return [int(value) for labels, value in series(text, f"pagoda_{name}")]


def test_ranks_with_experts_of_their_own(directory: Path) -> None:
    model = transformers.Qwen3MoeForCausalLM.from_pretrained(directory).eval()
    with torch.no_grad():
        whole = model.generate(torch.tensor([PROMPT]), max_new_tokens=LENGTH, do_sample=False)
    expected = whole[0, len(PROMPT) :].tolist()
    flags = [str(directory), "--dtype", "float32", "--log-level", "warning"]
    flags += ["--max-model-len", "128", "--num-kv-blocks", "16", "--threads", "1"]
    with server_process([*flags, "--tp", "2", "--enable-expert-parallel"]) as server:
        body = {"prompt": PROMPT, "max_tokens": LENGTH, "temperature": 0, "return_token_ids": True}
        answer = _post(f"{server.base_url}/v1/completions", body | {"ignore_eos": True})
        assert answer["choices"][0]["token_ids"] == expected
        by_expert = _counters(f"{server.base_url}/metrics", "expert_tokens_total")
        by_rank = _counters(f"{server.base_url}/metrics", "expert_rank_tokens_total")
    assert (len(by_expert), len(by_rank)) == (NUM_EXPERTS, 2)
    assert by_rank == [sum(by_expert[:3]), sum(by_expert[3:])]
    # In the last layer, the tokens only that the next ones are sampled from.
    num_tokens = (len(PROMPT) + LENGTH - 1) * (LAYERS - 1) + LENGTH
    assert sum(by_expert) >= num_tokens * PER_TOKEN
