"""The kernels in csrc/. Tensors are given by address; 0 stands for none.

`Segment.bind` gives `*arguments` in the order of csrc/module.cpp: first the weight, then rows.
"""

LOW_RANK_BLOCK: int
PANEL_OUTPUTS: int
MAX_HEAD_DIM: int
MAX_EXPERTS: int

def instruction_sets() -> list[str]:
    """Instruction sets of this CPU that kernels exist for, from the lowest to the highest."""

def packed_bytes(dtype: int, outputs: int, inputs: int) -> int: ...
def pack_quantized(
    shape: QuantizedShape, codes: int, scales: int, offsets: int, packed: int
) -> None: ...

class QuantizedShape:
    """A quantized weight in panels."""

    @staticmethod
    def int8(outputs: int, inputs: int, zero_points: bool) -> QuantizedShape: ...
    @staticmethod
    def grouped(
        outputs: int, inputs: int, bits: int, group_size: int, offsets: bool
    ) -> QuantizedShape: ...
    @staticmethod
    def in_blocks(
        outputs: int,
        inputs: int,
        bits: int,
        group_size: int,
        block_size: int,
        integer_scales: bool,
        minima: bool,
        codebook: bool,
        whole_rows: bool,
    ) -> QuantizedShape: ...
    @property
    def bytes(self) -> int: ...

def pack_blocks(
    shape: QuantizedShape,
    codes: int,
    scales: int,
    minima: int,
    block_scales: int,
    block_minima: int,
    packed: int,
) -> None: ...
def advise_large_pages(memory: int, size: int) -> None: ...

class Populator:
    """A thread that takes the pages of tensors' blocks before they are written to; see csrc/populator.h."""

    def __init__(self, regions: list[tuple[int, int]], num_blocks: int) -> None: ...
    def advance(self, end: int) -> None: ...
    def wait(self) -> None: ...

class LowRankMaps:
    """Maps of adapters for one layer; see csrc/low_rank.h."""

    def __init__(self, dtype: int, inputs: int, outputs: list[int]) -> None: ...
    def set(self, adapter: int, parts: list[tuple[int, float, int, int]]) -> None:
        """Parts are rank, scale, and the addresses of both matrices."""

    def remove(self, adapter: int) -> None: ...

class Cache:
    """Keys and values of one layer; `key_pair` elements of a key lie side by side."""

    def __init__(
        self,
        dtype: int,
        key_pair: int,
        keys: int,
        values: int,
        key_scales: int,
        value_scales: int,
    ) -> None: ...

class AttentionMetadata:
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
    def num_tokens_read(self, window: int) -> int: ...

class Kernels:
    def __init__(self, instruction_set: str) -> None: ...
    def pack_weight(
        self, dtype: int, outputs: int, inputs: int, weight: int, packed: int
    ) -> None: ...
    def add_low_rank(self, maps: LowRankMaps, *arguments: int) -> None: ...
    def embedding(self, *arguments: int) -> None: ...
    def linear(self, *arguments: int) -> None: ...
    def quantized_embedding(self, *arguments: int | QuantizedShape) -> None: ...
    def quantized_linear(self, *arguments: int | QuantizedShape) -> None: ...
    def linear_argmax(self, *arguments: int) -> None: ...
    def quantized_argmax(self, *arguments: int | QuantizedShape) -> None: ...
    def quantize_int8(
        self,
        dtype: int,
        outputs: int,
        inputs: int,
        weight: int,
        codes: int,
        scales: int,
        zero_points: int,
    ) -> None: ...
    def quantize_int4(
        self,
        dtype: int,
        outputs: int,
        inputs: int,
        group_size: int,
        weight: int,
        codes: int,
        scales: int,
    ) -> None: ...
    def add(self, x: int, delta: int, n: int, d: int, out: int) -> None: ...
    def add_rms_norm(
        self,
        x: int,
        delta: int,
        weight: int,
        eps: float,
        n: int,
        d: int,
        sum: int,  # noqa: A002
        out: int,
    ) -> None: ...
    def silu_and_mul(self, gate_up: int, n: int, d: int, out: int) -> None: ...
    def experts(
        self, experts: Experts, x: int, row_stride: int, logits: int, n: int, out: int
    ) -> None: ...
    def key_pair(self, dtype: int, cache_dtype: int) -> int:
        """Elements of a key that lie side by side in a cache for activations of a dtype."""

    def value_pair(self, dtype: int, cache_dtype: int, block_size: int) -> int:
        """Tokens whose values lie side by side."""

    def rotate_and_cache(
        self,
        plan: AttentionMetadata,
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
        plan: AttentionMetadata,
        cache: Cache,
        queries: int,
        scale: float,
        window: int,
        out: int,
    ) -> None: ...
    def sample(
        self,
        batch: SamplingBatch,
        logits: int,
        row_stride: int,
        vocab_size: int,
        most: int,
        numbers: int,
        logprobs: int,
    ) -> None: ...
    def score(
        self,
        token_ids: int,
        logits: int,
        rows: int,
        row_stride: int,
        vocab_size: int,
        most: int,
        numbers: int,
        logprobs: int,
    ) -> None: ...

