# SPDX-License-Identifier: Apache-2.0
"""Score an exported model with transformers (CPU, greedy, fp32 by default) on held-out questions.

python -m tools.train_tiny.verify --model pagoda/checkpoints/pagoda_tiny
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools.train_tiny.checks import passes


def batches(items: list[dict[str, Any]], size: int) -> list[list[dict[str, Any]]]:
    """Return the questions of each skill in batches."""
    skills = dict.fromkeys(item["skill"] for item in items)
    groups = [[item for item in items if item["skill"] == skill] for skill in skills]
    return [g[i : i + size] for g in groups for i in range(0, len(g), size)]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Score an exported model with transformers.")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--questions", type=Path, help="default: heldout.jsonl of the model")
    parser.add_argument("--batch", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--failures", action="store_true", help="print what failed")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=getattr(torch, args.dtype)
    ).eval()
    path = args.questions or args.model / "heldout.jsonl"
    items = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    right: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for batch in batches(items, args.batch):
        prompts = [
            tokenizer.apply_chat_template(
                item["messages"],
                tools=item.get("tools"),
                add_generation_prompt=True,
                tokenize=False,
                **item.get("chat_template_kwargs", {}),
            )
            for item in batch
        ]
        inputs = tokenizer(
            prompts,
            return_tensors="pt",
            padding=True,
            padding_side="left",
            add_special_tokens=False,
            return_token_type_ids=False,
        )
        limit = max(item["max_tokens"] for item in batch)
        with torch.no_grad():
            output = model.generate(**inputs, max_new_tokens=limit, do_sample=False)
        for item, row in zip(batch, output[:, inputs["input_ids"].shape[1] :], strict=True):
            answer = tokenizer.decode(row, skip_special_tokens=True)
            total[item["skill"]] += 1
            if passes(item["expect"], answer):
                right[item["skill"]] += 1
            elif args.failures:
                print(f"{item['id']}: {answer!r}, expected {json.dumps(item['expect'])}")
    for skill, count in total.items():
        print(f"{skill:14} {right[skill]:4} / {count:<4} {right[skill] / count:.3f}")


if __name__ == "__main__":
    main()
