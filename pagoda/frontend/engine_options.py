"""The one table of engine options: the flags of `pagoda serve` and the arguments of `LLM` are made from it.

Names are those that vLLM's users know. A field's docstring is its flag's help text; its type says what is allowed,
and is checked when a configuration is made, wherever the values come from.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Literal, TypeVar, get_args, get_type_hints

import msgspec
from cyclopts import Group, Parameter
from msgspec import Meta

from pagoda.checkpoints.resolve import ModelFiles, resolve_model
from pagoda.checkpoints.topology import check_topology
from pagoda.devices import BackendName, check_devices, device_number
from pagoda.engine.config import (
    EngineConfig,
    HandoffConfig,
    KVEventsConfig,
    KVTiersConfig,
    SimConfig,
)
from pagoda.errors import ConfigError
from pagoda.frontend.handoff_options import Handoff
from pagoda.frontend.kv_directory import check_kv_directory
from pagoda.frontend.policies import DEFAULT_POLICY, PolicyName
from pagoda.frontend.sizes import parse_bytes
from pagoda.ipc.machine import available_memory_bytes
from pagoda.messages.worker_config import WorkerConfig
from pagoda.parallel.config import ParallelConfig, num_cpu_devices

Count = Annotated[int, Meta(ge=1, lt=2**31)]
Bytes = Annotated[int, Meta(ge=1, le=2**63 - 1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Share = Annotated[float, Meta(gt=0, le=1)]
NotNegative = Annotated[float, Meta(ge=0)]
AtLeastOne = Annotated[float, Meta(ge=1)]

T = TypeVar("T", "EngineOptions", "ExecutorOptions", "ParallelOptions")


@Parameter(name="*", group=Group("Engine", sort_key=10))
@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options that say how a model is loaded and scheduled."""

    load_format: Literal["auto", "dummy"] = "auto"
    """auto reads safetensors or a GGUF file; dummy makes random weights in the shape of a preset (qwen3-0.6b)."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format of weights and activations; auto takes the checkpoint's."""
    quantization: Literal["none", "int8", "int4"] | None = "none"
    """Round dense weights as they are loaded; checkpoints that are quantized already need no flag."""
    quantization_group_size: Literal[32, 64, 128] | None = None
    """Inputs that share a scale in int4, 32 by default; more take less memory and are less exact."""
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "float16", "int8"] = "auto"
    """Number format of the KV cache; auto takes that of activations, int8 has a scale per token and head."""
    backend: BackendName = "auto"
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
    kv_events: Annotated[str | None, Parameter(metavar="ADDRESS")] = None
    """Publish which blocks the KV cache gains and loses at tcp://HOST:PORT, for vLLM's subscribers; replays at the
    next port."""
    kv_host_bytes: Annotated[Bytes | str | None, Parameter(metavar="INT")] = None
    """Host memory that holds KV blocks for which the device has no room, such as 8GiB; of all workers together."""
    kv_disk_path: Annotated[str | None, Parameter(metavar="DIR")] = None
    """A directory on SSD that holds KV blocks, also from one start to the next; may be shared by servers."""
    kv_disk_bytes: Annotated[Bytes | str | None, Parameter(metavar="INT")] = None
    """The most that all KV blocks in that directory may take, such as 100GiB."""
    kv_disk_min_touches: Count = 2
    """A KV block is written to disk once this many requests have passed through it."""
    kv_load_failure: Literal["recompute", "fail"] = "recompute"
    """recompute computes KV blocks that cannot be loaded; fail ends their request with an error."""
    threads: Count | None = None
    """CPU threads of the worker; by default the cores that this process may use."""
    pin_threads: bool = False
    """Keep each thread of the worker on a core of its own; for machines that run nothing else."""
    step_timeout: NotNegative = 300.0
    """Seconds that a step may take; after that its workers are killed and started again."""
    worker_start_timeout: NotNegative = 600.0
    """Seconds without progress after which workers that are starting are killed and started again."""
    engine_timeout: AtLeastOne = 30.0
    """Seconds of silence after which an engine that has work is killed and replaced; its requests go on."""
    seed: Seed | None = None
    """Seed of dummy weights; in generate and chat also of sampling."""

    def engine_config(self, model: str, handoff: Handoff | None = None) -> EngineConfig:
        """An engine over a worker process that loads `model`, a directory or a preset's name.

        Raises:
            ConfigError: a value is not allowed.
        """
        options = _checked(self)
        if options.quantization_group_size is not None and options.quantization != "int4":
            raise ConfigError("--quantization-group-size needs --quantization int4.")
        address = options.kv_events
        if address is not None and not options.enable_prefix_caching:
            raise ConfigError(
                "--kv-events needs the prefix cache; leave --enable-prefix-caching on."
            )
        tiers = options._kv_tiers(model, fetches=handoff is not None)
        worker = options._worker_config(model, tiers)
        if handoff is not None:
            options._check_handoff(handoff.engine)
            worker = msgspec.structs.replace(worker, kv_handoff=handoff.workers)
        return EngineConfig(
            worker=worker,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_num_waiting=options.max_num_waiting,
            enable_prefix_caching=options.enable_prefix_caching,
            kv_events=None if address is None else KVEventsConfig.parse(address),
            kv_tiers=tiers,
            handoff=None if handoff is None else handoff.engine,
            fail_on_load_failure=options.kv_load_failure == "fail",
            step_timeout_s=options.step_timeout,
            worker_start_timeout_s=options.worker_start_timeout,
            engine_timeout_s=options.engine_timeout,
        )

    def _check_handoff(self, config: HandoffConfig) -> None:
        """
        Raises:
            ConfigError: a value does not go together with the role.
        """
        if not self.enable_prefix_caching:
            raise ConfigError(
                f"--role {config.role.value} needs the prefix cache; leave --enable-prefix-caching on."
            )
        fails = self.kv_load_failure == "fail"
        if fails and not config.role.fetches_kv and self.kv_host_bytes is self.kv_disk_path is None:
            raise ConfigError(
                "--kv-load-failure needs --kv-host-bytes, --kv-disk-path, or --role decode or both."
            )

    def _worker_config(self, model: str, tiers: KVTiersConfig | None) -> WorkerConfig:
        return WorkerConfig(
            model=model,
            load_format=self.load_format,
            dtype=self.dtype,
            quantization=self.quantization or "none",
            quantization_group_size=self.quantization_group_size or 32,
            kv_cache_dtype=self.kv_cache_dtype,
            seed=self.seed or 0,
            backend=self.backend,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            block_size=self.block_size,
            num_blocks=self.num_kv_blocks,
            kv_cache_memory_bytes=self._bytes("kv_cache_memory_bytes"),
            memory_utilization=self.memory_utilization,
            num_threads=self.threads,
            pin_threads=self.pin_threads,
            kv_host_bytes=tiers.host_bytes if tiers else 0,
            kv_disk_path=tiers.disk_path if tiers else None,
        )

    def _kv_tiers(self, model: str, *, fetches: bool) -> KVTiersConfig | None:
        has_disk = self.kv_disk_path is not None
        if has_disk != (self.kv_disk_bytes is not None):
            raise ConfigError(
                "--kv-disk-path needs --kv-disk-bytes, such as 100GiB."
                if has_disk
                else "--kv-disk-bytes needs --kv-disk-path."
            )
        if self.kv_disk_min_touches != _DEFAULT_ENGINE.kv_disk_min_touches and not has_disk:
            raise ConfigError("--kv-disk-min-touches needs --kv-disk-path.")
        if self.kv_host_bytes is None and not has_disk:
            if self.kv_load_failure != _DEFAULT_ENGINE.kv_load_failure and not fetches:
                raise ConfigError(
                    "--kv-load-failure needs --kv-host-bytes, --kv-disk-path, or --role decode or both."
                )
            return None
        if not self.enable_prefix_caching:
            flag = "--kv-disk-path" if has_disk else "--kv-host-bytes"
            raise ConfigError(f"{flag} needs the prefix cache; leave --enable-prefix-caching on.")
        path, disk_bytes = self.kv_disk_path, self._bytes("kv_disk_bytes") or 0
        return KVTiersConfig(
            host_bytes=self._bytes("kv_host_bytes") or 0,
            disk_path=None if path is None else check_kv_directory(path, disk_bytes, model),
            disk_bytes=disk_bytes,
            disk_min_touches=self.kv_disk_min_touches,
        )

    def _bytes(self, name: str) -> int | None:
        given: int | str | None = getattr(self, name)
        if not isinstance(given, str):
            return given
        try:
            return parse_bytes(given)
        except ValueError as error:
            raise ConfigError(f"{_flag(name)} {error}, got {given!r}.") from None


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
    """Devices that share every layer of a replica."""
    pipeline_parallel_size: Annotated[
        Count, Parameter(name=["--pipeline-parallel-size", "--pp"])
    ] = 1
    """Stages of a replica, each with some of its layers."""
    devices: Annotated[str | tuple[str, ...] | None, Parameter(metavar="LIST", negative=())] = None
    """Devices of the ranks, such as cpu:0,cpu:1, which are equal parts of the cores; by default the first ones."""
    enable_expert_parallel: bool = False
    """Share out the experts of a mixture-of-experts model whole, instead of a part of each, among tensor ranks."""

    def config(self) -> ParallelConfig:
        """
        Raises:
            ConfigError: a value is not allowed, or the devices do not fit the sizes.
        """
        options = _checked(self)
        given = options.devices or ()
        config = ParallelConfig(
            data_parallel_size=options.data_parallel_size,
            tensor_parallel_size=options.tensor_parallel_size,
            pipeline_parallel_size=options.pipeline_parallel_size,
            devices=tuple(given.split(",")) if isinstance(given, str) else given,
            expert_parallel=options.enable_expert_parallel,
        )
        check_devices(config.devices)
        return config

    def check_prompts_at_once(self, count: int) -> None:
        """Refuses replicas that would have nothing to do, before anything starts.

        Raises:
            ConfigError: there is one prompt for several replicas.
        """
        if count == 1 and self.data_parallel_size > 1:
            raise ConfigError(
                f"--data-parallel-size {self.data_parallel_size} is of no use for one prompt at a time, which one "
                "replica answers while the others wait; leave it at 1."
            )


