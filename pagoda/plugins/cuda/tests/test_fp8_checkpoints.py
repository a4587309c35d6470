# SPDX-License-Identifier: Apache-2.0
"""A checkpoint in 8-bit floats, with experts, answers on the emulated device as on the reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from pagoda.backend.fp8 import HIGHEST, to_e4m3
from pagoda.checkpoints.resolve import load_model_config
from pagoda.messages.frontend import Work
from pagoda.messages.sampling_params import SamplingParams
from pagoda.messages.worker import NewBlocks, SlotStart, StepPlan
from pagoda.messages.worker_config import WorkerConfig
from pagoda.plugins.backend_check.serving import GREEDY
from pagoda.plugins.backend_check.subject import random_tensor
from pagoda.telemetry.tracer import Tracer
from pagoda.worker.loading import load_runner, plan_worker
from pagoda.worker.runner import Runner

BLOCK = (16, 32)
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 2,
    "mlp_only_layers": [0],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [*BLOCK]},
}


def _save(directory: Path) -> None:
    """Random weights; linear layers are blocks with scales, of which the last ones are cut off."""
    (directory / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    spec = load_model_config(str(directory), "auto")
    tensors = {name: torch.ones(size) for name, size in spec.last_norm_tensors}
    for layer in range(spec.num_layers):
        tensors |= {name: torch.ones(size) for name, size in spec.norm_tensors(layer)}
        for seed, linear in enumerate(spec.layer_linears(layer, range(4))):
            values = random_tensor(linear.outputs, linear.inputs, seed=seed + 99 * layer) / 6
            if linear.name.endswith("mlp.gate"):
                tensors[f"{linear.name}.weight"] = values
                continue
            padded = torch.nn.functional.pad(
                values, (0, -linear.inputs % BLOCK[1], 0, -linear.outputs % BLOCK[0])
            )
            tiles = padded.unflatten(1, (-1, BLOCK[1])).unflatten(0, (-1, BLOCK[0]))
            scales = tiles.abs().amax((1, 3)) / HIGHEST
            spread = scales.repeat_interleave(BLOCK[0], 0).repeat_interleave(BLOCK[1], 1)
            own = to_e4m3(values / spread[: linear.outputs, : linear.inputs])
            tensors |= {f"{linear.name}.weight": own, f"{linear.name}.weight_scale_inv": scales}
    for seed, table in enumerate((spec.embedding, spec.head)):
        tensors[f"{table.name}.weight"] = random_tensor(table.outputs, table.inputs, seed=seed)
    save_file(tensors, directory / "model.safetensors")


def _answer(directory: Path, backend: str) -> tuple[list[int], list[float], str]:
    """Three tokens behind a prompt, their log-probabilities, and what the worker says of itself."""
    sampling: SamplingParams = GREEDY
    config = WorkerConfig(
        model=str(directory),
        backend=backend,
        dtype="float32",
        kv_cache_dtype="fp8",
        num_blocks=16,
        max_num_seqs=2,
        max_model_len=32,
    )
    loaded = load_runner(plan_worker(config), Tracer("worker"))
    assert isinstance(loaded.runner, Runner)
    prompt = [7 * place % 96 for place in range(9)]
    start = SlotStart(0, prompt, len(prompt), 0, [[]], Work(sampling))
    tokens, logprobs = [], []
    for step in range(3):
        starts, blocks = ([start], [NewBlocks(0, 0, [3, 2])]) if step == 0 else ([], [])
        plan = StepPlan(step, [0], [1 if step else len(prompt)], starts, blocks)
        ticket = loaded.runner.submit(plan)
        ticket.launch()
        result = ticket.result()
        tokens += result.token_ids[0]
        logprobs += [report.logprob for report in result.logprobs[0]]
    return tokens, logprobs, loaded.ready.summary


def test_answers_are_those_of_the_reference(tmp_path: Path) -> None:
    _save(tmp_path)
    wanted, expected, _ = _answer(tmp_path, "reference")
    found, logprobs, summary = _answer(tmp_path, "cuda")
    assert found == wanted
    assert len({*found}) > 1
    torch.testing.assert_close(torch.tensor(logprobs), torch.tensor(expected), atol=2e-2, rtol=0)
    assert "fp8 weights (blocks of 16 × 32), " in summary
    assert "fp8 KV cache" in summary
