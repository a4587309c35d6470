# SPDX-License-Identifier: Apache-2.0
"""Time of a token behind short and long contexts, of layers as Qwen3-Next has them.

`python -m benchmarks.cpu.states [--kv-cache-dtype int8] [--layers 4] [--experts 32]`. Three of four layers have a
delta rule. All sizes of a layer are those of Qwen3-Next-80B-A3B, but for the number of experts, of which a token
goes through ten; the head has its share of one of 48 layers. Steps behind the contexts take turns, and all memory
of keys, values and states is written before. With `--attention` all layers have attention instead.
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

from benchmarks.cpu.held_requests import HeldRequests, load_layers
from pagoda.cli import output

_CONTEXTS = (1024, 32_768)
_STEPS, _WARM_UP = 24, 4
_PROMPT, _BLOCKS = 512, 200
_VOCABULARY, _LAYERS = 151_936, 48


def _config(layers: int, experts: int, *, attention: bool) -> dict[str, Any]:
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    return {
        "architectures": ["Qwen3NextForCausalLM"],
        "vocab_size": _VOCABULARY * layers // _LAYERS,
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "num_experts": experts,
        "num_experts_per_tok": 10,
        "layer_types": ["full_attention" if attention else kinds[i % 4] for i in range(layers)],
        "max_position_embeddings": 2 * max(_CONTEXTS),
        "rope_theta": 1e7,
        "torch_dtype": "bfloat16",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--layers", type=int, default=4, help="a multiple of 4")
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--attention", action="store_true", help="attention in all layers")
    options = parser.parse_args()
    loaded = load_layers(
        _config(options.layers, options.experts, attention=options.attention),
        options.kv_cache_dtype,
        max_model_len=max(_CONTEXTS) + 4 * _STEPS,
        max_num_seqs=3,
        num_blocks=_BLOCKS,
    )
    console = output.stdout()
    console.print(loaded.ready.summary)
    steps = HeldRequests(loaded)
    seconds = statistics.median(steps.prefill(2, _PROMPT) for _ in range(4))
    console.print(f"prompt of {_PROMPT}: {seconds * 1e3:.1f} ms, {_PROMPT / seconds:.0f} tokens/s")
    times: dict[int, list[float]] = {context: [] for context in _CONTEXTS}
    for slot, context in enumerate(_CONTEXTS):
        steps.start(slot, context, context + 2 * (_WARM_UP + _STEPS))
    for step in range(_WARM_UP + _STEPS):
        for slot, context in enumerate(_CONTEXTS):
            seconds = steps.decode([slot])
            if step >= _WARM_UP:
                times[context].append(seconds)
    short, long = (statistics.median(times[context]) for context in _CONTEXTS)
    console.print(
        f"a token behind {_CONTEXTS[0]:,}: {short * 1e3:.2f} ms, behind {_CONTEXTS[1]:,}: {long * 1e3:.2f} ms, "
        f"{long / short:.3f} times as much"
    )


if __name__ == "__main__":
    main()
