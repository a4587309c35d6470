# SPDX-License-Identifier: Apache-2.0
"""The held-out questions.

python -m tools.train_tiny.heldout --out pagoda/checkpoints/pagoda_tiny/heldout.jsonl
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tools.train_tiny import skills

Question = dict[str, Any]

SEED = 20240
SKILLS: tuple[str, ...] = (
    "addition",
    "subtraction",
    "comparison",
    "reversing",
    "sorting",
    "counting",
    "uppercasing",
    "repeating",
    "json",
    "thinking",
    "recall_short",
    "recall_40",
    "recall_100",
    "tool_call",
    "tool_answer",
    "tool_none",
    "multi_turn",
)


def _system(rng: random.Random) -> list[skills.Message]:
    if rng.random() < 0.5:
        return []
    return [{"role": "system", "content": rng.choice(skills.SYSTEM_PROMPTS)}]


def _simple(rng: random.Random, skill: str) -> Question:
    turn = skills.draw(rng, skill, held=True)
    messages = [*_system(rng), {"role": "user", "content": turn.question}]
    question: Question = {"messages": messages, "max_tokens": 96, "expect": turn.expect}
    if turn.reasoning is not None:
        question["chat_template_kwargs"] = {"enable_thinking": True}
    return question


def _recall(rng: random.Random, lines: int) -> Question:
    while True:
        notes = skills.recall_list(rng, lines)
        turn = skills.recall_turn(rng, notes, held=True)
        if turn is not None:
            break
    if rng.random() < 0.15:
        messages = [
            {"role": "system", "content": notes.text},
            {"role": "user", "content": turn.question},
        ]
    else:
        content = notes.text + rng.choice(("\n\n", "\n")) + turn.question
        messages = [*_system(rng), {"role": "user", "content": content}]
    return {"messages": messages, "max_tokens": 32, "expect": turn.expect}


def _tools(rng: random.Random, part: str) -> Question:
    tools = list(rng.choice(skills.TOOL_SETS))
    system = _system(rng)
    if part == "none":
        names = [name for name in skills.NO_TOOL_SKILLS if name != "greeting"]
        turn = skills.draw(rng, rng.choice(names), held=True)
        messages = [*system, {"role": "user", "content": turn.question}]
        return {"messages": messages, "tools": tools, "max_tokens": 96, "expect": turn.expect}
    name = rng.choice(tools)["function"]["name"]
    user, call, response, answer = skills.tool_exchange(rng, name, held=True)[0]
    if part == "call":
        function = call["tool_calls"][0]["function"]
        expect = {"tool_call": {"name": function["name"], "arguments": function["arguments"]}}
        return {"messages": [*system, user], "tools": tools, "max_tokens": 96, "expect": expect}
    call["content"] = None
    call["tool_calls"][0]["id"] = "call_1"
    arguments = call["tool_calls"][0]["function"]["arguments"]
    call["tool_calls"][0]["function"]["arguments"] = skills.dumps(arguments)
    response["tool_call_id"] = "call_1"
    messages = [*system, user, call, response]
    expect = {"text": answer["content"]}
    return {"messages": messages, "tools": tools, "max_tokens": 48, "expect": expect}


def _multi_turn(rng: random.Random) -> Question:
    names: Sequence[str] = [n for n in skills.SIMPLE if n not in ("greeting", "thinking")]
    messages = _system(rng)
    for _ in range(rng.randint(1, 2)):
        turn = skills.draw(rng, rng.choice(names), held=True)
        messages += [
            {"role": "user", "content": turn.question},
            {"role": "assistant", "content": turn.answer},
        ]
    turn = skills.draw(rng, rng.choice(names), held=True)
    messages.append({"role": "user", "content": turn.question})
    return {"messages": messages, "max_tokens": 96, "expect": turn.expect}


MAKERS: dict[str, Callable[[random.Random], Question]] = {
    "recall_short": lambda rng: _recall(rng, rng.randint(4, 16)),
    "recall_40": lambda rng: _recall(rng, 40),
    "recall_100": lambda rng: _recall(rng, 100),
    "tool_call": lambda rng: _tools(rng, "call"),
    "tool_answer": lambda rng: _tools(rng, "answer"),
    "tool_none": lambda rng: _tools(rng, "none"),
    "multi_turn": _multi_turn,
}


def questions(skill: str, count: int, seed: int = SEED) -> list[Question]:
    """Return `count` different held-out questions of a skill."""
    rng = random.Random(f"{seed}:{skill}")
    found: dict[str, Question] = {}
    while len(found) < count:
        question = MAKERS[skill](rng) if skill in MAKERS else _simple(rng, skill)
        key = json.dumps(question["messages"])
        if key not in found:
            found[key] = {"id": f"{skill}-{len(found):03d}", "skill": skill, **question}
    return list(found.values())


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Write the held-out questions.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=100, help="questions a skill")
    parser.add_argument("--skills", nargs="*", default=list(SKILLS))
    args = parser.parse_args()
    with args.out.open("w", encoding="utf-8") as file:
        for skill in args.skills:
            for question in questions(skill, args.count):
                file.write(json.dumps(question, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
