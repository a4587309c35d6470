# SPDX-License-Identifier: Apache-2.0
"""Models, served in processes on the emulated device, answer as on the reference."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import pagoda
from pagoda.llm.llm import LLM
from pagoda.messages.sampling_params import SamplingParams

TOKENIZER = Path(pagoda.__file__).parent / "checkpoints" / "pagoda_tiny" / "tokenizer.json"
PROMPT = "17 + 25 ="
GREEDY = SamplingParams(temperature=0.0, max_tokens=2)
HYBRID: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "vocab_size": 960,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "full_attention_interval": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
"""config.json of a model with a gated delta rule behind a convolution in one layer, and attention in the other."""


def _answers(
    backend: str, prompt: str | list[int], sampling: SamplingParams, **options: Any
) -> list[int]:
    with LLM(backend=backend, dtype="float32", max_num_seqs=1, max_model_len=64, **options) as llm:
        (output,) = llm.generate([prompt], sampling, use_tqdm=False)
    return list(output.outputs[0].token_ids)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_answers_are_those_of_the_reference(kv_cache_dtype: str) -> None:
    options = {"kv_cache_dtype": kv_cache_dtype}
    expected, found = (
        _answers(backend, PROMPT, GREEDY, **options) for backend in ("reference", "cuda")
    )
    assert len(expected) == 2
    assert found == expected


def test_a_model_with_states_answers_as_on_the_reference(tmp_path: Path) -> None:
    shutil.copy(TOKENIZER, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(HYBRID), encoding="utf-8")
    prompt = [7 * place % 960 for place in range(15)]
    sampling = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    options = {"model": str(tmp_path), "load_format": "dummy"}
    expected, found = (
        _answers(backend, prompt, sampling, **options) for backend in ("reference", "cuda")
    )
    assert len({*expected}) > 1
    assert found == expected
