"""The configuration that a worker process receives at its start."""

from __future__ import annotations

import enum

import msgspec

from pagoda.parallel.config import ParallelConfig, RankPlace
from pagoda.telemetry.tracer import TraceSession


class Role(enum.StrEnum):
    """Part that an engine has in requests that two engines share."""

    NONE = "none"
    """The engine shares no requests."""
    PREFILL = "prefill"
    """The engine computes prompts and holds their KV for others."""
    DECODE = "decode"
    """The engine fetches KV of prompts and goes on from there; it computes what it cannot fetch."""
    BOTH = "both"

    @property
    def holds_kv(self) -> bool:
        return self in (Role.PREFILL, Role.BOTH)

    @property
    def fetches_kv(self) -> bool:
        return self in (Role.DECODE, Role.BOTH)


class CurveKeys(msgspec.Struct, frozen=True):
    """Keys with which a worker on another host talks to its engine and its peers (CurveZMQ), in Z85.

    One pair is of all that bind sockets, one of all that connect to them: the engine and the workers of one start.
    """

    server_key: str
    """Public, of whoever binds a socket."""
    public_key: str
    """Public key of the connecting side."""
    secret_key: str
    """Belongs to `public_key`."""
    server_secret_key: str
    """Belongs to `server_key`: workers bind sockets for their peers."""


class KVHandoffConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's part in prefill/decode handoff."""

    role: Role
    transports: tuple[str, ...]
    """Names of the transports that may be used (`pagoda.pd.transport`), the best first."""
    host: str
    """The address at which workers of other engines reach this host, where `WorkerConfig.bind_host` says none."""
    secret: bytes
    """Shared by all that may reach each other's KV; both sides of a connection prove that they know it."""
    encrypts: bool = False
    """True if KV is encrypted between hosts. The proof of the secret always is."""


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All that a worker process is told at its start."""

    model: str
    """A model directory or GGUF file, or the name of a shape preset when `load_format` is `dummy`."""
    load_format: str = "auto"
    """`auto` reads safetensors; `dummy` makes random weights."""
    dtype: str = "auto"
    """`auto` takes the checkpoint's; else `float32`, `bfloat16`, `float16`."""
    quantization: str = "none"
    """Format to which dense weights are quantized as they are loaded: `none`, `int8` or `int4`."""
    quantization_group_size: int = 32
    """Inputs that share a scale in `int4`: 32, 64 or 128."""
    kv_cache_dtype: str = "auto"
    """`auto` takes that of activations; else `float32`, `bfloat16`, `float16`, `int8`."""
    seed: int = 0
    """Seed of dummy weights."""
    backend: str = "auto"
    """`cpu` has native kernels, `reference` is plain PyTorch; `auto` takes `cpu` where it is available."""
    max_model_len: int | None = None
    """None takes the model's own."""
    max_num_seqs: int = 256
    block_size: int | None = None
    """None takes the backend's preferred one."""
    num_blocks: int | None = None
    """None sizes the KV cache from `kv_cache_memory_bytes`, or from free memory."""
    kv_cache_memory_bytes: int | None = None
    memory_utilization: float = 0.5
    """The share of free memory that the KV cache may take when nothing else is said."""
    num_threads: int | None = None
    """None takes the cores that this process may use."""
    pin_threads: bool = False
    """True if each thread stays on one core."""
    parallel: ParallelConfig = ParallelConfig()
    place: RankPlace = RankPlace()
    """Rank of this worker."""
    workers_on_host: int = 1
    """Workers that share this host's cores and memory, this one among them."""
    host_memory_bytes: int | None = None
    """Bytes that were free on the host before any worker started; None means to look."""
    curve: CurveKeys | None = None
    """Keys of all sockets, where the engine's is on TCP; None where sockets lie in a private directory."""
    bind_host: str = ""
    """The address at which this worker's host is reached by its peers; empty when all are on one host."""
    kv_host_bytes: int = 0
    """Host memory of this worker that holds blocks for which the device has no room; 0 for none."""
    kv_disk_path: str | None = None
    """Directory of blocks that outlive the server; None for none."""
    kv_handoff: KVHandoffConfig | None = None
    """Ways of KV to and from workers of other engines; None for none."""
    trace: TraceSession | None = None
    """Trace under way when the worker starts."""

    @property
    def has_transfer_link(self) -> bool:
        """True if the worker opens a second connection, for transfers."""
        return (
            self.kv_host_bytes > 0 or self.kv_disk_path is not None or self.kv_handoff is not None
        )
