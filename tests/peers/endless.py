# SPDX-License-Identifier: Apache-2.0
"""The embedded model without its end token: `python -m tests.peers.endless DIR` writes it, for `--model DIR`.

llama.cpp's tests count the tokens of answers by a model that tells stories and seldom ends. The embedded model
ends most of them at once; with another end token, which it never writes, it goes on as that model does.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from pagoda.checkpoints.resolve import resolve_model

_NEVER_WRITTEN = "<tool_response>"
"""A token of prompts alone."""


def write_endless(target: Path) -> None:
    """Writes the model's files to a directory, which is made."""
    source = resolve_model(None).directory
    assert source is not None
    target.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.name in ("tokenizer.json", "model.safetensors"):
            shutil.copy(path, target)
    texts = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
    tokens = {it["content"]: int(key) for key, it in texts["added_tokens_decoder"].items()}
    texts["eos_token"] = _NEVER_WRITTEN
    _write(target / "tokenizer_config.json", texts)
    for name in ("config.json", "generation_config.json"):
        config = json.loads((source / name).read_text(encoding="utf-8"))
        _write(target / name, {**config, "eos_token_id": [tokens[_NEVER_WRITTEN]]})


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    write_endless(parser.parse_args().directory)
