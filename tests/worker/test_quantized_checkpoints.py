"""Ready-made quantized checkpoints answer as transformers does on the weights that they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from driver import Driver, load
from quantized_models import (
    Format,
    awq_format,
    gptq_format,
    int8_format,
    packed_format,
    save_quantized,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

from pagoda.backend.weights import GroupedWeight, LinearWeight, dequantize
from pagoda.engine.messages import SamplingParams, WorkerConfig
from pagoda.errors import ConfigError
from pagoda.model.config import read_model_config
from pagoda.model.quantized_checkpoint import QuantizedCheckpoint
from pagoda.model.weights import open_checkpoint
from pagoda.worker.loading import load_runner

FORMATS: dict[str, Format] = {
    "int8": int8_format(),
    "int8-flat": int8_format(flat_scales=True),
    "int8-compression-config": int8_format(top="compression_config"),
    "packed-int4-g128": packed_format(4, 128),
    "packed-int4-g32": packed_format(4, 32, scale_dtype=torch.float16),
    "packed-int4-g64-zeros": packed_format(4, 64, symmetric=False),
    "packed-int4-channel": packed_format(4, -1, scale_dtype=torch.float32),
    "packed-int8-channel": packed_format(8, -1),
    "packed-int8-g128-zeros": packed_format(8, 128, symmetric=False, scale_dtype=torch.float16),
    "packed-int4-g256": packed_format(4, 256),
    "packed-int4-act-order": packed_format(4, 32, act_order=True),
    "packed-int4-head": packed_format(4, 128, ignore=()),
    "awq-g128": awq_format(128),
    "awq-g64": awq_format(64),
    "awq-channel": awq_format(-1),
    "gptq-g128": gptq_format(4, 128),
    "gptq-int8-g32": gptq_format(8, 32),
    "gptq-zeros": gptq_format(4, 128, symmetric=False),
    "gptq-v2-zeros": gptq_format(4, 64, symmetric=False, version=2),
    "gptq-int8-zeros": gptq_format(8, 128, symmetric=False),
    "gptq-act-order": gptq_format(4, 64, act_order=True),
    "gptq-act-order-zeros": gptq_format(4, 128, act_order=True, symmetric=False),
    "gptq-channel": gptq_format(4, -1),
    "gptq-head": gptq_format(4, 128, head=True),
}


@pytest.mark.parametrize("name", FORMATS)
def test_weights_and_answers(name: str, tmp_path: Path) -> None:
    model, meant = save_quantized(tmp_path, FORMATS[name])
    for module, expected in meant.items():
        weight = _linear(tmp_path, module, *expected.shape)
        actual = dequantize(weight).double().numpy()
        if isinstance(weight, GroupedWeight) and weight.offsets is not None:
            rounded = weight.offsets.abs().max().item() * 2**-11
            np.testing.assert_allclose(actual, expected, rtol=0, atol=rounded * 1.01)
        else:
            np.testing.assert_allclose(actual, expected, rtol=1e-7, atol=0)
    _assert_answers_alike(tmp_path, model)


def _linear(directory: Path, name: str, outputs: int, inputs: int) -> LinearWeight:
    quantization = read_model_config(directory).quantization
    assert quantization is not None
    with open_checkpoint(directory) as tensors:
        source = QuantizedCheckpoint(tensors, quantization)
        return source.linear(name, outputs, inputs, torch.float32)


def _assert_answers_alike(directory: Path, model: Any) -> None:
    """Log-probabilities along an answer; rounded inputs make the difference."""
    prompt = torch.randint(320, (40,), generator=torch.Generator().manual_seed(3)).tolist()
    driver = Driver(load(directory, backend="reference"))
    sampling = SamplingParams(temperature=0, seed=0, max_tokens=100, logprobs=20)
    driver.start(0, prompt, sampling)
    driver.run([0], 8)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + driver.output(0)])).logits[0]
    expected = logits.log_softmax(-1)[len(prompt) - 1 :]
    tops = [result.logprobs[0] for result in driver.results if 0 in result.logprobs]
    ours = torch.tensor([top.top_logprobs for top in tops])
    theirs = expected[:-1].gather(1, torch.tensor([top.top_token_ids for top in tops]))
    print("DIFF", float((ours - theirs).abs().mean()), float((ours - theirs).abs().max()), float(theirs.std()))
    assert (ours - theirs).abs().max() < 0.15
