# SPDX-License-Identifier: Apache-2.0
"""Safetensors files of a bounded size, with the index that names the file of each tensor."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from pagoda.checkpoints.checkpoint import INDEX_FILE, SINGLE_FILE
from pagoda.model.files import unwritable, write_text


class ShardWriter:
    """Takes tensors in any order and writes a file whenever the next one would not fit.

    Methods raise ConfigError where the disk is full or refuses.
    """

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self._directory = directory
        self._max_bytes = max_bytes
        self._held: dict[str, Tensor] = {}
        self._held_bytes = 0
        self._files: list[list[str]] = []
        """Names of the tensors of each file written."""
        self.num_bytes = 0

    def add(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            if self._held and self._held_bytes + tensor.nbytes > self._max_bytes:
                self._write()
            self._held[name] = tensor.contiguous()
            self._held_bytes += tensor.nbytes

    def finish(self) -> int:
        """Writes what is left and the index, and gives the files their names; returns the number of files."""
        if self._held:
            self._write()
        count = len(self._files)
        if count == 1:
            self._part(0).rename(self._directory / SINGLE_FILE)
            return 1
        weight_map: dict[str, str] = {}
        for index, names in enumerate(self._files):
            name = f"model-{index + 1:05}-of-{count:05}.safetensors"
            self._part(index).rename(self._directory / name)
            weight_map |= dict.fromkeys(names, name)
        contents = {"metadata": {"total_size": self.num_bytes}, "weight_map": weight_map}
        write_text(self._directory / INDEX_FILE, json.dumps(contents, indent=2) + "\n")
        return count

    def _part(self, index: int) -> Path:
        return self._directory / f"part-{index}"

    def _write(self) -> None:
        path = self._part(len(self._files))
        try:
            save_file(self._held, path, metadata={"format": "pt"})
        except (OSError, SafetensorError) as error:
            raise unwritable(path, error) from error
        self._files.append(list(self._held))
        self.num_bytes += self._held_bytes
        self._held, self._held_bytes = {}, 0
