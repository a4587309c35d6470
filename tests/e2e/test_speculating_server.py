# SPDX-License-Identifier: Apache-2.0
"""Speculation as clients see it: the same answers, and what they are told of drafts."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from typing import Any

from metrics_text import value

from pagoda.cli.server_process import ServerProcess

FLAGS = (
    *(
        "--speculative-config",
        '{"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 4}',
    ),
    *("--per-request-spec-decode-metrics", "summary", "--vllm-metrics", "--log-level", "warning"),
)
PATTERN = "one two three four five six seven eight nine ten. " * 6


def ask(server: ServerProcess, **fields: Any) -> dict[str, Any]:
    body = {
        **{"prompt": PATTERN, "max_tokens": 96, "temperature": 0, "logprobs": 2, "seed": 1},
        **{"ignore_eos": True, "logit_bias": {}, "return_token_ids": True, **fields},
    }
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"{server.base_url}/v1/completions", data)
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request) as response:
        found: dict[str, Any] = json.load(response)
    return found


def text_of(url: str) -> str:
    with urllib.request.urlopen(url) as response:
        return str(response.read().decode())


def test_answers_are_the_same_and_tell_of_drafts(
    shared_server: Callable[..., ServerProcess],
) -> None:
    server = shared_server(*FLAGS)
    for fields in ({}, {"temperature": 0.7}, {"n": 3, "temperature": 1.0}, {"stop": ["nine"]}):
        plain = ask(server, speculation="off", **fields)
        drafted = ask(server, **fields)
        assert drafted["choices"] == plain["choices"]
        assert drafted["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]
        assert plain["metrics"] == {"speculative_decoding": None}
    # Drafting begins when it is known what steps take; the embedded model repeats itself in the end.
    long = [ask(server, max_tokens=400) for _ in range(3)][-1]
    told = long["metrics"]["speculative_decoding"]
    assert told["num_accepted_draft_tokens"] <= told["num_draft_tokens"]
    assert told["num_spec_steps"] == sum(told["acceptance_histogram"].values())
    metrics = text_of(f"{server.base_url}/metrics")
    assert value(metrics, "pagoda_spec_decode_num_draft_tokens_total", replica="0") > 0
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    for name in names:
        assert f"vllm:spec_decode_{name}_total" in metrics


def test_llama_cpp_s_timings_count_drafts(shared_server: Callable[..., ServerProcess]) -> None:
    server = shared_server(*FLAGS)
    body = {"prompt": PATTERN, "n_predict": 400, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(f"{server.base_url}/completion", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request) as response:
        timings = json.load(response)["timings"]
    assert timings["predicted_n"] == 400
    assert 0 <= timings["draft_n_accepted"] <= timings["draft_n"]
