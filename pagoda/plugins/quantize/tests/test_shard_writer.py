# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from pagoda.plugins.quantize.shard_writer import ShardWriter


def test_files_are_as_full_as_they_may_be(tmp_path: Path) -> None:
    sizes = {"a": 6, "b": 4, "c": 5, "d": 5, "e": 30, "f": 1}
    tensors = {name: torch.full((size,), size, dtype=torch.uint8) for name, size in sizes.items()}
    writer = ShardWriter(tmp_path, max_bytes=10)
    writer.add(tensors.items())
    assert writer.finish() == 4
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    together: dict[str, str] = {}
    for name, file in sorted(index.items()):
        together[file] = together.get(file, "") + name
        assert torch.equal(load_file(tmp_path / file)[name], tensors[name])
    assert sorted(together.values()) == ["ab", "cd", "e", "f"]
