# SPDX-License-Identifier: Apache-2.0
"""Score a model on held-out questions with the training code's own greedy generation.

python -m tools.train_tiny.evaluate --checkpoint RUN_FOLDER/checkpoint.pt
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from tools.train_tiny.checks import passes
from tools.train_tiny.heldout import SKILLS, questions
from tools.train_tiny.model import TinyConfig, TinyQwen3
from tools.train_tiny.tokenizer import (
    END_OF_TEXT,
    IM_END,
    build_tokenizer,
    padded_vocab_size,
    render_chat,
    token_id,
)


def prompt_ids(tokenizer: Tokenizer, question: dict[str, Any]) -> list[int]:
    """Render and encode the prompt of a question."""
    text = render_chat(
        question["messages"],
        question.get("tools"),
        add_generation_prompt=True,
        **question.get("chat_template_kwargs", {}),
    )
    ids: list[int] = tokenizer.encode(text).ids
    return ids


def answers(
    model: TinyQwen3, tokenizer: Tokenizer, items: list[dict[str, Any]], batch: int = 64
) -> list[str]:
    """Answer every question greedily."""
    stop = {token_id(tokenizer, IM_END), token_id(tokenizer, END_OF_TEXT)}
    texts = []
    for start in range(0, len(items), batch):
        part = items[start : start + batch]
        prompts = [prompt_ids(tokenizer, item) for item in part]
        limit = max(item["max_tokens"] for item in part)
        for ids in model.generate(prompts, limit, stop):
            kept = ids[:-1] if ids[-1] in stop else ids
            texts.append(tokenizer.decode(kept, skip_special_tokens=False))
    return texts


def quick_evaluation(
    model: TinyQwen3, tokenizer: Tokenizer, count: int, names: Sequence[str] = SKILLS
) -> dict[str, float]:
    """Score a few questions a skill, drawn with another seed than the shipped ones."""
    scores = {}
    for skill in names:
        items = questions(skill, count, seed=1)
        texts = answers(model, tokenizer, items, batch=32)
        right = sum(passes(i["expect"], t) for i, t in zip(items, texts, strict=True))
        scores[skill] = round(right / len(items), 3)
    return scores


def load_checkpoint(path: Path) -> TinyQwen3:
    """Load the model of a training checkpoint."""
    model = TinyQwen3(TinyConfig(padded_vocab_size(build_tokenizer())))
    model.load_state_dict(torch.load(path, weights_only=True)["model"])
    return model.eval()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Score a training checkpoint.")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--count", type=int, default=60, help="questions a skill")
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--skills", nargs="*", default=list(SKILLS))
    parser.add_argument("--failures", type=int, default=0, help="failed answers to print")
    args = parser.parse_args()
    model, tokenizer = load_checkpoint(args.checkpoint), build_tokenizer()
    for skill in args.skills:
        items = questions(skill, args.count, seed=args.seed)
        texts = answers(model, tokenizer, items)
        failed = [(i, t) for i, t in zip(items, texts, strict=True) if not passes(i["expect"], t)]
        print(f"{skill:14} {1 - len(failed) / len(items):.3f}", flush=True)
        for item, text in failed[: args.failures]:
            last = item["messages"][-1]["content"].splitlines()[-1]
            print(f"    {last!r} -> {text!r}, expected {json.dumps(item['expect'])}")


if __name__ == "__main__":
    main()
