# SPDX-License-Identifier: Apache-2.0
"""Train the model from a recipe; resumable, deterministic data.

Several single-threaded worker processes each compute the gradient of their own rows; the
gradients are averaged once a step. On shared cores this is many times faster than one process
with several threads, whose barriers wait for the slowest thread in every operation.

The recipe (recipe.json) is a list of stages, each in force from its step on, plus the learning rate
as points to interpolate: a warm-up, a stable rate, a decay to zero. The recipe is read again at
every checkpoint, so what lies ahead can be changed while the training runs; the file as it stands
at the end reproduces the training.

    python -m tools.train_tiny.train --recipe tools/train_tiny/recipe.json --out RUN_FOLDER
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed, multiprocessing, nn
from torch.nn import functional as F

from tools.train_tiny.data import Row, RowBuilder
from tools.train_tiny.evaluate import quick_evaluation
from tools.train_tiny.heldout import SKILLS
from tools.train_tiny.model import TinyConfig, TinyQwen3
from tools.train_tiny.tokenizer import build_tokenizer, padded_vocab_size

SHORT_SHAPE = (4, 512)
LONG_SHAPE = (1, 2048)
PORT = 29871


@dataclass(frozen=True)
class Stage:
    """Contents of the rows from `step` on; batches are counted for each worker."""

    step: int
    weights: dict[str, float]
    short_batches: int
    short_lines: int
    long_batches: int
    long_lines: int


@dataclass(frozen=True)
class Recipe:
    """A whole training run; `rate` has (step, share of the peak rate) points, linear between."""

    seed: int
    rate: tuple[tuple[int, float], ...]
    muon_rate: float
    adam_rate: float
    weight_decay: float
    stages: tuple[Stage, ...]

    @property
    def steps(self) -> int:
        """Number of steps of the whole run."""
        return self.rate[-1][0]

    @staticmethod
    def load(path: Path) -> Recipe:
        """Read a recipe file."""
        raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        stages = tuple(Stage(**stage) for stage in raw.pop("stages"))
        rate = tuple((step, factor) for step, factor in raw.pop("rate"))
        return Recipe(stages=stages, rate=rate, **raw)

    def stage(self, step: int) -> Stage:
        """Return the stage in force at `step`."""
        return max((s for s in self.stages if s.step <= step), key=lambda s: s.step)

    def rate_factor(self, step: int) -> float:
        """Return the learning rate at `step` as a share of the peak."""
        points = zip(self.rate, self.rate[1:], strict=False)
        for (start, low), (end, high) in points:
            if start <= step < end:
                return low + (high - low) * (step - start) / (end - start)
        raise ValueError(f"the recipe has no rate for step {step}")


class Batches:
    """Micro-batches of a step; the data depend on seed, step, worker and stage only."""

    def __init__(self, builder: RowBuilder, worker: int) -> None:
        self.builder, self.worker = builder, worker

    def step(self, recipe: Recipe, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (ids, answer mask) micro-batches."""
        stage = recipe.stage(step)
        rng = random.Random(f"{recipe.seed}:{step}:{self.worker}")
        for _ in range(stage.short_batches):
            count, length = SHORT_SHAPE
            yield self._stack(
                [
                    self.builder.row(rng, length, stage.weights, stage.short_lines, False)
                    for _ in range(count)
                ]
            )
        for _ in range(stage.long_batches):
            count, length = LONG_SHAPE
            yield self._stack(
                [
                    self.builder.row(rng, length, stage.weights, stage.long_lines, True)
                    for _ in range(count)
                ]
            )

    @staticmethod
    def _stack(rows: list[Row]) -> tuple[Tensor, Tensor]:
        ids = torch.from_numpy(np.stack([row.ids for row in rows]))
        answer = torch.from_numpy(np.stack([row.answer for row in rows]))
        return ids, answer


def make_optimizers(model: TinyQwen3, recipe: Recipe, muon: bool) -> list[torch.optim.Optimizer]:
    """Return Muon for the layers' matrices and AdamW for embeddings and norms."""
    matrices = [p for p in model.layers.parameters() if p.dim() == 2]
    norms = [p for p in model.parameters() if p.dim() < 2]
    adam: list[dict[str, Any]] = [
        {"params": [model.embed_tokens.weight], "weight_decay": 0.0, "lr": recipe.adam_rate},
        {"params": norms, "weight_decay": 0.0, "lr": recipe.adam_rate},
    ]
    optimizers: list[torch.optim.Optimizer] = []
    if muon:
        optimizers.append(
            torch.optim.Muon(
                matrices,
                lr=recipe.muon_rate,
                weight_decay=recipe.weight_decay,
                momentum=0.95,
                adjust_lr_fn="match_rms_adamw",
            )
        )
    else:
        adam.append(
            {"params": matrices, "weight_decay": recipe.weight_decay, "lr": recipe.adam_rate}
        )
    optimizers.append(torch.optim.AdamW(adam, betas=(0.9, 0.95)))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return optimizers


