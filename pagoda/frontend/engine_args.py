"""The keyword arguments of `LLM` and `AsyncLLM`: the same names as the flags of `pagoda serve`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict

import msgspec

from pagoda.engine.config import EngineConfig
from pagoda.engine.messages import SimConfig
from pagoda.errors import ConfigError
from pagoda.models.resolve import ModelFiles, resolve_model


class EngineArgs(TypedDict, total=False):
    """How a model is loaded and scheduled; what is left out has the default of the flag."""

    load_format: str
    """`auto` reads safetensors; `dummy` makes random weights in the shape of a preset."""
    dtype: str
    """`auto`, `float32`, `bfloat16` or `float16`."""
    seed: int
    """Of dummy weights."""
    backend: str
    """`auto`, `cpu` or `reference`."""
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_waiting: int
    block_size: int
    num_kv_blocks: int
    kv_cache_memory_bytes: int
    memory_utilization: float
    enable_prefix_caching: bool
    threads: int
    """CPU threads of the worker."""
    step_timeout: float
    """Seconds."""
    chat_template: str | Path
    """A Jinja file that replaces the model's own template."""
    executor: str
    """`local` runs the model in a worker process; `sim` makes up tokens."""
    sim: SimConfig
    """The cost model of the executor `sim`."""


_WORKER = {
    "load_format": "load_format",
    "dtype": "dtype",
    "seed": "seed",
    "backend": "backend",
    "max_model_len": "max_model_len",
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "block_size": "block_size",
    "num_kv_blocks": "num_blocks",
    "kv_cache_memory_bytes": "kv_cache_memory_bytes",
    "memory_utilization": "memory_utilization",
    "threads": "num_threads",
}
_ENGINE = {
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "max_num_waiting": "max_num_waiting",
    "enable_prefix_caching": "enable_prefix_caching",
    "step_timeout": "step_timeout_s",
    "executor": "executor",
    "sim": "sim",
}


def configure(model: str | None, args: Mapping[str, object]) -> tuple[ModelFiles, EngineConfig]:
    """The files of `model` and the engine that serves them.

    Raises:
        ConfigError: there is no such model or argument, or an argument has the wrong type.
    """
    unknown = sorted(args.keys() - EngineArgs.__annotations__.keys())
    if unknown:
        known = ", ".join(EngineArgs.__annotations__)
        raise ConfigError(f"LLM takes no argument {unknown[0]!r}; it takes: {known}.")
    files = resolve_model(model, load_format=str(args.get("load_format", "auto")))
    fields: dict[str, object] = {"worker": {"model": files.model, **_renamed(args, _WORKER)}}
    fields |= _renamed(args, _ENGINE)
    try:
        engine = msgspec.convert(msgspec.to_builtins(fields), EngineConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"an argument of LLM is not right: {error}.") from None
    return files, engine


def _renamed(args: Mapping[str, object], names: Mapping[str, str]) -> dict[str, object]:
    return {names[name]: args[name] for name in names if args.get(name) is not None}
