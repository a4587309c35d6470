# SPDX-License-Identifier: Apache-2.0
"""The configuration that a worker process receives at its start."""

from __future__ import annotations

import enum

import msgspec

from pagoda.faults.injector import FaultPlan
from pagoda.messages.adapters import Adapter
from pagoda.messages.segments import SEGMENT
from pagoda.messages.speculation import DrafterConfig
from pagoda.parallel.config import ParallelConfig, RankPlace
from pagoda.parallel.segments import SegmentShares
from pagoda.telemetry.tracer import TraceSession


class Role(enum.StrEnum):
    """Part that an engine has in requests that two engines share."""

    NONE = "none"
    PREFILL = "prefill"
    """The engine computes prompts and holds their KV for others."""
    DECODE = "decode"
    """The engine fetches KV of prompts and goes on from there; it computes what it cannot fetch."""
    BOTH = "both"
    STANDBY = "standby"
    """The engine finishes what it has, and gets new requests only where no other takes any."""

    @property
    def alternatives(self) -> tuple[Role, ...]:
        """The roles that an engine can take which was started for this one."""
        able = (Role.PREFILL, Role.DECODE, Role.BOTH) if self is Role.BOTH else (self,)
        return (*able, Role.STANDBY)

    @property
    def holds_kv(self) -> bool:
        return self in (Role.PREFILL, Role.BOTH)

    @property
    def fetches_kv(self) -> bool:
        return self in (Role.DECODE, Role.BOTH)


class CurveKeys(msgspec.Struct, frozen=True):
    """Keys of sockets between hosts (CurveZMQ), in Z85: one pair of all that bind, one of all that connect."""

    server_key: str
    public_key: str
    secret_key: str
    server_secret_key: str


class KVHandoffConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's part in prefill/decode handoff."""

    role: Role
    transports: tuple[str, ...]
    """Names of transports, the best first."""
    host: str
    """The address at which workers of other engines reach this host, where `WorkerConfig.bind_host` says none."""
    secret: bytes
    """Shared by all that may reach each other's KV; both sides of a connection prove that they know it."""
    encrypts: bool = False
    """True if KV is encrypted between hosts. The proof of the secret always is."""


class KVTierConfig(msgspec.Struct, frozen=True):
    """A tier of a plugin, for blocks that outlive the workers."""

    path: str
    """The place, such as a directory; may be shared by replicas, and by servers of other models."""
    num_bytes: int
    """The most that all blocks there may take, whoever wrote them."""
    settings: dict[str, int | str] = {}
    """Further options, which the plugin reads."""


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Options of one worker. None takes the model's, the backend's or the host's own value, or switches off."""

    model: str
    """A model directory or GGUF file, or the name of a shape preset when `load_format` is `dummy`."""
    load_format: str = "auto"
    """`auto` reads safetensors; `dummy` makes random weights."""
    dtype: str = "auto"
    """`auto` takes the checkpoint's; else `float32`, `bfloat16`, `float16`."""
    quantization: str = "none"
    """Format to which dense weights are quantized as they are loaded: `none`, `int8`, `int4` or `fp8`."""
    quantization_group_size: int = 32
    """Inputs that share a scale in `int4`: 32, 64 or 128."""
    calibration_windows: list[list[int]] = []
    """Token ids of a text's windows by whose inputs weights are rounded; none rounds each to the nearest."""
    dequantizes: bool = False
    """Quantized weights of the checkpoint become plain numbers in `dtype`, with which no inputs are rounded."""
    kv_cache_dtype: str = "auto"
    """`auto` takes that of activations; else `float32`, `bfloat16`, `float16`, `int8`, `fp8`."""
    seed: int = 0
    backend: str = "auto"
    """`cpu` has native kernels, `reference` is plain PyTorch; `auto` takes `cpu` where it is available."""
    batch_invariant: bool = True
    """False lets the backend take quicker products, by which a token's bits depend on the rest of its steps."""
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    block_size: int | None = None
    num_blocks: int | None = None
    """None sizes the KV cache from `kv_cache_memory_bytes`, or else takes `memory_utilization` of free memory."""
    kept_blocks: int | None = None
    """Size of the KV cache of the worker that this one replaces, which it takes whatever is free."""
    kv_cache_memory_bytes: int | None = None
    memory_utilization: float = 0.5
    num_threads: int | None = None
    pin_threads: bool = False
    parallel: ParallelConfig = ParallelConfig()
    place: RankPlace = RankPlace()
    workers_on_host: int = 1
    """Workers that share this host's cores and memory, this one among them."""
    host_memory_bytes: int | None = None
    """Bytes that were free on the host before any worker started."""
    curve: CurveKeys | None = None
    """Keys of all sockets, where these are on TCP."""
    bind_host: str = ""
    """Address of this host for its peers; empty when all are on one host."""
    drafter: DrafterConfig | None = None
    kv_host_bytes: int = 0
    """Host memory of this worker for blocks that leave the device."""
    kv_tiers: dict[str, KVTierConfig] = {}
    """Tiers of plugins by name."""
    kv_handoff: KVHandoffConfig | None = None
    segment_tokens: int = SEGMENT
    """Tokens of a segment of attention, the same on all workers. Only tests have other ones."""
    adapters: tuple[Adapter, ...] = ()
    loads_adapters: bool = False
    """Adapters may be loaded while the worker runs."""
    max_lora_rank: int = 64
    trace: TraceSession | None = None
    faults: FaultPlan | None = None
    """Faults that a test injects."""

    @property
    def segment_shares(self) -> SegmentShares:
        """The segments of a context that each context-parallel rank has."""
        return SegmentShares(self.parallel.context_parallel_size, self.segment_tokens)

    @property
    def replicas_on_host(self) -> int:
        """Replicas that may have ranks on this host, and share what each host has one of."""
        ranks = min(self.parallel.replica_size, self.workers_on_host)
        return min(self.parallel.data_parallel_size, -(-self.workers_on_host // ranks))

    @property
    def has_adapters(self) -> bool:
        return self.loads_adapters or len(self.adapters) > 0

    @property
    def has_transfer_link(self) -> bool:
        """True if the worker opens a second connection, for transfers."""
        return self.kv_host_bytes > 0 or bool(self.kv_tiers) or self.kv_handoff is not None
