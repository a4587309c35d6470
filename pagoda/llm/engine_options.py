# SPDX-License-Identifier: Apache-2.0
"""The one table of engine options: the flags of `pagoda serve` and the arguments of `LLM` are made from it.

Names are those that vLLM's users know. A field's docstring is its flag's help text; its type says what is allowed,
and is checked when a configuration is made, wherever the values come from.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass, fields, make_dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from cyclopts import Group, Parameter
from msgspec import Meta

from pagoda.checkpoints.adapters import MAX_RANK
from pagoda.checkpoints.resolve import ModelFiles, resolve_model
from pagoda.checkpoints.topology import check_topology
from pagoda.devices import AUTO, check_backend, check_devices_of_host, with_kind
from pagoda.errors import ConfigError
from pagoda.faults.injector import plan_of
from pagoda.fleet.adapters import parse_adapters
from pagoda.fleet.policies import DEFAULT_POLICY, PolicyName
from pagoda.ipc.clock import MAX_TIMEOUT_S
from pagoda.ipc.machine import available_memory_bytes
from pagoda.kv.plugin import KVTierPlugin, tier_plugins
from pagoda.kv.publishing import find_publisher
from pagoda.llm.drafting_flags import config_of_flags
from pagoda.llm.option_fields import checked, flag_of, given_fields, require, shared
from pagoda.llm.speculative_config import read_speculative_config, speculation_of
from pagoda.messages.engine_config import (
    EngineConfig,
    HandoffConfig,
    KVTiersConfig,
    SimConfig,
)
from pagoda.messages.kv_formats import KVDtype
from pagoda.messages.sampling_params import ALL_LOGPROBS, DEFAULT_MAX_LOGPROBS
from pagoda.messages.speculation import HEAD_IF_ANY, MAX_DRAFT_TOKENS, SpeculativeConfig
from pagoda.messages.worker_config import KVHandoffConfig, Role, WorkerConfig
from pagoda.parallel.config import ParallelConfig
from pagoda.registry import EXECUTORS, registered
from pagoda.text.text_files import calibration_windows

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
QuantizationName = Literal["none", "int8", "int4", "fp8"]
GroupSize = Literal[32, 64, 128]
Count = Annotated[int, Meta(ge=1, lt=2**31)]
Bytes = Annotated[int, Meta(ge=1, le=2**63 - 1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Share = Annotated[float, Meta(gt=0, le=1)]
NotNegative = Annotated[float, Meta(ge=0)]
ShortTimeout = Annotated[float, Meta(ge=0, le=MAX_TIMEOUT_S)]
Timeout = Annotated[float, Meta(ge=1, le=MAX_TIMEOUT_S)]

_CALIBRATION = "--quantization-calibration"


class Handoff(NamedTuple):
    """The parts of an engine and of its workers in prefill/decode handoff."""

    engine: HandoffConfig
    workers: KVHandoffConfig
    stays_on_host: str = ""
    """The flags by which KV does not leave this host; empty if it does."""


TIERS = tier_plugins()
"""Plugins of KV tiers by name."""


@dataclass(frozen=True, kw_only=True)
class _NearOptions:
    """Options of the engine down to those of its tier in host memory."""

    load_format: Literal["auto", "dummy"] = "auto"
    """auto reads safetensors or a GGUF file; dummy makes random weights in the shape of a preset (qwen3-0.6b)."""
    dtype: Dtype = "auto"
    """Number format of weights and activations; auto takes the checkpoint's."""
    quantization: QuantizationName | None = "none"
    """Round dense weights as they are loaded; checkpoints that are quantized already need no flag."""
    quantization_group_size: GroupSize | None = None
    """Inputs that share a scale in int4, 32 by default; more take less memory and are less exact."""
    quantization_calibration: Annotated[str | None, Parameter(metavar="FILE")] = None
    """A text by whose inputs weights are rounded: closer to the model, but every start takes a minute or two."""
    kv_cache_dtype: KVDtype = "auto"
    """Number format of the KV cache; auto takes that of activations, int8 has a scale per token and head, and fp8,
    also fp8_e4m3, has none."""
    backend: str = "auto"
    """cpu has native kernels, reference is plain PyTorch; auto takes cpu where it is available; others are
    brought by packages."""
    batch_invariant: bool = True
    """Give a token the same bits whatever else is in its steps; --no-batch-invariant takes quicker products, which
    do not, of backends that have some."""
    max_model_len: Count | None = None
    """The longest sequence, prompt and answer together; by default what the model can do."""
    max_num_seqs: Count = 256
    """The most requests that run at once."""
    max_num_batched_tokens: Count = 2048
    """The most tokens in one step."""
    enable_chunked_prefill: bool = True
    """Prompts are computed in chunks, beside answers; to have them whole, raise --max-num-batched-tokens."""
    long_prefill_token_threshold: Annotated[int, Meta(ge=0, lt=2**31)] = 0
    """The most tokens of one prompt in a step; 0 leaves a prompt all of the step that others do not want."""
    max_num_waiting: Count = 4096
    """The most requests that wait; more are refused with status 429."""
    max_num_waiting_tokens: Count | None = None
    """The most prompt tokens of requests that wait; by default 8 KV caches full, at least 1,048,576."""
    max_logprobs: Annotated[int, Meta(ge=ALL_LOGPROBS, lt=2**31)] = DEFAULT_MAX_LOGPROBS
    """The most likely tokens that a request may ask for at each position; -1 allows the whole vocabulary."""
    block_size: Count | None = None
    """Tokens in a block of the KV cache; by default what the backend prefers."""
    num_kv_blocks: Annotated[
        Count | None, Parameter(name=["--num-kv-blocks", "--num-gpu-blocks-override"])
    ] = None
    """Blocks in the KV cache; by default what fits in memory."""
    kv_cache_memory_bytes: Annotated[Bytes | str | None, Parameter(metavar="INT")] = None
    """Memory of the KV cache, such as 2GiB; by default a share of what is free."""
    memory_utilization: Annotated[
        Share, Parameter(name=["--memory-utilization", "--gpu-memory-utilization"])
    ] = 0.5
    """The share of free memory that the KV cache may take when nothing else is said."""
    enable_prefix_caching: bool = True
    """Keep the KV cache of earlier prompts for later ones that begin alike."""
    speculative_config: Annotated[str | None, Parameter(metavar="JSON", show_default=False)] = None
    """Draft tokens, so that a step says several, such as '{"method": "ngram"}'; no answer depends on it. There are
    auto, suffix, ngram, draft_model, mtp, eagle3 and off, with vLLM's keys; the default is auto."""
    spec_type: Annotated[
        str | None, Parameter(name=["--spec-type", "--speculative-algorithm"], show_default=False)
    ] = None
    """The method of --speculative-config as llama.cpp says it (ngram-simple, draft-simple, draft-mtp, none) or
    SGLang (NGRAM, STANDALONE, EAGLE3)."""
    model_draft: Annotated[
        str | None,
        Parameter(
            name=["--model-draft", "-md", "--speculative-draft-model-path"],
            metavar="MODEL",
            show_default=False,
        ),
    ] = None
    """A smaller model of the same tokenizer, which drafts."""
    draft_max: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_DRAFT_TOKENS)] | None,
        Parameter(
            name=["--draft-max", "--spec-draft-n-max", "--speculative-num-draft-tokens"],
            show_default=False,
        ),
    ] = None
    """The most drafts of a request in a step."""
    kv_events: Annotated[str | None, Parameter(metavar="ADDRESS")] = None
    """Publish which blocks the KV cache gains and loses at tcp://HOST:PORT, for vLLM's subscribers; replays at the
    next port."""
    kv_host_bytes: Annotated[Bytes | str | None, Parameter(metavar="INT")] = None
    """Host memory that holds KV blocks for which the device has no room, such as 8GiB; of all workers together."""