def micro_loss(
    model: TinyQwen3, run: Callable[[Tensor], Tensor], ids: Tensor, answer: Tensor
) -> Tensor:
    """Return the mean loss of the answer tokens."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = run(ids)
    picked = hidden[:, :-1][answer[:, 1:]]
    return F.cross_entropy(model.logits(picked.float()), ids[:, 1:][answer[:, 1:]])


def save(path: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer], step: int) -> None:
    """Write a checkpoint in one rename."""
    state = {
        "step": step,
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
    }
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, path)


def average_gradients(parameters: list[nn.Parameter], workers: int) -> None:
    """Average the gradients over the workers in one all-reduce."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    flat = torch.cat([g.flatten() for g in gradients])
    distributed.all_reduce(flat)
    flat /= workers
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def train(worker: int, args: argparse.Namespace) -> None:
    """Run (or resume) the training in one worker."""
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{args.port}"
    distributed.init_process_group(
        "gloo", init_method=address, rank=worker, world_size=args.workers
    )
    args.out.mkdir(parents=True, exist_ok=True)
    recipe = Recipe.load(args.recipe)
    torch.manual_seed(recipe.seed)
    tokenizer = build_tokenizer()
    model = TinyQwen3(TinyConfig(padded_vocab_size(tokenizer)))
    optimizers = make_optimizers(model, recipe, not args.adamw)
    checkpoint = args.out / "checkpoint.pt"
    step = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        step = state["step"]
    parameters = sum(p.numel() for p in model.parameters())
    if worker == 0:
        print(f"{parameters:,} parameters, from step {step} to {recipe.steps}", flush=True)
    batches = Batches(RowBuilder(tokenizer), worker)
    run: Callable[[Tensor], Tensor] = torch.compile(model, dynamic=False) if args.compile else model
    started, tokens, losses = time.monotonic(), 0, []
    while step < recipe.steps:
        factor = recipe.rate_factor(step)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * factor
        micro = list(batches.step(recipe, step))
        for ids, answer in micro:
            loss = micro_loss(model, run, ids, answer) / len(micro)
            loss.backward()
            tokens += ids.numel() * args.workers
            losses.append(loss.item() * len(micro))
        average_gradients(list(model.parameters()), args.workers)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step += 1
        if worker == 0 and step % args.log_every == 0:
            seconds = time.monotonic() - started
            short = recipe.stage(step - 1).short_batches
            per_step = len(micro)
            groups = [losses[i : i + per_step] for i in range(0, len(losses), per_step)]
            short_loss = float(np.mean([x for g in groups for x in g[:short]]))
            long_part = [x for g in groups for x in g[short:]]
            long_loss = float(np.mean(long_part)) if long_part else float("nan")
            print(
                f"step {step} rate {factor:.3f} loss {short_loss:.4f} long {long_loss:.4f} "
                f"{tokens / seconds:,.0f} tok/s {seconds:.0f} s",
                flush=True,
            )
            started, tokens, losses = time.monotonic(), 0, []
        if step % args.save_every == 0 or step == recipe.steps:
            if worker == 0:
                save(checkpoint, model, optimizers, step)
            distributed.barrier()
            recipe = Recipe.load(args.recipe)
        if step % args.eval_every == 0 or step == recipe.steps:
            model.eval()
            mine = SKILLS[worker :: args.workers]
            scores = quick_evaluation(model, tokenizer, args.eval_questions, mine)
            gathered: list[Any] = [None] * args.workers
            distributed.all_gather_object(gathered, scores)
            merged = {k: v for part in gathered for k, v in part.items()}
            if worker == 0:
                ordered = {skill: merged[skill] for skill in SKILLS}
                print(f"step {step} held-out {json.dumps(ordered)}", flush=True)
            model.train()
            started, tokens, losses = time.monotonic(), 0, []


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Train pagoda-tiny from a recipe.")
    parser.add_argument("--recipe", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--workers", type=int, default=2, help="single-threaded processes")
    parser.add_argument("--port", type=int, default=PORT, help="where the workers meet")
    parser.add_argument("--compile", action="store_true", help="use torch.compile")
    parser.add_argument("--adamw", action="store_true", help="AdamW for every parameter")
    parser.add_argument("--log-every", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=100, help="steps")
    parser.add_argument("--eval-every", type=int, default=200, help="steps")
    parser.add_argument("--eval-questions", type=int, default=16, help="questions a skill")
    args = parser.parse_args()
    multiprocessing.spawn(train, args=(args,), nprocs=args.workers)


if __name__ == "__main__":
    main()
