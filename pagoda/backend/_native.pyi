"""The kernels in csrc/. Tensors are given by address; 0 stands for none."""

MAX_HEAD_DIM: int

def instruction_sets() -> list[str]:
    """Those that this CPU has and kernels exist for, from the lowest to the highest."""

def packed_bytes(dtype: int, outputs: int, inputs: int) -> int: ...
def advise_large_pages(memory: int, size: int) -> None: ...

class Cache:
    def __init__(
        self, dtype: int, keys: int, values: int, key_scales: int, value_scales: int
    ) -> None: ...

class AttentionPlan:
    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        num_sequences: int,
        query_lens: int,
        context_lens: int,
        block_tables: int,
        width: int,
    ) -> None: ...
    @property
    def num_tokens(self) -> int: ...

class Kernels:
    def __init__(self, instruction_set: str) -> None: ...
    def pack_weight(
        self, dtype: int, outputs: int, inputs: int, weight: int, packed: int
    ) -> None: ...
    def weight_rows(
        self, dtype: int, outputs: int, inputs: int, packed: int, ids: int, n: int, out: int
    ) -> None: ...
    def linear(
        self,
        dtype: int,
        outputs: int,
        inputs: int,
        packed: int,
        bias: int,
        x: int,
        row_stride: int,
        n: int,
        out: int,
    ) -> None: ...
    def add_rms_norm(
        self,
        dtype: int,
        x: int,
        delta: int,
        weight: int,
        eps: float,
        n: int,
        d: int,
        sum: int,  # noqa: A002
        out: int,
    ) -> None: ...
    def silu_and_mul(self, dtype: int, gate_up: int, n: int, d: int, out: int) -> None: ...
    def key_pair(self, dtype: int, cache_dtype: int) -> int:
        """Elements of a key that lie side by side in a cache for activations of a dtype."""

    def value_pair(self, dtype: int, cache_dtype: int, block_size: int) -> int:
        """Tokens whose values lie side by side."""

    def rotate_and_cache(
        self,
        plan: AttentionPlan,
        dtype: int,
        cache: Cache,
        qkv: int,
        q_norm: int,
        k_norm: int,
        eps: float,
        cosines: int,
        sines: int,
        queries: int,
    ) -> None: ...
    def attention(
        self,
        plan: AttentionPlan,
        dtype: int,
        cache: Cache,
        queries: int,
        scale: float,
        window: int,
        out: int,
    ) -> None: ...