def _options_of_tiers() -> type[Any]:
    """A dataclass that has the options of each plugin's tier."""
    bases = tuple(resolve_name(plugin.options) for plugin in TIERS.values())
    return make_dataclass("TierOptions", [], bases=bases, frozen=True, kw_only=True)


@Parameter(name="*", group=Group("Engine", sort_key=10))
@dataclass(frozen=True, kw_only=True)
class EngineOptions(_options_of_tiers(), _NearOptions):  # type: ignore[misc]  # which ones is known when it is made
    """Options that say how a model is loaded and scheduled."""

    kv_load_failure: Literal["recompute", "fail"] = "recompute"
    """recompute computes KV blocks that cannot be loaded; fail ends their request with an error."""
    lora: Annotated[
        tuple[str, ...], Parameter(metavar="NAME=DIR", negative=(), show_default=False)
    ] = ()
    """An adapter (LoRA, as PEFT stores it) that answers requests for the model NAME; may be repeated."""
    max_lora_rank: Annotated[int, Meta(ge=1, le=MAX_RANK)] = 64
    """The highest rank of an adapter."""
    threads: Count | None = None
    """CPU threads of the worker; by default the cores that this process may use."""
    pin_threads: bool = False
    """Keep each thread of the worker on a core of its own; for machines that run nothing else."""
    step_timeout: ShortTimeout = 300.0
    """Seconds that a step may take; after that its workers are killed and started again."""
    worker_start_timeout: ShortTimeout = 600.0
    """Seconds without progress after which workers that are starting are killed and started again."""
    worker_timeout: Timeout = 15.0
    """Seconds without a sign of life after which a worker process that was stopped is killed and started again."""
    engine_timeout: Timeout = 30.0
    """Seconds of silence after which an engine is killed and replaced; its requests go on."""
    seed: Seed | None = None
    """Seed of dummy weights; in generate, chat and bench offline also of sampling."""

    def engine_config(
        self, model: str, handoff: Handoff | None = None, *, on_this_host: bool = True
    ) -> EngineConfig:
        """An engine over a worker process that loads `model`, a directory or a preset's name.

        Places of tiers are looked at `on_this_host`; if not, by each worker on its own.

        Raises ConfigError if a value is not allowed.
        """
        options = checked(self)
        options._check_needs(Role.NONE if handoff is None else handoff.engine.role)
        tiers = KVTiersConfig(
            **shared(options, KVTiersConfig, "kv_"),
            further={
                name: resolve_name(plugin.configure)(options, model if on_this_host else None)
                for name, plugin in TIERS.items()
                if options.given_of(plugin)
            },
        )
        faults = plan_of(os.environ)
        worker = shared(options, WorkerConfig) | {
            "faults": faults,
            "kv_tiers": tiers.further,
            "kv_handoff": None if handoff is None else handoff.workers,
            "model": model,
            "num_blocks": options.num_kv_blocks,
            "num_threads": options.threads,
        }
        if options.lora:
            worker["adapters"] = parse_adapters(
                options.lora, model, options.load_format, options.max_lora_rank
            )
        if options.quantization_calibration is not None:
            files = resolve_model(model, load_format=options.load_format)
            worker["calibration_windows"] = calibration_windows(
                Path(options.quantization_calibration).expanduser(), files, _CALIBRATION
            )
        if options.kv_events is not None:
            find_publisher().check(options.kv_events, 1)
        speculation = speculation_of(options.asked_speculation(), model, options.load_format)
        worker["drafter"] = HEAD_IF_ANY if speculation.method == "auto" else speculation.drafter
        return EngineConfig(
            **shared(options, EngineConfig),
            speculation=speculation,
            worker=WorkerConfig(**worker),
            kv_tiers=tiers if tiers.host_bytes or tiers.further else None,
            handoff=None if handoff is None else handoff.engine,
            fail_on_load_failure=options.kv_load_failure == "fail",
            step_timeout_s=options.step_timeout,
            worker_start_timeout_s=options.worker_start_timeout,
            engine_timeout_s=options.engine_timeout,
            faults=faults,
            worker_timeout_s=options.worker_timeout,
        )

    def asked_speculation(self) -> SpeculativeConfig:
        """The speculation that the flags ask for. Raises ConfigError: there is none such."""
        text = config_of_flags(
            self.spec_type, self.model_draft, self.draft_max, self.speculative_config
        )
        return read_speculative_config(text)

    def given_of(self, *plugins: KVTierPlugin) -> list[str]:
        """The names of those options of tiers that have another value than the default."""
        names = [name for plugin in plugins for name in plugin.option_names()]
        return [name for name in given_fields(self) if name in names]

    def _check_needs(self, role: Role) -> None:
        if not self.enable_chunked_prefill:
            raise ConfigError(
                "--no-enable-chunked-prefill is not there: prompts are computed in chunks, which changes no bit; "
                "--max-num-batched-tokens of --max-model-len or more computes each in one step."
            )
        has_cache, of_tiers = self.enable_prefix_caching, self.given_of(*TIERS.values())
        sources = [
            "--kv-host-bytes",
            *(flag_of(plugin.option_names()[0]) for plugin in TIERS.values()),
        ]
        has_source = bool(of_tiers) or self.kv_host_bytes is not None or role.fetches_kv
        cache = "the prefix cache; leave --enable-prefix-caching on"
        require(
            self,
            ("quantization_group_size", "--quantization int4", self.quantization == "int4"),
            (
                "quantization_calibration",
                "--quantization int8 or int4",
                self.quantization in ("int8", "int4"),
            ),
            (
                "kv_load_failure",
                f"{', '.join(sources)}, or --role decode or both",
                has_source,
            ),
            *((name, cache, has_cache) for name in ("kv_events", *of_tiers, "kv_host_bytes")),
        )
        if role is not Role.NONE and not has_cache:
            raise ConfigError(f"--role {role.value} needs {cache}.")
        if role is not Role.NONE:
            self.check_calibrates_alone(f"--role {role.value}")

    def check_calibrates_alone(self, other: str) -> None:
        """Refuses a calibration where several workers would each make weights of their own.

        `other` is the flag that asks for several. Raises ConfigError if there is a calibration.
        """
        if self.quantization_calibration is not None:
            file_format = "w8a8" if self.quantization == "int8" else "w4a16"
            raise ConfigError(
                f"{_CALIBRATION} does not go with {other}, as it rounds for one worker; round once with "
                f"pagoda quantize MODEL OUT --format {file_format} {_CALIBRATION} "
                f"{self.quantization_calibration}, and serve OUT."
            )


