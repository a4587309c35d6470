# SPDX-License-Identifier: Apache-2.0
"""Decoding with latent attention beside the limits of the machine, of layers as DeepSeek-V2-Lite has them.

`python -m benchmarks.cpu.latents [--kv-cache-dtype int8] [--threads N]`. Two layers, the first dense and one with
experts; the head has its share of two of 27 layers. A step reads the weights that its tokens go through, and each
cached latent once for all 16 heads. It is compared with the time that memory takes for these bytes; and with the
limits of its two parts, weights and attention, each of which is the slower of memory and arithmetic: a latent of
1,152 bytes takes 35 thousand operations. Limits are measured before and after each row; the mean counts.
"""

from __future__ import annotations

import argparse
import os
import statistics
from typing import Any

# Read when torch is loaded: threads wait as they do in a worker.
from pagoda.worker.pinning import SPIN_COUNT

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)

import torch

from benchmarks.cpu.held_requests import HeldRequests, load_layers
from benchmarks.cpu.limits import Limits, measure_limits
from pagoda.backend.cpu.backend import CpuBackend
from pagoda.backend.cpu.native import choose_instruction_set
from pagoda.cli import output
from pagoda.worker.loading import LoadedWorker

_STEPS, _WARM_UP = 16, 3
_SEQUENCES, _CONTEXTS, _BLOCK_SIZE = (1, 16), (4096, 32_768), 16
_LAYERS, _OF_LAYERS = 2, 27
_VOCABULARY, _HIDDEN = 102_400 * _LAYERS // _OF_LAYERS, 2048
_HEADS, _RANK, _ROPE_DIM = 16, 512, 64
_FLOPS = 2 * _HEADS * (2 * _RANK + _ROPE_DIM)
"""Operations of a token and a cached latent in one layer."""


def _config() -> dict[str, Any]:
    return {
        "architectures": ["DeepseekV2ForCausalLM"],
        "vocab_size": _VOCABULARY,
        "hidden_size": _HIDDEN,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": _LAYERS,
        "first_k_dense_replace": 1,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _HEADS,
        "q_lora_rank": None,
        "kv_lora_rank": _RANK,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": _ROPE_DIM,
        "v_head_dim": 128,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "topk_method": "greedy",
        "max_position_embeddings": 2 * max(_CONTEXTS),
        "torch_dtype": "bfloat16",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    longest = max(_CONTEXTS) + 2 * (_WARM_UP + _STEPS)
    loaded = load_layers(
        _config(),
        options.kv_cache_dtype,
        max_model_len=longest,
        max_num_seqs=max(_SEQUENCES),
        num_blocks=max(_SEQUENCES) * -(-longest // _BLOCK_SIZE),
        threads=options.threads,
    )
    console = output.stdout()
    console.print(loaded.ready.summary)
    rows = [
        _measured(loaded, sequences, context) for sequences in _SEQUENCES for context in _CONTEXTS
    ]
    columns = (
        "requests",
        "context",
        "ms",
        "weights",
        "latents",
        "GB/s",
        "limits",
        "of memory",
        "of limits",
    )
    console.print(output.table("Decoding", columns, rows))


def _limits() -> Limits:
    with torch.inference_mode():
        return measure_limits(CpuBackend(choose_instruction_set()))


def _measured(loaded: LoadedWorker, sequences: int, context: int) -> tuple[str, ...]:
    requests, slots = HeldRequests(loaded), list(range(sequences))
    for slot in slots:
        requests.start(slot, context, context + 2 * (_WARM_UP + _STEPS))
    seconds, weights, before = [], [], _limits()
    for step in range(_WARM_UP + _STEPS):
        taken = requests.decode(slots)
        if step >= _WARM_UP:
            seconds.append(taken)
            weights.append(_weights_read(loaded, requests.expert_tokens))
    requests.end(slots)
    after = _limits()
    bytes_per_s, flops = (
        statistics.mean((getattr(before, name), getattr(after, name)))
        for name in ("bytes_per_s", "flops")
    )
    median, read = statistics.median(seconds), statistics.median(weights)
    cached = sequences * (context + _WARM_UP + _STEPS // 2)
    model = loaded.description["model"]
    latents = cached * float(model["kv_bytes_per_token"])  # type: ignore[arg-type]
    products = sequences * (float(model["flops_per_token"]) + 2 * _VOCABULARY * _HIDDEN)  # type: ignore[arg-type]
    parts = ((read, products), (latents, cached * _LAYERS * _FLOPS))
    memory = (read + latents) / bytes_per_s
    limit = sum(max(num_bytes / bytes_per_s, work / flops) for num_bytes, work in parts)
    return (
        str(sequences),
        f"{context:,}",
        f"{median * 1e3:.2f}",
        f"{read / 1e6:.0f} MB",
        f"{latents / 1e6:.0f} MB",
        f"{(read + latents) / median / 1e9:.1f}",
        f"{bytes_per_s / 1e9:.1f} GB/s, {flops / 1e9:.0f} GFLOP/s",
        f"{memory / median:.0%}",
        f"{limit / median:.0%}",
    )


def _weights_read(loaded: LoadedWorker, expert_tokens: list[int]) -> float:
    """Bytes of weights that the last step has read; only one layer has experts."""
    model = loaded.description["model"]
    weights, experts = float(model["weight_bytes"]), float(model["expert_bytes"])  # type: ignore[arg-type]
    used = sum(count > 0 for count in expert_tokens) / len(expert_tokens)
    head = _VOCABULARY * _HIDDEN * torch.bfloat16.itemsize
    return weights - experts * (1 - used) + head


if __name__ == "__main__":
    main()
