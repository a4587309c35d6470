# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from pathlib import Path

import pytest

from pagoda.errors import ConfigError
from pagoda.plugins.bench.datasets import (
    RandomLengths,
    jsonl_samples,
    random_samples,
    sharegpt_samples,
)


def _lengths(**changes: float) -> RandomLengths:
    lengths = {"input_len": 20, "output_len": 8, "prefix_len": 0, "range_ratio": 0.0, **changes}
    return RandomLengths(vocab_size=100, **lengths)  # type: ignore[arg-type]


def test_random_prompts_are_token_ids_below_the_vocabulary() -> None:
    samples, again, other = (random_samples(5, _lengths(), "completions", it) for it in (1, 1, 2))
    assert samples == again
    assert samples != other
    assert len(samples) == 5
    for sample in samples:
        prompt = sample.fields["prompt"]
        assert isinstance(prompt, list)
        assert len(prompt) == 20
        assert all(3 <= token < 100 for token in prompt)
        assert sample.fields["max_tokens"] == 8
    assert samples[0] != samples[1]


def test_random_prompts_share_the_prefix() -> None:
    samples = random_samples(3, _lengths(prefix_len=7), "completions", seed=1)
    prompts = [sample.fields["prompt"] for sample in samples]
    assert {len(prompt) for prompt in prompts} == {27}  # type: ignore[arg-type]
    assert len({tuple(prompt[:7]) for prompt in prompts}) == 1  # type: ignore[index]


def test_random_lengths_vary_within_their_range() -> None:
    samples = random_samples(200, _lengths(range_ratio=0.5), "completions", seed=1)
    lengths = {len(sample.fields["prompt"]) for sample in samples}  # type: ignore[arg-type]
    assert min(lengths) >= 10
    assert max(lengths) <= 30
    assert len(lengths) > 10


def test_random_chat_prompts_are_words() -> None:
    [sample] = random_samples(1, _lengths(), "chat", seed=1)
    [message] = sample.fields["messages"]  # type: ignore[misc]
    assert message["role"] == "user"
    assert len(message["content"].split()) == 20


def test_sharegpt_takes_the_first_question(tmp_path: Path) -> None:
    path = tmp_path / "sharegpt.json"
    turns = [{"from": "human", "value": "Hello?"}, {"from": "gpt", "value": "x" * 40}]
    path.write_text(json.dumps([{"id": "a", "conversations": turns}, {"conversations": turns[:1]}]))
    samples = sharegpt_samples(path, 3, "completions", None)
    assert [sample.fields for sample in samples] == [{"prompt": "Hello?", "max_tokens": 10}] * 3


def test_jsonl_takes_prompts_messages_and_batch_lines(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    messages = [{"role": "user", "content": "b"}]
    lines = [
        {"prompt": "a"},
        {"messages": messages, "max_tokens": 5},
        {"prompt_token_ids": [1, 2]},
        {"custom_id": "1", "body": {"model": "x", "messages": messages, "stream": True}},
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    samples = jsonl_samples(path, 4, "completions", 9)
    assert [(sample.endpoint, sample.fields) for sample in samples] == [
        ("completions", {"prompt": "a", "max_tokens": 9}),
        ("chat", {"messages": messages, "max_tokens": 5}),
        ("completions", {"prompt": [1, 2], "max_tokens": 9}),
        ("chat", {"messages": messages}),
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "holds no request"),
        ("{", "line 1"),
        ('{"prompt": "a"}\n{"max_tokens": 3}', "line 2 needs prompt"),
        ('{"prompt": 3}', "line 1"),
    ],
)
def test_bad_jsonl_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=problem):
        jsonl_samples(path, 1, "chat", None)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        sharegpt_samples(tmp_path / "none.json", 1, "chat", None)
