# SPDX-License-Identifier: Apache-2.0
"""The kernels in csrc/. Tensors are given by address; 0 stands for none."""

from collections.abc import Sequence

SAMPLING_COLUMNS: dict[str, str]
LOW_RANK_BLOCK: int
MAX_HEAD_DIM: int
MAX_EXPERTS: int
MAX_CONV_WIDTH: int
MAX_DELTA_KEY: int
MAX_SCAN_STATE: int
DELTA_KEY_MULTIPLE: int
EMULATED_AMX: str

def instruction_sets() -> list[str]:
    """Instruction sets of this CPU that kernels exist for, from the lowest to the highest."""

def has_amx() -> bool:
    """Whether the processor has AMX for bf16 and int8, used or not."""

def amx_obstacle() -> str:
    """Why this process has no use of AMX; empty if it has."""

def multiply_tiles(
    instruction_set: str, bf16: bool, rows: int, words: int, a: int, b: int, sums: int
) -> None:
    """sums [rows, 32] += a [rows, words] b [words, 32] by tiles, for tests; see csrc/tile_kernels.h."""

def packed_bytes(dtype: int, outputs: int, inputs: int, group: int) -> int: ...
def pack_small(
    dtype: int, outputs: int, inputs: int, group: int, values: int, scales: int, packed: int
) -> None:
    """Packs 8-bit floats [outputs, inputs] with scales of groups; see csrc/kernels.h."""

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
        codebook: int,
        whole_rows: bool,
        point_inputs: int,
        high_bits: int,
        sign_inputs: int,
        table: int,
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
def panel_tasks(
    panels: int, rows: int, row_bytes: int, tile_rows: int, threads: int
) -> list[tuple[int, int, int]]:
    """Panel, first row and end of rows of each task of a product, in the order in which threads claim them."""

def expert_order(rows: list[int]) -> list[int]:
    """Experts that have rows, in the order in which threads claim their panels."""

class TeamClaims:
    """Threads that claim tasks as those of a step do; see `Claims` in csrc/panels.h. Each has one."""

    def __init__(self, tasks: int, threads: int) -> None: ...
    def begin(self, thread: int) -> int:
        """The task of a thread, which begins it and maybe queues its next; -1 if there is none."""

    def end(self, thread: int) -> None: ...

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
    """Keys and values of one layer; `key_pair` elements of a key lie side by side.

    Of latents there are values only, in rows of `head_dim` elements that are keys as well, but for the last
    `index_dim`, which an indexer reads.
    """

    def __init__(
        self,
        dtype: int,
        key_pair: int,
        keys: int,
        values: int,
        key_scales: int,
        value_scales: int,
        num_blocks: int,
        num_kv_heads: int,
        block_size: int,
        head_dim: int,
        value_dim: int,
        index_dim: int,
    ) -> None: ...
    def elsewhere(
        self,
        keys: int,
        values: int,
        key_scales: int,
        value_scales: int,
        num_blocks: int,
        stride: int,
    ) -> Cache:
        """Blocks of the same layer in other memory, where those of each tensor lie `stride` bytes apart."""

class StateCache:
    """States of one layer; see csrc/states.h."""

    def __init__(
        self,
        first: int,
        first_stride: int,
        second: int,
        second_stride: int,
        units: int,
        floats: int,
        num_blocks: int,
        block_size: int,
    ) -> None: ...

class AttentionMetadata:
    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        num_blocks: int,
        num_sequences: int,
        query_lens: int,
        context_lens: int,
        draft_lens: int,
        block_tables: int,
        width: int,
        segment: int,
    ) -> None: ...
    def set_cold(self, runs: list[tuple[int, int]], segments: object) -> None:
        """Sequence and number of cold segments that are read together; `segments` is a `NativeSegments`."""

    @property
    def num_tokens(self) -> int: ...
    def num_tokens_read(self, window: int) -> int: ...
    def tasks(self, window: int) -> list[list[int]]:
        """Cached tokens times heads of each task, in order, of three phases between which threads meet.

        The phases are what several sequences share, splits and whole contexts, and contexts that are merged.
        Tasks are for PyTorch's number of threads, as it is when a window is first asked for."""

