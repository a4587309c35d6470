# SPDX-License-Identifier: Apache-2.0
"""What benchmarks send about sampling, and what they say of it."""

from __future__ import annotations

import pytest

from pagoda.cli.options import SamplingOptions
from pagoda.errors import ConfigError
from pagoda.plugins.bench.datasets import Sample
from pagoda.plugins.bench.sampling import BenchSampling, LoadSampling

NEUTRAL = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
WARM = SamplingOptions(temperature=0.8, top_p=0.95)


def test_requests_are_greedy_and_say_so() -> None:
    sampling = LoadSampling()
    assert sampling.fields("completions") == {"temperature": 0.0, **NEUTRAL}
    assert sampling.summary == "greedy"
    assert LoadSampling(explicit_sampling=False).fields("chat") == {"temperature": 0.0}
    assert BenchSampling().params(max_tokens=3).greedy


def test_parameters_given_stand_in_every_request_and_in_the_summary() -> None:
    sampling = LoadSampling(drawing=BenchSampling(parameters=WARM, logprobs=5), sampling_seed=7)
    drawn = {**NEUTRAL, "temperature": 0.8, "top_p": 0.95, "seed": 7}
    assert sampling.fields("completions") == {**drawn, "logprobs": 5}
    assert sampling.fields("chat") == {**drawn, "logprobs": True, "top_logprobs": 5}
    assert sampling.summary == "temperature 0.8, top-p 0.95, 5 log-probabilities, seed 7"
    assert sampling.record() == sampling.fields("completions")
    params = sampling.drawing.params(seed=3, max_tokens=9)
    assert (params.temperature, params.top_p, params.logprobs) == (0.8, 0.95, 5)
    assert (params.seed, params.max_tokens, params.top_k) == (3, 9, 0)


def test_fields_of_a_request_of_a_file_win() -> None:
    [sample] = LoadSampling().apply([Sample("chat", {"messages": [], "temperature": 0.5})])
    assert sample.fields == {**NEUTRAL, "temperature": 0.5, "messages": []}


@pytest.mark.parametrize("name", ["top_p", "top_k", "min_p"])
def test_a_truncation_of_greedy_sampling_is_a_mistake(name: str) -> None:
    for temperature in ({}, {"temperature": 0.0}):
        sampling = BenchSampling(parameters=SamplingOptions(**temperature, **{name: 1}))
        with pytest.raises(ConfigError, match=rf"^--{name.replace('_', '-')} needs --temperature "):
            sampling.params()
