# SPDX-License-Identifier: Apache-2.0
"""Quantization of a whole checkpoint: the process `python -m pagoda.plugins.quantize.job`, a job.

Linear layers of the model's layers are rounded one after the other; every other tensor is copied as it is stored.
By a calibration text they are rounded in the order in which the model computes, and kept in memory until all are.
"""

from __future__ import annotations

import json
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pagoda.checkpoints.checkpoint import INDEX_FILE
from pagoda.checkpoints.config_json import read_model_config
from pagoda.checkpoints.gguf.reader import is_gguf
from pagoda.errors import ConfigError
from pagoda.ipc.machine import available_cores
from pagoda.messages.jobs import QuantizeConfig, QuantizeResult
from pagoda.model.files import unwritable, write_text
from pagoda.worker import job

if TYPE_CHECKING:
    from torch import Tensor

    from pagoda.checkpoints.linears import LinearSpec
    from pagoda.model.gptq import StoredGrids

CONFIG_FILE = "config.json"
_COPIED = ("*.json", "*.jinja", "*.model", "*.spm", "*.txt", "LICENSE*", "NOTICE*")
_AHEAD = 2
"""Layers that each thread may have finished before they are written."""


class _Piece(NamedTuple):
    source_bytes: int
    num_weights: int
    tensors: dict[str, Tensor]


def quantize(config: QuantizeConfig, on_progress: job.OnProgress) -> QuantizeResult:
    """Writes the quantized model's files into the directory, config.json last.

    Raises ConfigError: the model cannot be read, is quantized already, or does not take the format, or the disk is
    full.
    """
    import torch

    from pagoda.model.calibration import calibrate
    from pagoda.model.compressed_tensors import Scheme, quantized_linears
    from pagoda.model.weights import READABLE, open_checkpoint
    from pagoda.plugins.quantize.shard_writer import ShardWriter
    from pagoda.worker.backends import choose_backend

    num_threads = config.num_threads or available_cores()
    torch.set_num_threads(1)  # a layer has one thread; several layers are rounded at a time
    backend, _ = choose_backend(config.backend)
    source, target = Path(config.model), Path(config.directory)
    if is_gguf(source):
        raise ConfigError(
            f"{source} is a GGUF file; --format {config.format} takes a directory of safetensors files."
        )
    shape = read_model_config(source)
    if shape.quantization is not None:
        raise ConfigError(
            f"{source} is quantized already ({shape.quantization.summary}); name the model that it was made of."
        )
    if shape.cross_encoder is not None and config.calibration_windows:
        raise ConfigError(
            f"{source} has an encoder beside its decoder, for which there is no calibration; leave the text out."
        )
    scheme = Scheme.of(config.format, config.group_size, shape)
    linears = {f"{linear.name}.weight": linear for linear in quantized_linears(shape)}
    for layer in range(shape.num_layers * bool(config.calibration_windows)):
        for linear in filter(None, shape.attention_linears(layer)):
            if linear.fill is not None or shape.layers[layer].attention.values_are_keys:
                way = "keys that are values" if linear.fill is None else "heads that are filled up"
                raise _not_taken(source, f"has {way}", linear)
    for linear in linears.values():
        if linear.rows is not None:
            is_turned = linear.rows.transposed and len(linear.rows.shape) == 2
            way = "inputs in front of outputs" if is_turned else "several layers in one tensor"
            raise _not_taken(source, f"holds {way}", linear)
        if linear.head_order and config.calibration_windows:
            raise _not_taken(source, "rotates neighbours", linear)
    with open_checkpoint(source) as checkpoint:
        names = checkpoint.names()
        for name in linears:
            checkpoint.path_of(name)
        calibrated: dict[str, dict[str, Tensor]] = {}
        total = len(names) + (len(linears) if config.calibration_windows else 0)

        def read(linear: LinearSpec) -> Tensor:
            shape = (linear.outputs, linear.inputs)
            return checkpoint.tensor(f"{linear.name}.weight", shape, READABLE)

        def round_to_grids(linear: LinearSpec, values: Tensor, importance: Tensor) -> StoredGrids:
            return scheme.round(linear, values, backend, importance)

        def keep(linear: LinearSpec, rounded: StoredGrids) -> None:
            calibrated[f"{linear.name}.weight"] = scheme.tensors(linear, rounded)
            on_progress(len(calibrated), total)

        if config.calibration_windows:
            torch.set_num_threads(num_threads)
            calibrate(
                shape,
                checkpoint,
                backend,
                getattr(torch, shape.dtype),
                config.calibration_windows,
                read=read,
                rounds=lambda linear: f"{linear.name}.weight" in linears,
                round_to_grids=round_to_grids,
                on_rounded=keep,
            )
            torch.set_num_threads(1)

        def convert(name: str) -> _Piece:
            stored = checkpoint.stored(name)
            linear = linears.get(name)
            if linear is None:
                return _Piece(stored.nbytes, stored.numel(), {name: stored})
            tensors = calibrated.pop(name, None)
            if tensors is None:
                tensors = scheme.tensors(linear, scheme.round(linear, read(linear), backend))
            return _Piece(stored.nbytes, stored.numel(), tensors)

        writer = ShardWriter(target, config.max_shard_bytes)
        source_bytes = num_weights = 0
        before = total - len(names)
        with ThreadPoolExecutor(num_threads) as pool:
            for done, piece in enumerate(_in_order(pool, convert, names, num_threads), 1):
                writer.add(piece.tensors.items())
                source_bytes += piece.source_bytes
                num_weights += piece.num_weights
                on_progress(before + done, total)
        num_files = writer.finish()
    _copy_files(source, target)
    contents = json.loads((source / CONFIG_FILE).read_bytes())
    contents["quantization_config"] = scheme.quantization_config(shape)
    write_text(target / CONFIG_FILE, json.dumps(contents, indent=2) + "\n")
    return QuantizeResult(
        weight_bytes=writer.num_bytes,
        source_bytes=source_bytes,
        num_weights=num_weights,
        num_files=num_files,
    )


def _not_taken(source: Path, way: str, linear: LinearSpec) -> ConfigError:
    return ConfigError(
        f"{source} {way} ({linear.stored.tensor}), which `pagoda quantize` does not take so; serve it with "
        "--quantization int8 or int4."
    )


def _in_order(
    pool: ThreadPoolExecutor,
    convert: Callable[[str], _Piece],
    names: Sequence[str],
    num_threads: int,
) -> Iterator[_Piece]:
    """Pieces in the order of their names, a few ahead of the one that is written."""
    waiting: deque[Future[_Piece]] = deque()
    for name in names:
        waiting.append(pool.submit(convert, name))
        if len(waiting) > _AHEAD * num_threads:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _copy_files(source: Path, target: Path) -> None:
    """Copies tokenizer, chat template and licence."""
    for pattern in _COPIED:
        for path in sorted(source.glob(pattern)):
            if path.is_file() and path.name not in (CONFIG_FILE, INDEX_FILE):
                try:
                    shutil.copyfile(path, target / path.name)
                except OSError as error:
                    raise unwritable(target / path.name, error) from error


if __name__ == "__main__":
    job.run(QuantizeConfig, quantize)