class Kernels:
    def __init__(self, instruction_set: str) -> None: ...
    def pack_weight(
        self, dtype: int, outputs: int, inputs: int, weight: int, packed: int
    ) -> None: ...
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
    def quantize_blocks(
        self,
        dtype: int,
        outputs: int,
        inputs: int,
        bits: int,
        group_size: int,
        weight: int,
        codes: int,
        scales: int,
        minima: int,
        row_scales: int,
        row_minima: int,
    ) -> None: ...
    def key_pair(self, dtype: int, cache_dtype: int) -> int:
        """Elements of a key that lie side by side in a cache for activations of a dtype."""

    def value_pair(self, dtype: int, cache_dtype: int, block_size: int) -> int:
        """Tokens whose values lie side by side."""

    def sample(
        self,
        table: SamplingTable,
        slots: Sequence[int],
        logits: int,
        row_stride: int,
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

class SamplingTable:
    """Columns of `pagoda.backend.sampling_table.SamplingTable` by name; see csrc/sampling_table.h."""

    def __init__(self, num_slots: int, vocab_size: int, columns: dict[str, int]) -> None: ...

class PackedLinear:
    """A packed weight without bias."""

    @staticmethod
    def dense(dtype: int, outputs: int, inputs: int, group: int, panels: int) -> PackedLinear: ...
    @staticmethod
    def quantized(shape: QuantizedShape, panels: int, order: int) -> PackedLinear: ...

class ExpertRouting:
    """See `pagoda.backend.base.ExpertRouting`."""

    def __init__(
        self,
        num_experts: int,
        per_token: int,
        renormalize: bool,
        scores: int,
        groups: int,
        groups_per_token: int,
        best_two: bool,
        factor: float,
        weighs_inputs: bool,
    ) -> None: ...

class Experts:
    """Experts of a layer from `first` on; `counts` [num_experts] takes the tokens of each."""

    def __init__(
        self,
        kernels: Kernels,
        hidden: int,
        routing: ExpertRouting,
        correction: int,
        gate: int,
        alpha: float,
        limit: float,
        first: int,
        counts: int,
    ) -> None: ...
    def add(
        self,
        gate: PackedLinear,
        gate_bias: int,
        up: PackedLinear,
        up_bias: int,
        down: PackedLinear,
        down_bias: int,
    ) -> None:
        """Adds the next expert: maps, and addresses of their biases or 0."""

class Collectives:
    """One rank of a group on this host, over shared memory; waits without the GIL."""

    max_ranks: int
    def __init__(self, descriptor: int, rank: int, size: int) -> None: ...
    @staticmethod
    def bytes(size: int) -> int: ...
    def all_reduce(self, kernels: Kernels, dtype: int, x: int, count: int) -> None: ...
    def all_gather(self, x: int, bytes: int, out: int) -> None: ...  # noqa: A002
    def all_to_all(self, x: int, bytes: Sequence[int], out: int) -> None: ...  # noqa: A002
    def broadcast(self, x: int, bytes: int) -> None: ...  # noqa: A002

class LinearLayer:
    """Packed weights of the same inputs, whose outputs follow one another."""

    def __init__(self) -> None: ...
    def add(self, weight: PackedLinear, bias: int, bias_bytes: int) -> None: ...

class Program:
    """A graph, lowered; weights are addresses of vectors, objects of this module, or groups to call back."""

    def __init__(
        self,
        kernels: Kernels,
        values: list[tuple[int, int, int]],
        inputs: list[int],
        results: list[int],
        rows: int,
        adapters: int,
        nodes: list[tuple[str, list[int], list[int], list[int], list[float]]],
        weights: list[object],
    ) -> None:
        """`values` are width, bytes of an element, whether rows are selected, and whether they are of all ranks.

        `rows` and `adapters` are inputs, or -1.

        Raises ValueError: there is no kernel for a node."""

    def schedule(self, nodes: list[int], external: list[int]) -> int:
        """Number of the schedule of these nodes, with `external` results in memory that `run` is given."""

    def operations(self, schedule: int) -> list[tuple[int, int, int]]:
        """Node, bytes of weights, and floating-point operations for each token of each operation."""

    def step_bytes(
        self,
        schedule: int,
        rows: Sequence[int],
        inputs: list[int],
        metadata: list[AttentionMetadata | None],
    ) -> int:
        """Bytes that a step of so many `rows` (`StepRows`) takes between its inputs and its results; takes none
        and computes nothing.

        Of the inputs only `metadata`, numbers of adapters, counts of ranks and selected rows are read."""

    def run(
        self,
        schedule: int,
        rows: Sequence[int],
        inputs: list[int],
        metadata: list[AttentionMetadata | None],
        results: list[int],
        times: int,
    ) -> None:
        """To `times`, one for each operation unless it is 0, goes how many nanoseconds each operation took.

        Raises IndexError: a token id is not in the embedding, or a selected row is not of the step."""
