# SPDX-License-Identifier: Apache-2.0
"""Write a training checkpoint as a Hugging Face model folder.

    python -m tools.train_tiny.export --checkpoint RUN_FOLDER/checkpoint.pt \\
        --out pagoda/checkpoints/pagoda_tiny
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tools.train_tiny.evaluate import load_checkpoint
from tools.train_tiny.tokenizer import (
    END_OF_TEXT,
    IM_END,
    build_tokenizer,
    save_tokenizer,
    token_id,
)


def export(checkpoint: Path, out: Path) -> None:
    """Write weights (bf16), configurations and tokenizer."""
    out.mkdir(parents=True, exist_ok=True)
    model, tokenizer = load_checkpoint(checkpoint), build_tokenizer()
    tensors = {
        f"model.{name}": value.to(torch.bfloat16).contiguous()
        for name, value in model.state_dict().items()
    }
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    pad = token_id(tokenizer, END_OF_TEXT)
    eos = [token_id(tokenizer, IM_END), pad]
    generation = {"do_sample": False, "eos_token_id": eos, "pad_token_id": pad}
    for name, content in (
        ("config.json", model.config.hf_config(eos, pad)),
        ("generation_config.json", generation),
    ):
        (out / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    save_tokenizer(out, model.config.max_position_embeddings)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Export a checkpoint to Hugging Face's layout.")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of the model")
    args = parser.parse_args()
    export(args.checkpoint, args.out)


if __name__ == "__main__":
    main()
