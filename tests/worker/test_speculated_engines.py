# SPDX-License-Identifier: Apache-2.0
"""Whole engines with drafts answer as without, in every bit of tokens and log-probabilities.

The names of the cases are the rows of docs/combinations.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from adapter_files import save_adapter
from family_models import FAMILIES as MORE_FAMILIES
from family_models import make_model as make_other_model
from in_process import InProcessEngine, engine
from test_drafts import EOS, PROMPT, SAMPLING, sampling_of
from tiny_models import make_model
from transformers import BertConfig, PreTrainedConfig, PreTrainedModel

from pagoda.checkpoints.adapters import adapter_digest
from pagoda.engine.request import Request
from pagoda.errors import ConfigError
from pagoda.llm.engine_options import EngineOptions
from pagoda.messages.adapters import Adapter
from pagoda.messages.frontend import GenerateRequest, TokenLogprobs, Work
from pagoda.messages.speculation import SpeculativeConfig

LENGTH = 40
Answers = dict[str, tuple[list[int], list[TokenLogprobs]]]


def requests(*adapters: str) -> list[GenerateRequest]:
    """One of every kind of sampling, with each of the adapters."""
    return [
        GenerateRequest(
            request_id=f"{name} {adapter}",
            prompt_token_ids=PROMPT * 3 + [place],
            work=Work(
                msgspec.structs.replace(sampling_of(name), max_tokens=LENGTH),
                eos_token_ids=EOS,
                adapter=adapter,
            ),
        )
        for adapter in adapters or ("",)
        for place, name in enumerate(SAMPLING)
    ]


def answers(model: InProcessEngine, asked: Sequence[GenerateRequest]) -> Answers:
    found: Answers = {request.request_id: ([], []) for request in asked}
    for chunk in model.chunks(asked):
        tokens, logprobs = found[chunk.request_id]
        tokens += chunk.token_ids
        logprobs += chunk.logprobs or []
    return found


def check(make: Callable[[], InProcessEngine], *adapters: str, goes_on: bool = False) -> None:
    """Answers of an engine with drafts, of which one in four is wrong, are those of one without; if it goes on,
    also those behind these answers, which are found in the cache."""
    rounds = [requests(*adapters)]
    expected = answers(make(), rounds[0])
    if goes_on:
        rounds.append([_behind(it, expected[it.request_id][0]) for it in rounds[0]])
        expected |= answers(make(), rounds[1])

    def draft(request: Request) -> list[int]:
        answer, begin = expected[request.request_id][0], request.num_output_tokens
        return [(it + ((it + begin) % 4 == 0)) % 320 for it in answer[begin : begin + 6]]

    drafting = make()
    drafting.draft_with(draft)
    for asked in rounds:
        found = answers(drafting, asked)
        assert found == {name: expected[name] for name in found}
    load = drafting.load()
    assert load.num_draft_tokens > load.num_accepted_tokens > LENGTH
    if goes_on:
        assert load.num_prefix_hit_tokens >= 64


def _behind(request: GenerateRequest, answer: list[int]) -> GenerateRequest:
    """The request that goes on behind an answer."""
    prompt = request.prompt_token_ids + answer
    return msgspec.structs.replace(
        request, request_id=f"{request.request_id} again", prompt_token_ids=prompt
    )


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bfloat16": ("qwen3", {"dtype": "bfloat16"}),
    "int8": ("qwen3", {"quantization": "int8", "dtype": "bfloat16"}),
    "int4": ("qwen3", {"quantization": "int4"}),
    "int8 KV": ("qwen3", {"kv_cache_dtype": "int8"}),
    "windows": ("mistral", {}),
    "windows of some layers": ("gemma3", {}),
    "chunked attention": ("llama4-chunked", {}),
    "sinks": ("gpt-oss", {}),
    "latent attention": ("deepseek-v3", {}),
    "experts": ("qwen3-moe", {}),
    "chunks of prompts": ("qwen3", {"max_num_batched_tokens": 19}),
    "preemption": ("qwen3", {"num_blocks": 10}),
    "tensor parallelism": ("qwen3", {"tp": 2}),
    "pipeline parallelism": ("qwen3", {"pp": 2}),
    "expert parallelism": ("qwen3-moe", {"tp": 2, "experts": True}),
    "tensor and pipeline parallelism": ("mistral", {"tp": 2, "pp": 2}),
    "gated delta nets": ("qwen3-next", {}),
    "short convolutions": ("lfm2", {"dtype": "bfloat16"}),
    "states, chunks of prompts": ("qwen3-next", {"max_num_batched_tokens": 19}),
    "states, preemption": ("qwen3-next", {"num_blocks": 12}),
    "states, tensor and pipeline parallelism": ("qwen3-next", {"tp": 2, "pp": 2}),
    "states, pipeline parallelism, preemption": ("lfm2", {"pp": 2, "num_blocks": 14}),
}


@pytest.mark.parametrize("case", CASES)
def test_drafts_change_nothing(case: str, backend: str, tmp_path: Path) -> None:
    family, options = CASES[case]
    make = make_other_model if family in MORE_FAMILIES else make_model
    make(family).save_pretrained(tmp_path)
    check(lambda: engine(tmp_path, backend, **options))


@pytest.mark.parametrize("family", ["qwen3", "qwen3-next", "lfm2"])
def test_prefix_cache(family: str, backend: str, tmp_path: Path) -> None:
    """What is found in the cache was computed by steps with drafts, right ones and wrong ones."""
    make = make_other_model if family in MORE_FAMILIES else make_model
    make(family).save_pretrained(tmp_path)
    check(lambda: engine(tmp_path, backend, enable_prefix_caching=True), goes_on=True)


def test_adapters(backend: str, tmp_path: Path) -> None:
    model = make_model("qwen3")
    model.save_pretrained(tmp_path / "model")
    path = save_adapter(model, tmp_path / "one", rank=8, seed=1)
    one = Adapter("one", str(path), adapter_digest(path))
    check(lambda: engine(tmp_path / "model", backend, adapters=(one,)), "", one.digest)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: BertConfig(architectures=["BertModel"]), "is an encoder"),
    ],
)
def test_models_that_cannot_say_so(
    make: Callable[[], PreTrainedConfig | PreTrainedModel], problem: str, tmp_path: Path
) -> None:
    make().save_pretrained(tmp_path)
    named = EngineOptions(speculative_config='{"method": "suffix"}')
    with pytest.raises(ConfigError, match=f"^--speculative-config: .* {problem}"):
        named.engine_config(str(tmp_path))
    assert EngineOptions().engine_config(str(tmp_path)).speculation == SpeculativeConfig()