class SamplingBatch:
    """Rows of logits to sample from; see csrc/sampler.h."""

    def __init__(self) -> None: ...
    def add(self, *arguments: float) -> None: ...

class PackedLinear:
    """A packed weight, as experts take it."""

    @staticmethod
    def dense(dtype: int, outputs: int, inputs: int, panels: int) -> PackedLinear: ...
    @staticmethod
    def quantized(shape: QuantizedShape, panels: int, order: int) -> PackedLinear: ...

class Experts:
    """Experts of a layer from `first` on; `counts` [num_experts] takes the tokens of each."""

    def __init__(
        self,
        kernels: Kernels,
        hidden: int,
        num_experts: int,
        per_token: int,
        renormalize: bool,
        first: int,
        counts: int,
    ) -> None: ...
    def add(self, gate: PackedLinear, up: PackedLinear, down: PackedLinear) -> None: ...

class Collectives:
    """One rank of a group on this host, over shared memory; waits without the GIL."""

    max_ranks: int
    def __init__(self, descriptor: int, rank: int, size: int) -> None: ...
    @staticmethod
    def bytes(size: int) -> int: ...
    def all_reduce(self, kernels: Kernels, dtype: int, x: int, count: int) -> None: ...
    def all_gather(self, x: int, bytes: int, out: int) -> None: ...  # noqa: A002
    def broadcast(self, x: int, bytes: int) -> None: ...  # noqa: A002

class Program:
    """Operations on values that are recorded by number and computed by `run`."""

    def __init__(self, kernels: Kernels) -> None: ...
    def value(self, width: int) -> int: ...
    def input(self, width: int) -> int: ...
    def embedding(self, *arguments: int) -> None: ...
    def quantized_embedding(self, *arguments: int | QuantizedShape) -> None: ...
    def all_reduce(self, x: int, group: Collectives) -> None:
        """In place."""

    def add(self, x: int, delta: int) -> int: ...
    def select_rows(self, x: int) -> int:
        """The rows that `run` is told; what is computed of them has as many."""

    def linear(self, *arguments: int) -> None: ...
    def quantized_linear(self, *arguments: int | QuantizedShape) -> None: ...
    def gated_linear(self, *arguments: int) -> None: ...
    def quantized_gated_linear(self, *arguments: int | QuantizedShape) -> None: ...
    def rms_norm(self, x: int, weight: int, eps: float) -> int: ...
    def add_rms_norm(self, x: int, delta: int, weight: int, eps: float) -> tuple[int, int]: ...
    def silu_and_mul(self, gate_up: int) -> int: ...
    def silu_and_mul_to(self, gate_up: int, out: int) -> None: ...
    def add_low_rank(self, x: int, out: int, maps: LowRankMaps) -> None: ...
    def record_when(self, when: int) -> None:
        """Of operations from now on: 0 in all steps, 1 in those without adapters, 2 in those with some."""

    def experts(self, x: int, logits: int, experts: Experts) -> int: ...
    def rotate_and_cache(
        self,
        qkv: int,
        cache: Cache,
        queries_width: int,
        q_norm: int,
        k_norm: int,
        eps: float,
    ) -> int: ...
    def attention(self, queries: int, cache: Cache, scale: float, window: int) -> int: ...
    def finish(self, result: int) -> None: ...
    @property
    def size(self) -> int:
        """How many operations have been recorded."""

    def run(
        self,
        num_tokens: int,
        plan: AttentionMetadata,
        token_ids: int,
        hidden: int,
        cosines: int,
        sines: int,
        rows: int,
        num_rows: int,
        adapters: int,
        out: int,
        times: int,
    ) -> None:
        """To `times` [size] int64, unless it is 0, goes how many nanoseconds each operation took.

        Raises IndexError when a token id is not in the embedding, or one of `rows` is not of the step."""
