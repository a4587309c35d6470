"""Flags that several commands share, in groups, and the configuration that follows from them.

Names are those that vLLM's users know. A field's docstring is its help text.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Group, Parameter
from cyclopts.validators import Number

from pagoda.cli.sizes import convert_bytes
from pagoda.engine.config import EngineConfig
from pagoda.engine.messages import SimConfig, WorkerConfig
from pagoda.errors import ConfigError
from pagoda.models.resolve import ModelFiles, resolve_model
from pagoda.telemetry.logging import LOG_LEVEL_ENV, LogLevel, configure_logging

Count = Annotated[int, Parameter(validator=Number(gte=1))]
Share = Annotated[float, Parameter(validator=Number(gt=0, lte=1))]
Seconds = Annotated[float, Parameter(validator=Number(gte=0))]
Bytes = Annotated[int, Parameter(converter=convert_bytes, n_tokens=1)]
BaseUrl = Annotated[str, Parameter(name="--base-url")]


@Parameter(name="*", group=Group("General", sort_key=90))
@dataclass(frozen=True, kw_only=True)
class GeneralOptions:
    """What every command takes."""

    config: Path | None = None
    """A YAML file with flags of this command, one 'flag: value' a line."""
    log_level: LogLevel | None = None
    """The least important log lines to show; by default info in serve, else warning."""

    def apply(self, default_level: LogLevel = "warning") -> None:
        """Configures the log of this process and of the children that it will start."""
        level = self.log_level or default_level
        os.environ[LOG_LEVEL_ENV] = level
        configure_logging(level)


@Parameter(name="*", group=Group("Engine", sort_key=10))
@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How a model is loaded and scheduled."""

    load_format: Literal["auto", "dummy"] = "auto"
    """auto reads safetensors; dummy makes random weights in the shape of a preset (qwen3-0.6b)."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format of weights and activations; auto takes the checkpoint's."""
    backend: Literal["auto", "cpu", "reference"] = "auto"
    """cpu has native kernels, reference is plain PyTorch; auto takes cpu where it is available."""
    max_model_len: Count | None = None
    """The longest sequence, prompt and answer together; by default what the model can do."""
    max_num_seqs: Count = 256
    """The most requests that run at once."""
    max_num_batched_tokens: Count = 2048
    """The most tokens in one step."""
    max_num_waiting: Count = 4096
    """The most requests that wait; more are refused with status 429."""
    block_size: Count | None = None
    """Tokens in a block of the KV cache; by default what the backend prefers."""
    num_kv_blocks: Count | None = None
    """Blocks in the KV cache; by default what fits in memory."""
    kv_cache_memory_bytes: Bytes | None = None
    """Memory of the KV cache, such as 2GiB; by default a share of what is free."""
    memory_utilization: Share = 0.5
    """The share of free memory that the KV cache may take when nothing else is said."""
    enable_prefix_caching: bool = True
    """Keep the KV cache of earlier prompts for later ones that begin alike."""
    threads: Count | None = None
    """CPU threads of the worker; by default the cores that this process may use."""
    step_timeout: Seconds = 300.0
    """Seconds after which a step counts as stuck and its worker is started again."""
    seed: int | None = None
    """Seed of dummy weights; in generate and chat also of sampling."""

    def engine_config(self, model: str) -> EngineConfig:
        """An engine over a worker process that loads `model`, a directory or a preset's name."""
        return EngineConfig(
            worker=self._worker_config(model),
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_waiting=self.max_num_waiting,
            enable_prefix_caching=self.enable_prefix_caching,
            step_timeout_s=self.step_timeout,
        )

    def _worker_config(self, model: str) -> WorkerConfig:
        return WorkerConfig(
            model=model,
            load_format=self.load_format,
            dtype=self.dtype,
            seed=self.seed or 0,
            backend=self.backend,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            block_size=self.block_size,
            num_blocks=self.num_kv_blocks,
            kv_cache_memory_bytes=self.kv_cache_memory_bytes,
            memory_utilization=self.memory_utilization,
            num_threads=self.threads,
        )


SYNTHETIC_MODEL = "synthetic"
"""What the simulated executor serves when no name is given."""

