# SPDX-License-Identifier: Apache-2.0
"""A backend that a package brings serves the embedded model, in processes, as the reference does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pagoda.errors import ConfigError
from pagoda.llm.llm import LLM
from pagoda.messages.sampling_params import SamplingParams

TOY = Path(__file__).parents[4] / "tests" / "toy_backend"
PROMPTS = ["17 + 25 =", "What is 3 times 4?", "The capital of Japan is", "a b c d e f g h " * 8]
SAMPLING = [
    SamplingParams(temperature=0.0, max_tokens=24, logprobs=2),
    SamplingParams(temperature=0.9, top_p=0.9, seed=3, max_tokens=24),
]


@pytest.fixture
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy is on the path of this process and of those that it starts."""
    monkeypatch.syspath_prepend(TOY)
    before = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", f"{TOY}:{before}" if before else str(TOY))


def _answers(backend: str) -> list[list[int]]:
    with LLM(backend=backend, dtype="float32", max_num_seqs=8) as llm:
        return [
            list(output.outputs[0].token_ids)
            for sampling in SAMPLING
            for output in llm.generate(PROMPTS, sampling)
        ]


@pytest.mark.usefixtures("_installed")
def test_the_toy_answers_as_the_reference() -> None:
    expected = _answers("reference")
    assert len(expected) == len(SAMPLING) * len(PROMPTS)
    assert _answers("toy") == expected


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": "cpu:0"}, "but the toy backend does not compute there; name toy devices"),
        ({"devices": "toy:0+toy:1+toy:2"}, "a rank of the toy backend drives 2 devices at most"),
        (
            {"tensor_parallel_size": 2},
            "the toy backend has one rank; leave out --tensor-parallel-size",
        ),
        (
            {
                "model": "qwen3-30b-a3b",
                "load_format": "dummy",
            },  # it is said before 120 GB are taken
            "toy (toy:0) lacks experts, which this model needs; choose another --backend.",
        ),
        ({"quantization": "int8"}, "this backend does not compute with int8 weights"),
        (
            {"dtype": "bfloat16"},
            "this backend does not compute in bfloat16; --dtype may be float32",
        ),
    ],
)
def test_what_the_toy_lacks_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match="backend") as caught:
        LLM(**{"backend": "toy", "dtype": "float32", "max_num_seqs": 8} | options)  # type: ignore[arg-type]
    assert message in str(caught.value)
