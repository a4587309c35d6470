# SPDX-License-Identifier: Apache-2.0
"""GGUF files of BitNet's own llama.cpp: its architectures, and its type I2_S."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from driver import Driver, load
from family_models import make_model
from gguf_families import ROWS, save_family
from gguf_files import finish
from gguf_models import save_gguf
from tiny_models import continuation
from tiny_models import make_model as make_tiny

from pagoda.backend.weights import BlockWeight, DenseWeight, dequantize
from pagoda.checkpoints.gguf.config import gguf_model_config
from pagoda.checkpoints.gguf.reader import read_gguf
from pagoda.errors import ConfigError
from pagoda.model.gguf_weights import GgufWeights

PROMPT = [random.Random(0).randrange(320) for _ in range(100)]
_MAP = re.compile(r"blk\.\d+\.(attn_(q|k|v|output)|ffn_(gate|up|down))\.weight")
_I2_S = 36


_SIZES = {"hidden_size": 256, "intermediate_size": 512}


def _rounded(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """Makes weights of maps -s, 0 or s, with an s of each map that float16 has exactly."""
    with torch.no_grad():
        for place, (own, weight) in enumerate(model.named_parameters()):
            if "_proj" in own:
                scale = (16 + place % 16) / 512
                weight.copy_((weight / weight.abs().mean()).round().clamp(-1, 1) * scale)
    return model


def _packed(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Weights in runs of 128, the first 32 in the highest bits of 32 bytes; then their scale, and 28 bytes."""
    scale = np.abs(values).max().astype(np.float32)
    parts = (np.sign(values).astype(np.int8) + 1).astype(np.uint8).reshape(-1, 4, 32)
    packed = parts[:, 0] << 6 | parts[:, 1] << 4 | parts[:, 2] << 2 | parts[:, 3]
    return np.concatenate([packed.ravel(), scale[None].view(np.uint8), np.zeros(28, np.uint8)])


def _rewrite(path: Path, packed: Path, architecture: str) -> dict[str, npt.NDArray[np.float32]]:
    """Writes a file as BitNet's llama.cpp does; returns its maps."""
    reader, writer = gguf.GGUFReader(path), gguf.GGUFWriter(packed, architecture)
    for field in reader.fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture")):
            name = re.sub("^(bitnet|llama)\\.", f"{architecture}.", field.name)
            writer.add_key_value(name, field.contents(), field.types[0])
    maps = {}
    for tensor in reader.tensors:
        if not _MAP.fullmatch(tensor.name):
            writer.add_tensor(tensor.name, tensor.data)
            continue
        maps[tensor.name], data = np.array(tensor.data), _packed(tensor.data)
        shape = tensor.data.shape
        writer.add_tensor_info(tensor.name, shape, np.dtype(np.float32), len(data), _I2_S)  # type: ignore[arg-type]
        writer.tensors[-1][tensor.name].tensor = data
    finish(writer)
    return maps


def _check_maps(directory: Path) -> None:
    """Maps of a layer are those of the plain file, to the bit."""
    files = [read_gguf(directory / f"{name}.gguf") for name in ("m", "plain")]
    spec, (packed, plain) = gguf_model_config(files[0]), map(GgufWeights, files)
    for linear in spec.layer_linears(0, range(0)):
        weight, dense = packed.linear(linear, torch.bfloat16), plain.linear(linear, torch.float32)
        assert isinstance(weight, BlockWeight)
        assert isinstance(dense, DenseWeight)
        assert torch.equal(dequantize(weight), dense.values)


@pytest.mark.parametrize("architecture", ["bitnet-b1.58", "bitnet-25"])
def test_files_answer_as_transformers_does(architecture: str, tmp_path: Path) -> None:
    """These have squared ReLU, which `bitnet` does not."""
    model = _rounded(make_model("bitnet-relu2", tie_word_embeddings=True, **_SIZES))
    save_family(model, tmp_path / "plain.gguf", ROWS["bitnet"])
    maps = _rewrite(tmp_path / "plain.gguf", tmp_path / "m.gguf", architecture)
    assert len(maps) == 7 * model.config.num_hidden_layers
    assert {read_gguf(tmp_path / "m.gguf").tensor(name).type.name for name in maps} == {"I2_S"}
    driver = Driver(load(tmp_path / "m.gguf", dtype="float32"))
    driver.start(0, PROMPT)
    driver.run([0], 32)
    assert driver.output(0) == continuation(model, PROMPT, 32)
    _check_maps(tmp_path)


def test_maps_of_llama_are_put_back(tmp_path: Path) -> None:
    """Falcon 3 and Llama 3 of 1.58 bits have their own architecture."""
    model = _rounded(make_tiny("llama", **_SIZES))
    save_gguf(model, tmp_path / "plain.gguf")
    _rewrite(tmp_path / "plain.gguf", tmp_path / "m.gguf", "llama")
    _check_maps(tmp_path)


def test_a_file_of_other_widths_is_refused(tmp_path: Path) -> None:
    model = make_model("bitnet-relu2", hidden_size=128, tie_word_embeddings=True)
    save_family(model, tmp_path / "plain.gguf", ROWS["bitnet"])
    _rewrite(tmp_path / "plain.gguf", tmp_path / "m.gguf", "bitnet-b1.58")
    with pytest.raises(ConfigError, match="but I2_S comes in rows of a multiple of 256"):
        read_gguf(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("octets", "said"),
    [
        (np.array([1e-8], np.float32), r"magnitude 9\.99.*e-09, which must be 0, or from 2\^-14"),
        (np.array([-7e4], np.float32), "a scale of magnitude 70000.0, which must be 0, or from"),
        (np.array([np.nan], np.float32), "a scale of magnitude nan, which must be 0, or from"),
        (np.array([0x6C], np.uint8), "the code 3, which stands for no weight of I2_S"),
    ],
)
def test_scales_and_codes_that_are_none(
    octets: npt.NDArray[Any], said: str, tmp_path: Path
) -> None:
    """The scale is the first of the last 32 bytes, and codes lie in front of it."""
    model = _rounded(make_model("bitnet-relu2", tie_word_embeddings=True, **_SIZES))
    save_family(model, tmp_path / "plain.gguf", ROWS["bitnet"])
    _rewrite(tmp_path / "plain.gguf", tmp_path / "m.gguf", "bitnet-b1.58")
    own = octets.view(np.uint8)
    tensor = read_gguf(tmp_path / "m.gguf").tensor("blk.1.ffn_up.weight")
    with open(tmp_path / "m.gguf", "r+b") as file:
        file.seek(tensor.start + tensor.num_bytes - (32 if len(own) == 4 else 33))
        file.write(own.tobytes())
    with pytest.raises(ConfigError, match=rf"tensor blk\.1\.ffn_up\.weight has .*{said}"):
        load(tmp_path / "m.gguf")