SYNTHETIC_MODEL = "synthetic"
"""Model name of the simulated executor when none is given."""

_DEFAULT_ENGINE = EngineOptions()
_DEFAULT_PARALLEL = ParallelOptions()
_DEFAULT_SIM = SimConfig()
_SIM_LIMITS = {"max_num_seqs": 2**16, "num_kv_blocks": 2**24}
"""The engine keeps a record of each, and no worker's memory bounds them."""
_UNUSED_BY_SIM = (
    "dtype",
    "quantization",
    "quantization_group_size",
    "kv_cache_dtype",
    "backend",
    "kv_cache_memory_bytes",
    "memory_utilization",
    "kv_host_bytes",
    "kv_disk_path",
    "kv_disk_bytes",
    "kv_disk_min_touches",
    "threads",
    "pin_threads",
)


_PARALLEL_UNUSED_BY_SIM = ("tensor_parallel_size", "devices")
_UNUSED_BY_RAY = ("pin_threads",)
_PARALLEL_UNUSED_BY_RAY = ("devices",)
"""Ray chooses the cores of a rank, and counts them only."""


@Parameter(name="*", group=Group("Executor", sort_key=20))
@dataclass(frozen=True, kw_only=True)
class ExecutorOptions:
    """Options of the executor: worker processes, or a cost model that makes up tokens."""

    executor: Literal["local", "ray", "sim"] = "local"
    """local runs the model in worker processes on this host, ray on the nodes of a Ray cluster; sim makes up
    tokens, to measure all the rest."""
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
        parallel: ParallelOptions = _DEFAULT_PARALLEL,
    ) -> ModelFiles:
        """The files of `model`; the simulated executor needs none and makes do with a name.

        Raises:
            ConfigError: there is no such model, or a flag is given that the executor does not use.
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
        parallel: ParallelOptions = _DEFAULT_PARALLEL,
        handoff: Handoff | None = None,
    ) -> EngineConfig:
        """The engine that `engine` describes, over the executor chosen here, for each of the replicas.

        Raises:
            ConfigError: a value is not allowed, or a flag is given that the chosen executor does not use, or the
                model cannot be split as `parallel` says.
        """
        self._check(engine, parallel)
        config = engine.engine_config(model, handoff)
        topology = parallel.config()
        if config.kv_events is not None:
            config.kv_events.check_ports(topology.data_parallel_size)
        worker = _one_of_many(config.worker, topology)
        if self.executor == "local":
            check_topology(model, engine.load_format, topology)
            return msgspec.structs.replace(config, worker=_shared_host(worker, topology))
        if self.executor == "ray":
            check_topology(model, engine.load_format, topology)
            if handoff is not None and handoff.workers.transports == ("shm",):
                raise ConfigError(
                    "--kv-transports shm does not go with --executor ray, whose workers may be on other hosts; "
                    "name tcp too."
                )
            return msgspec.structs.replace(
                config, executor="ray", ray_address=self.ray_address, worker=worker
            )
        return msgspec.structs.replace(
            config, executor="sim", sim=self._sim_config(engine), worker=worker
        )

    def _check(self, engine: EngineOptions, parallel: ParallelOptions) -> None:
        _checked(self)
        _checked(engine)
        parallel.config()
        if self.ray_address is not None and self.executor != "ray":
            raise ConfigError("--ray-address needs --executor ray.")
        if self.executor == "sim":
            for name, limit in _SIM_LIMITS.items():
                if (getattr(engine, name) or 0) > limit:
                    raise ConfigError(f"{_flag(name)} is at most {limit} with --executor sim.")
            _refuse_unused(engine, _DEFAULT_ENGINE, _UNUSED_BY_SIM, "sim")
            _refuse_unused(parallel, _DEFAULT_PARALLEL, _PARALLEL_UNUSED_BY_SIM, "sim")
            return
        if self.executor == "ray":
            _refuse_unused(engine, _DEFAULT_ENGINE, _UNUSED_BY_RAY, "ray")
            _refuse_unused(parallel, _DEFAULT_PARALLEL, _PARALLEL_UNUSED_BY_RAY, "ray")
            if engine.kv_disk_path is not None:
                raise ConfigError(
                    "--kv-disk-path does not go with --executor ray, whose workers may be on hosts where the "
                    "engine does not see their directories."
                )
            if importlib.util.find_spec("ray") is None:
                raise ConfigError("--executor ray needs Ray: pip install 'pagoda-llm[ray]'.")
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


def _refuse_unused(given: T, default: T, names: Sequence[str], executor: str) -> None:
    for name in names:
        if getattr(given, name) != getattr(default, name):
            raise ConfigError(f"{_flag(name)} has no effect with --executor {executor}.")


def _one_of_many(worker: WorkerConfig, parallel: ParallelConfig) -> WorkerConfig:
    """One worker of a topology, with its part of the memory that is given for all."""
    share = -(-worker.kv_host_bytes // parallel.num_ranks)
    return msgspec.structs.replace(worker, parallel=parallel, kv_host_bytes=share)


def _shared_host(worker: WorkerConfig, parallel: ParallelConfig) -> WorkerConfig:
    """One worker of a topology whose ranks all share this host.

    Raises:
        ConfigError: a device is named that this host does not have.
    """
    cores = len(os.sched_getaffinity(0))
    count = num_cpu_devices(cores, parallel.num_ranks, worker.num_threads)
    for device in parallel.devices:
        if device_number(device) >= count:
            known = "cpu:0" if count == 1 else f"cpu:0 to cpu:{count - 1}"
            raise ConfigError(
                f"--devices names {device}, but the {cores} cores of this host are {known} with "
                f"{parallel.num_ranks} workers"
                + (f" of {worker.num_threads} threads." if worker.num_threads else ".")
            )
    if parallel.num_ranks == 1:
        return worker
    return msgspec.structs.replace(
        worker,
        workers_on_host=parallel.num_ranks,
        host_memory_bytes=available_memory_bytes(),
    )


def _checked(options: T) -> T:
    """The same options, with every value of the type that its field says."""
    kind = type(options)
    given = {field.name: getattr(options, field.name) for field in fields(options)}
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        rule, _, place = str(error).replace("`", "").partition(" - at $.")
        rule = rule.removeprefix("Expected ").partition(", got ")[0].replace(" | null", "")
        if rule.startswith("Invalid enum value"):
            rule = f"one of {', '.join(_choices(get_type_hints(kind)[place]))}"
        raise ConfigError(f"{_flag(place)} must be {rule}, got {given[place]!r}.") from None


def _choices(hint: object) -> list[str]:
    """The values of a Literal, which may stand beside None."""
    return [
        choice
        for value in get_args(hint)
        for choice in (_choices(value) if get_args(value) else [str(value)])
        if value is not type(None)
    ]


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