_DEFAULT_SIM = SimConfig()
_UNUSED_BY_SIM = ("dtype", "backend", "kv_cache_memory_bytes", "memory_utilization", "threads")


@Parameter(name="*", group=Group("Simulation", sort_key=20))
@dataclass(frozen=True, kw_only=True)
class ExecutorOptions:
    """What computes the steps: worker processes, or a cost model that makes up tokens."""

    executor: Literal["local", "sim"] = "local"
    """local runs the model in a worker process; sim makes up tokens, to measure all the rest."""
    sim_base_ms: Seconds | None = None
    """Milliseconds that every simulated step takes."""
    sim_per_token_ms: Seconds | None = None
    """Milliseconds that a simulated step takes longer for each token in it."""
    sim_vocab_size: Count | None = None
    """Simulated tokens are below this."""

    def resolve(self, engine: EngineOptions, model: str | None) -> ModelFiles:
        """The files of `model`; the simulated executor needs none and makes do with a name.

        Raises:
            ConfigError: there is no such model, or a flag is given that the executor does not use.
        """
        self._check(engine)
        if self.executor == "local":
            return resolve_model(model, load_format=engine.load_format)
        name = model or SYNTHETIC_MODEL
        return ModelFiles(model=name, directory=None, served_name=name)

    def engine_config(self, engine: EngineOptions, model: str) -> EngineConfig:
        """The engine that `engine` describes, over the executor chosen here.

        Raises:
            ConfigError: a flag is given that the chosen executor does not use.
        """
        self._check(engine)
        config = engine.engine_config(model)
        if self.executor == "local":
            return config
        return EngineConfig(
            worker=config.worker,
            executor="sim",
            sim=self._sim_config(engine),
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_waiting=config.max_num_waiting,
            enable_prefix_caching=config.enable_prefix_caching,
            step_timeout_s=config.step_timeout_s,
        )

    def _check(self, engine: EngineOptions) -> None:
        if self.executor == "sim":
            for name in _UNUSED_BY_SIM:
                if getattr(engine, name) != getattr(_DEFAULT_ENGINE, name):
                    raise ConfigError(f"{_flag(name)} has no effect with --executor sim.")
            return
        for field in fields(self):
            if field.name.startswith("sim_") and getattr(self, field.name) is not None:
                raise ConfigError(f"{_flag(field.name)} needs --executor sim.")

    def _sim_config(self, engine: EngineOptions) -> SimConfig:
        return SimConfig(
            base_s=(self.sim_base_ms or 0.0) / 1000,
            per_token_s=(self.sim_per_token_ms or 0.0) / 1000,
            num_blocks=engine.num_kv_blocks or _DEFAULT_SIM.num_blocks,
            block_size=engine.block_size or _DEFAULT_SIM.block_size,
            max_model_len=engine.max_model_len or _DEFAULT_SIM.max_model_len,
            vocab_size=self.sim_vocab_size or _DEFAULT_SIM.vocab_size,
        )


@Parameter(name="*", group=Group("Sampling", sort_key=30))
@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How answers are sampled. What is left out is left to the server."""

    temperature: float | None = None
    """0 takes the most likely token."""
    top_p: float | None = None
    """Sample from the smallest set of tokens whose probabilities add up to this."""
    top_k: int | None = None
    """Sample from this many most likely tokens."""
    min_p: float | None = None
    """Leave out tokens less likely than this times the most likely one."""
    presence_penalty: float | None = None
    """Subtracted from the logits of tokens that were generated."""
    frequency_penalty: float | None = None
    """Subtracted, times its count, from the logit of a token that was generated."""
    repetition_penalty: float | None = None
    """Divides the logits of tokens in prompt or answer."""
    max_tokens: Count | None = None
    """The longest answer in tokens."""
    stop: Annotated[tuple[str, ...], Parameter(negative=(), show_default=False)] = ()
    """A string that ends the answer; may be given several times."""

    def body(self, seed: int | None) -> dict[str, object]:
        """The fields of a request's JSON body."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["stop"] = list(self.stop) or None
        values["seed"] = seed
        return {name: value for name, value in values.items() if value is not None}


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


_DEFAULT_ENGINE = EngineOptions()