@Parameter(name="*", group=Group("Parallelism", sort_key=15))
@dataclass(frozen=True, kw_only=True)
class ParallelOptions:
    """Options that spread a model over devices."""

    data_parallel_size: Annotated[Count, Parameter(name=["--data-parallel-size", "--dp"])] = 1
    """Replicas of the model, each with an engine and a KV cache of its own; requests are shared out."""
    data_parallel_policy: PolicyName = DEFAULT_POLICY
    """Policy that chooses a replica for each request: the soonest first token, with cached prompts considered; the
    fewest tokens to compute; the better of two at random; the replica of the session; each in turn."""
    tensor_parallel_size: Annotated[Count, Parameter(name=["--tensor-parallel-size", "--tp"])] = 1
    """Devices that share every layer of a replica; answers are close to those of one, not always the same bits."""
    pipeline_parallel_size: Annotated[
        Count, Parameter(name=["--pipeline-parallel-size", "--pp"])
    ] = 1
    """Stages of a replica, each with some of its layers."""
    context_parallel_size: Annotated[
        Count,
        Parameter(name=["--context-parallel-size", "--cp", "--decode-context-parallel-size"]),
    ] = 1
    """Devices that share the KV cache of a replica: each holds every so many-th 4096 tokens of a request."""
    devices: Annotated[str | tuple[str, ...] | None, Parameter(metavar="LIST", negative=())] = None
    """Devices of the ranks, such as cpu:0,cpu:1, which are equal parts of the cores, or 0,1 of the backend's kind;
    by default the first ones. npu:0+npu:1 are two of one rank, where its backend drives several."""
    enable_expert_parallel: bool = False
    """Share out the experts of a mixture-of-experts model whole, instead of a part of each, among tensor ranks."""
    enable_dp_attention: bool = False
    """Give each tensor rank requests of its own, whose KV it alone holds and attends to, instead of heads of all;
    MLPs and experts stay shared. For models of few KV heads, or latents, which every rank would hold else."""

    def config(self, backend: str = AUTO) -> ParallelConfig:
        """Raises ConfigError if a value is not allowed or the devices do not fit the sizes or the backend."""
        options = checked(self)
        given = options.devices or ()
        devices = tuple(given.split(",")) if isinstance(given, str) else given
        return ParallelConfig(
            **shared(options, ParallelConfig) | {"devices": with_kind(devices, backend)},
            expert_parallel=options.enable_expert_parallel,
            dp_attention=options.enable_dp_attention,
        )

    def check_prompts_at_once(self, count: int) -> None:
        """Refuses replicas that would have nothing to do, before anything starts.

        Raises ConfigError if there is one prompt for several replicas.
        """
        if count == 1 and self.data_parallel_size > 1:
            raise ConfigError(
                f"--data-parallel-size {self.data_parallel_size} is of no use for one prompt at a time, which one "
                "replica answers while the others wait; leave it at 1."
            )


