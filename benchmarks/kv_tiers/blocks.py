# SPDX-License-Identifier: Apache-2.0
"""A worker's blocks without its model: KV tensors, a directory of objects, and the threads that copy."""

from __future__ import annotations

import hashlib
import shutil
import threading
from pathlib import Path

import torch

from pagoda.backend.base import KVCache
from pagoda.backend.kv_store import layout_of
from pagoda.checkpoints.config_json import parse_model_config
from pagoda.checkpoints.presets import PRESETS
from pagoda.messages.transfers import DeviceBlocks, TierBlocks, Transfer, TransferEnd, TransferPlace
from pagoda.plugins.disk_tier.objects import Manifest, ObjectFiles, open_directory
from pagoda.plugins.disk_tier.transfers import tier_of
from pagoda.worker.kv.jobs import Jobs
from pagoda.worker.kv.store import HostKVStore
from pagoda.worker.kv.transfers import KVTiers, TransferWorker


class Blocks:
    """Some blocks in the shape of a preset's, in bfloat16, and an object for each."""

    def __init__(self, root: Path, model: str, num_blocks: int, block_size: int) -> None:
        shape = parse_model_config(PRESETS[model], source=model)
        block = (shape.num_kv_heads, block_size, shape.head_dim)
        self._tensors = [
            torch.empty((num_blocks, *block), dtype=torch.bfloat16).random_()
            for _ in range(2 * shape.num_layers)
        ]
        pairs = zip(self._tensors[::2], self._tensors[1::2], strict=True)
        memory = self._memory = HostKVStore([KVCache(keys, values) for keys, values in pairs])
        manifest = Manifest(
            model=model,
            model_digest="none",
            dtype="bfloat16",
            kv_dtype="bfloat16",
            quantization="none",
            arithmetic="none",
            layout=layout_of(memory.tensors),
            block_size=block_size,
            payload_bytes=memory.block_bytes,
        )
        self.files = ObjectFiles(open_directory(root, manifest), manifest)
        self._device = DeviceBlocks(list(range(num_blocks)))
        self._disk = TierBlocks(
            "disk", [hashlib.sha256(b"%d" % number).digest() for number in range(num_blocks)]
        )
        self._digest = self._device_digest()
        self._ended = threading.Semaphore(0)
        self._num_transfers = 0
        self._jobs = Jobs(self._ended.release)
        self._transfers = TransferWorker(
            KVTiers(memory, None, {"disk": tier_of(self.files)}), None, self._jobs
        )

    def write(self) -> None:
        """
        Raises:
            RuntimeError: a block could not be written.
        """
        self._move(self._device, self._disk)

    def read(self) -> None:
        """
        Raises:
            RuntimeError: a block could not be read.
        """
        self._move(self._disk, self._device)

    def _move(self, source: TransferPlace, target: TransferPlace) -> None:
        self._transfers.start([Transfer(self._num_transfers, 0, source, target)])
        self._num_transfers += 1
        self._ended.acquire()
        [end] = self._jobs.poll()
        if isinstance(end, TransferEnd) and end.failed:
            raise RuntimeError(f"{len(end.failed)} blocks were not moved: {end.error}.")

    def clear_device(self) -> None:
        for tensor in self._tensors:
            tensor.zero_()

    def check_device(self) -> None:
        """
        Raises:
            RuntimeError: the device does not hold what was there at first.
        """
        if self._device_digest() != self._digest:
            raise RuntimeError("What came back is not what was written.")

    def _device_digest(self) -> bytes:
        digest = hashlib.sha256()
        block = memoryview(bytearray(self._memory.block_bytes))
        for block_id in self._device.block_ids:
            self._memory.read([block_id], [block])
            digest.update(block)
        return digest.digest()

    def remove_objects(self) -> None:
        for path in self.files.directory.iterdir():
            if path.is_dir():
                shutil.rmtree(path)

    def close(self) -> None:
        self._transfers.close()
