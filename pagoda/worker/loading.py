"""From a `WorkerConfig` to a model that is ready to run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch

from pagoda.engine.messages import Capabilities, WorkerConfig, WorkerReady
from pagoda.errors import ConfigError
from pagoda.ipc.machine import available_cores, available_memory_bytes
from pagoda.model.config import DTYPES, ModelConfig, parse_model_config, read_model_config
from pagoda.model.decoder import Decoder
from pagoda.model.gguf import GgufWeights, gguf_model_config
from pagoda.model.quantization import (
    QUANTIZATIONS,
    QuantizationOnLoad,
    QuantizingSource,
    quantization_on_load,
)
from pagoda.model.quantization_config import CheckpointQuantization
from pagoda.model.quantized_checkpoint import QuantizedCheckpoint
from pagoda.model.weight_formats import Quantization
from pagoda.model.weights import DummyWeights, WeightSource, open_checkpoint
from pagoda.models.gguf import is_gguf, read_gguf
from pagoda.models.presets import PRESETS
from pagoda.worker.backends import choose_backend
from pagoda.worker.input_batch import InputBatch, input_batch_bytes
from pagoda.worker.memory import choose_num_blocks, format_bytes, left_for_kv_cache
from pagoda.worker.runner import Runner
from pagoda.worker.sampler import Sampler


def load_runner(config: WorkerConfig) -> tuple[Runner, WorkerReady]:
    """Loads weights and allocates the KV cache.

    Raises:
        ConfigError: the model, its files, the machine or a flag does not allow it.
    """
    torch.set_num_threads(config.num_threads or available_cores())
    backend, backend_summary = choose_backend(config.backend)
    block_size = _block_size(config.block_size, backend.capabilities)
    shape = _model_config(config)
    dtype_name = _dtype(config.dtype, shape.dtype, backend.capabilities)
    dtype = getattr(torch, dtype_name)
    kv_dtype_name = _kv_cache_dtype(config.kv_cache_dtype, dtype_name, backend.capabilities)
    kv_dtype = getattr(torch, kv_dtype_name)
    max_model_len = _max_model_len(config.max_model_len, shape, backend.capabilities)
    _check_max_num_seqs(config.max_num_seqs, backend.capabilities)

    quantization = _quantization(config, shape, backend.capabilities)
    weight_bytes = shape.weight_bytes(quantization, dtype.itemsize)
    bytes_per_token = _kv_bytes_per_token(shape, kv_dtype)
    num_blocks = choose_num_blocks(
        config,
        block_size=block_size,
        bytes_per_block=block_size * bytes_per_token,
        max_model_len=max_model_len,
        available_bytes=left_for_kv_cache(
            config,
            weight_bytes=weight_bytes,
            batch_bytes=input_batch_bytes(config.max_num_seqs, max_model_len, block_size),
            max_model_len=max_model_len,
            available_bytes=available_memory_bytes(),
        ),
    )
    caches = [
        backend.allocate_kv_cache(
            num_blocks, block_size, shape.num_kv_heads, shape.head_dim, dtype, kv_dtype
        )
        for _ in range(shape.num_layers)
    ]
    with _weights(config, quantization) as source:
        model = Decoder(shape, backend, source, dtype, caches)
    num_cached = num_blocks * block_size
    ready = WorkerReady(
        capabilities=backend.capabilities,
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=max_model_len,
        vocab_size=shape.vocab_size,
        summary=(
            f"{backend_summary}, {dtype_name}, "
            f"{'' if quantization is None else f'{quantization.summary}, '}"
            f"{format_bytes(weight_bytes)} weights, "
            f"{format_bytes(num_cached * bytes_per_token)} {kv_dtype_name} KV cache "
            f"for {num_cached} tokens"
        ),
    )
    batch = InputBatch(config.max_num_seqs, max_model_len, block_size)
    return Runner(model, batch, Sampler(shape.vocab_size)), ready


def _block_size(wanted: int | None, capabilities: Capabilities) -> int:
    sizes = capabilities.block_sizes
    if wanted is None:
        return sizes[0]
    if wanted not in sizes:
        known = ", ".join(str(size) for size in sorted(sizes))
        raise ConfigError(f"--block-size must be one of {known}, got {wanted}.")
    return wanted


def _model_config(config: WorkerConfig) -> ModelConfig:
    if config.load_format == "dummy" and config.model in PRESETS:
        return parse_model_config(PRESETS[config.model], source=f"preset {config.model}")
    directory = Path(config.model)
    if is_gguf(directory):
        return gguf_model_config(read_gguf(directory))
    if not directory.is_dir():
        hint = f" or a preset ({', '.join(PRESETS)})" if config.load_format == "dummy" else ""
        raise ConfigError(f"there is no model directory {config.model}{hint}.")
    return read_model_config(directory)


def _dtype(wanted: str, stored: str, capabilities: Capabilities) -> str:
    if wanted not in ("auto", *DTYPES):
        raise ConfigError(f"--dtype must be one of auto, {', '.join(DTYPES)}, got {wanted!r}.")
    dtype = stored if wanted == "auto" else wanted
    if dtype not in capabilities.weight_formats:
        known = ", ".join(known for known in DTYPES if known in capabilities.weight_formats)
        raise ConfigError(f"this backend does not compute in {dtype}; --dtype may be {known}.")
    return dtype


def _quantization(
    config: WorkerConfig, shape: ModelConfig, capabilities: Capabilities
) -> Quantization | None:
    """The checkpoint's own, or the one that is asked for."""
    wanted = config.quantization
    if wanted not in QUANTIZATIONS:
        raise ConfigError(
            f"--quantization must be one of {', '.join(QUANTIZATIONS)}, got {wanted!r}."
        )
    if shape.quantization is None:
        if wanted != "none" and wanted not in capabilities.weight_formats:
            raise ConfigError(f"this backend does not compute with {wanted} weights.")
        return quantization_on_load(wanted, config.quantization_group_size)
    if wanted != "none":
        raise ConfigError(
            f"{config.model} is quantized already ({shape.quantization.summary}); leave out --quantization."
        )
    if config.load_format == "dummy":
        raise ConfigError(
            f"{config.model}/config.json: there are no dummy weights for its quantization_config; "
            "take that out and add --quantization int8 or int4."
        )
    return shape.quantization