SYNTHETIC_MODEL = "synthetic"
"""Model name of the simulated executor when none is given."""

_SIM_LIMITS = {"max_num_seqs": 2**16, "num_kv_blocks": 2**24}
"""The engine keeps a record of each, and no worker's memory bounds them."""
_UNUSED = {
    "local": (),
    "sim": (
        *("dtype", "quantization", "quantization_group_size", "quantization_calibration"),
        *("kv_cache_dtype", "backend", "batch_invariant", "lora", "max_lora_rank"),
        *("kv_cache_memory_bytes", "memory_utilization", "threads", "pin_threads"),
        *("kv_host_bytes", "tensor_parallel_size", "context_parallel_size", "devices"),
        *(name for plugin in TIERS.values() for name in plugin.option_names()),
    ),
}
"""Flags that change nothing, by executor."""
_UNUSED_ELSEWHERE = ("pin_threads", "devices")
"""The same for executors of plugins, such as Ray, which choose the cores of a rank, and count them only."""


@Parameter(name="*", group=Group("Executor", sort_key=20))
@dataclass(frozen=True, kw_only=True)
class ExecutorOptions:
    """Options of the executor: worker processes, or a cost model that makes up tokens."""

    executor: Annotated[str, Parameter(metavar="NAME")] = "local"
    """local runs the model in worker processes on this host, ray on the nodes of a Ray cluster; sim makes up
    tokens, to measure all the rest. Packages bring others."""
    ray_address: str | None = None
    """host:port of the Ray cluster; by default RAY_ADDRESS, or the cluster that this host has joined."""
    sim_base_ms: NotNegative | None = None
    """Milliseconds that every simulated step takes."""
    sim_per_token_ms: NotNegative | None = None
    """Milliseconds that a simulated step takes longer for each token in it."""
    sim_vocab_size: Count | None = None
    """Simulated tokens are below this."""

    def resolve(
        self,
        engine: EngineOptions,
        model: str | None,
        parallel: ParallelOptions = ParallelOptions(),
    ) -> ModelFiles:
        """The files of `model`; the simulated executor needs none and makes do with a name.

        Raises ConfigError if there is no such model, or a flag is given that the executor does not use.
        """
        self._check(engine, parallel)
        if self.executor != "sim":
            return resolve_model(model, load_format=engine.load_format)
        name = model or SYNTHETIC_MODEL
        return ModelFiles(model=name, directory=None, served_name=name)

    def engine_config(
        self,
        engine: EngineOptions,
        model: str,
        parallel: ParallelOptions = ParallelOptions(),
        handoff: Handoff | None = None,
    ) -> EngineConfig:
        """The engine that `engine` describes, over the executor chosen here, for each of the replicas.

        Raises ConfigError if a value is not allowed, a flag is given that the executor does not use, or the model
        cannot be split as `parallel` says.
        """
        self._check(engine, parallel)
        topology = parallel.config(engine.backend)
        config = engine.engine_config(model, handoff, on_this_host=self.executor in _UNUSED)
        if config.kv_events is not None:
            find_publisher().check(config.kv_events, topology.data_parallel_size)
        # Each worker has its part of the memory that is given for all.
        share = -(-config.worker.kv_host_bytes // topology.num_ranks)
        worker = msgspec.structs.replace(config.worker, parallel=topology, kv_host_bytes=share)
        config = msgspec.structs.replace(config, executor=self.executor, worker=worker)
        if self.executor == "sim":
            return msgspec.structs.replace(config, sim=self._sim_config(engine))
        check_backend(worker.backend, topology.devices, topology.replica_size)
        check_topology(model, engine.load_format, topology)
        if self.executor == "local":
            return msgspec.structs.replace(config, worker=_on_this_host(worker))
        if handoff is not None and handoff.stays_on_host:
            raise ConfigError(
                f"{handoff.stays_on_host} does not go with --executor {self.executor}, whose workers may be on "
                "other hosts; name tcp too."
            )
        return msgspec.structs.replace(config, ray_address=self.ray_address)

    def _check(self, engine: EngineOptions, parallel: ParallelOptions) -> None:
        if self.executor != "local" and self.executor not in (others := registered(EXECUTORS)):
            known = ", ".join(sorted({"local", *others}))
            raise ConfigError(f"--executor must be one of {known}, got {self.executor!r}.")
        checked(self)
        checked(engine)
        speculation = engine.asked_speculation()
        if parallel.config(engine.backend).num_ranks > 1 or parallel.data_parallel_size > 1:
            engine.check_calibrates_alone("several devices or replicas")
        for name in (*given_fields(engine), *given_fields(parallel)):
            if name in _UNUSED.get(self.executor, _UNUSED_ELSEWHERE):
                raise ConfigError(f"{flag_of(name)} has no effect with --executor {self.executor}.")
        for name, executor in (
            ("ray_address", "ray"),
            *((field.name, "sim") for field in fields(self) if field.name.startswith("sim_")),
        ):
            require(self, (name, f"--executor {executor}", self.executor == executor))
        if self.executor == "sim":
            if speculation.drafter is not None:
                raise ConfigError(
                    f"--speculative-config: {speculation.method} has no effect with --executor sim, which loads "
                    "no weights; choose suffix or ngram."
                )
            for name, limit in _SIM_LIMITS.items():
                if (getattr(engine, name) or 0) > limit:
                    raise ConfigError(f"{flag_of(name)} is at most {limit} with --executor sim.")
        if self.executor == "ray" and importlib.util.find_spec("ray") is None:
            raise ConfigError("--executor ray needs Ray: pip install 'pagoda-llm[ray]'.")

    def _sim_config(self, engine: EngineOptions) -> SimConfig:
        sizes = shared(engine, SimConfig) | shared(self, SimConfig, "sim_")
        if engine.num_kv_blocks is not None:
            sizes["num_blocks"] = engine.num_kv_blocks
        return SimConfig(
            base_s=(self.sim_base_ms or 0.0) / 1000,
            per_token_s=(self.sim_per_token_ms or 0.0) / 1000,
            **sizes,
        )


def _on_this_host(worker: WorkerConfig) -> WorkerConfig:
    """One worker of a topology whose ranks all share this host.

    Raises ConfigError if this host lacks a device that is named.
    """
    num_ranks = worker.parallel.num_ranks
    check_devices_of_host(worker.parallel.devices, num_ranks, worker.num_threads)
    if num_ranks == 1:
        return worker
    return msgspec.structs.replace(
        worker, workers_on_host=num_ranks, host_memory_bytes=available_memory_bytes()
    )
