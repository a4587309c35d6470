# SPDX-License-Identifier: Apache-2.0
"""The data of `pagoda-tiny`: determinism, disjointness, the shipped questions, the tokenizer."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.train_tiny import checks, heldout, skills, tokenizer

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "pagoda" / "checkpoints" / "pagoda_tiny"
RECIPE = json.loads((ROOT / "tools" / "train_tiny" / "recipe.json").read_text(encoding="utf-8"))
WEIGHTS: dict[str, float] = RECIPE["stages"][-1]["weights"]
TOKENIZER = tokenizer.build_tokenizer()


def shipped() -> list[dict[str, Any]]:
    lines = (MODEL / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def training_chats(seed: int, count: int) -> list[skills.Conversation]:
    rng = random.Random(seed)
    return [skills.sample_conversation(rng, WEIGHTS, 30) for _ in range(count)]


def ids(text: str) -> list[int]:
    encoded: list[int] = TOKENIZER.encode(text).ids
    return encoded


def test_training_data_are_deterministic() -> None:
    assert training_chats(5, 300) == training_chats(5, 300)
    assert training_chats(5, 50) != training_chats(6, 50)


def test_training_never_asks_a_held_out_question() -> None:
    canons = [canon for chat in training_chats(1, 4000) for canon in chat.canons]
    assert len(canons) > 4000
    assert not [c for c in canons if c != "greeting" and skills.held_out(c)]


def test_training_shows_no_held_out_sum_anywhere() -> None:
    """Sums also occur in reasoning and in tool answers."""
    for chat in training_chats(2, 3000):
        for message in chat.messages:
            if message["role"] != "assistant":
                continue
            text = f"{message.get('reasoning_content', '')}\n{message['content']}"
            for line in text.splitlines():
                parts = line.split()
                if len(parts) != 5 or parts[3] != "=" or parts[1] not in "+-":
                    continue
                a, b = int(parts[0]), int(parts[2])
                if max(a, b) > 99:
                    continue
                canon = skills.add_canon(a, b) if parts[1] == "+" else skills.sub_canon(a, b)
                assert not skills.held_out(canon), line


@pytest.mark.parametrize("skill", sorted(set(skills.SIMPLE) - {"greeting"}))
def test_simple_held_out_turns_are_held_out(skill: str) -> None:
    rng = random.Random(0)
    turns = [skills.draw(rng, skill, held=True) for _ in range(20)]
    assert all(skills.held_out(turn.canon) for turn in turns)


def test_the_right_answers_pass_their_checks() -> None:
    rng = random.Random(4)
    for skill in skills.SIMPLE:
        turn = skills.draw(rng, skill)
        answer = f"<think>\n{turn.reasoning}\n</think>\n\n{turn.answer}"
        assert checks.passes(turn.expect, turn.answer)
        assert checks.passes(turn.expect, answer)
        assert not checks.passes(turn.expect, turn.answer + "x")


def test_tool_call_check() -> None:
    expect = {"tool_call": {"name": "lookup", "arguments": {"key": "river"}}}
    good = '<tool_call>\n{"name": "lookup", "arguments": {"key": "river"}}\n</tool_call>'
    assert checks.passes(expect, good)
    assert not checks.passes(expect, good.replace("river", "stone"))
    assert not checks.passes(expect, "river = 4821")
    assert not checks.passes(expect, "<tool_call>\n{broken\n</tool_call>")


def test_shipped_questions_are_what_the_generator_makes() -> None:
    items = shipped()
    names = list(dict.fromkeys(item["skill"] for item in items))
    assert set(names) <= set(heldout.SKILLS)
    expected = [q for name in names for q in heldout.questions(name, 100)]
    assert items == expected
    assert len({item["id"] for item in items}) == len(items)
    assert (MODEL / "heldout.jsonl").stat().st_size < 1_500_000


def test_shipped_questions_are_valid_and_fit() -> None:
    for item in shipped():
        assert item["messages"][-1]["role"] in ("user", "tool")
        assert len(item["expect"]) == 1
        assert set(item["expect"]) <= {"text", "json", "tool_call"}
        prompt = tokenizer.render_chat(
            item["messages"],
            item.get("tools"),
            add_generation_prompt=True,
            **item.get("chat_template_kwargs", {}),
        )
        assert prompt.endswith("<|im_start|>assistant\n")
        assert len(ids(prompt)) + item["max_tokens"] <= 2048


def test_model_folder_is_small_and_consistent() -> None:
    assert sum(f.stat().st_size for f in MODEL.iterdir() if f.is_file()) <= 12_000_000
    config = json.loads((MODEL / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["vocab_size"] == tokenizer.padded_vocab_size(TOKENIZER)
    text = (MODEL / "tokenizer.json").read_text(encoding="utf-8")
    assert json.loads(text) == json.loads(TOKENIZER.to_str())
    saved = json.loads((MODEL / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert saved == tokenizer.tokenizer_config(config["max_position_embeddings"])


def test_every_piece_is_one_token() -> None:
    assert {piece: len(ids(piece)) for piece in tokenizer.PIECES if len(ids(piece)) != 1} == {}


def test_digits_and_unlisted_words_are_single_bytes() -> None:
    assert len(ids("4821")) == 4
    assert len(ids("river")) == 5
    assert len(ids('"river"')) == 7
    assert len(ids(" river")) == 6
    assert not [
        t for t in TOKENIZER.get_vocab() if len(t) > 1 and any(c in "0123456789" for c in t)
    ]


PIECES = st.sampled_from([*tokenizer.PIECES, "x", " ", "7", "é", "🙂", "\n"])


@given(st.text(max_size=200) | st.lists(PIECES, max_size=30).map("".join))
def test_any_text_round_trips(text: str) -> None:
    assert TOKENIZER.decode(ids(text), skip_special_tokens=False) == text


def test_template_accepts_arguments_as_text_and_as_value() -> None:
    call: dict[str, Any] = {"name": "lookup", "arguments": {"key": "river"}}
    as_value = [
        {"role": "user", "content": "Look up river."},
        {"role": "assistant", "content": "", "tool_calls": [{"function": call}]},
    ]
    as_text = json.loads(json.dumps(as_value))
    as_text[1]["content"] = None
    as_text[1]["tool_calls"][0]["function"]["arguments"] = '{"key": "river"}'
    assert tokenizer.render_chat(as_value) == tokenizer.render_chat(as_text)


def test_thinking_is_asked_for_in_the_last_user_message_only() -> None:
    messages = [
        {"role": "user", "content": "1 + 2"},
        {"role": "assistant", "content": "1 + 2 = 3"},
        {"role": "user", "content": "1 + 2 + 3"},
    ]
    text = tokenizer.render_chat(messages, add_generation_prompt=True, enable_thinking=True)
    assert "1 + 2<|im_end|>" in text
    assert "1 + 2 + 3 /think<|im_end|>" in text
    assert "/think" not in tokenizer.render_chat(messages, add_generation_prompt=True)