def _kv_cache_dtype(wanted: str, dtype: str, capabilities: Capabilities) -> str:
    known = capabilities.kv_cache_dtypes
    if wanted not in ("auto", *known):
        raise ConfigError(
            f"--kv-cache-dtype must be one of auto, {', '.join(known)} on this backend, got {wanted!r}."
        )
    chosen = dtype if wanted == "auto" else wanted
    if chosen not in known:
        raise ConfigError(
            f"this backend has no KV cache of {chosen}; --kv-cache-dtype may be {', '.join(known)}."
        )
    return chosen


def _kv_bytes_per_token(shape: ModelConfig, kv_dtype: torch.dtype) -> int:
    head = shape.head_dim * kv_dtype.itemsize
    if kv_dtype == torch.int8:
        head += torch.float32.itemsize  # its scale
    return 2 * shape.num_layers * shape.num_kv_heads * head


def _max_model_len(wanted: int | None, shape: ModelConfig, capabilities: Capabilities) -> int:
    longest = min(shape.max_position_embeddings, capabilities.max_model_len)
    if wanted is None:
        return longest
    if not 1 <= wanted <= longest:
        raise ConfigError(
            f"--max-model-len must be from 1 to the model's own {longest}, got {wanted}."
        )
    return wanted


def _check_max_num_seqs(wanted: int, capabilities: Capabilities) -> None:
    if not 1 <= wanted <= capabilities.max_batch_seqs:
        raise ConfigError(
            f"--max-num-seqs must be from 1 to {capabilities.max_batch_seqs}, got {wanted}."
        )


@contextlib.contextmanager
def _weights(config: WorkerConfig, quantization: Quantization | None) -> Iterator[WeightSource]:
    with _stored_weights(config, quantization) as source:
        if isinstance(quantization, QuantizationOnLoad):
            yield QuantizingSource(source, quantization)
        else:
            yield source


@contextlib.contextmanager
def _stored_weights(
    config: WorkerConfig, quantization: Quantization | None
) -> Iterator[WeightSource]:
    if config.load_format == "dummy":
        yield DummyWeights(config.seed)
    elif config.load_format == "auto" and is_gguf(Path(config.model)):
        file = read_gguf(Path(config.model))
        yield GgufWeights(file, gguf_model_config(file))
    elif config.load_format == "auto":
        with open_checkpoint(Path(config.model)) as checkpoint:
            if isinstance(quantization, CheckpointQuantization):
                yield QuantizedCheckpoint(checkpoint, quantization)
            else:
                yield checkpoint
    else:
        raise ConfigError(f"--load-format must be auto or dummy, got {config.load_format!r}.")
