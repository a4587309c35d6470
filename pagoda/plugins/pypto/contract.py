# SPDX-License-Identifier: Apache-2.0
"""Contracts: what the programs of a kernel library take and give, as the library says it.

The library owns the calling convention of its programs. A contract is data: for each program its arguments in
order, and of each argument the name, dtype, shape in symbols and meaning. Pagoda fills arguments by their meaning
alone, so that a library may order and name them as it likes. Fields have the names that pypto-lib gives them
(`models/*/contract.py` there), with a meaning for each argument.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Literal, get_args

import msgspec
import torch

from pagoda.backend.base import UnsupportedError

SCHEMA_VERSION = 1
"""Version of these structs; a library says which one its contracts are written in."""

Positive = Annotated[int, msgspec.Meta(ge=1)]
ProgramName = Literal["prefill", "decode", "topk_select"]

WeightMeaning = Literal[
    "attention_norms",
    "w_q",
    "w_k",
    "w_v",
    "q_norms",
    "k_norms",
    "w_o",
    "mlp_norms",
    "w_gate",
    "w_up",
    "w_down",
    "final_norm",
    "embedding",
    "head",
    "rope_cos",
    "rope_sin",
]
"""Meanings of weights, which lie on the chips: maps are [in, out], those of all layers one below the other."""
CacheMeaning = Literal["keys", "values"]
StepMeaning = Literal[
    "tokens", "seq_lens", "chunk_lens", "chunk_offsets", "block_table", "slot_mapping", "control"
]
"""Meanings of what the host writes for each call. `control` is (rows, k) of a selection."""
ResultMeaning = Literal["logits", "sampled", "next_hidden", "topk_values", "topk_indices"]
"""`topk_values` of a row are highest first, of equal ones the lowest token's; `topk_indices` are their tokens."""
Meaning = WeightMeaning | CacheMeaning | StepMeaning | ResultMeaning

WEIGHTS: frozenset[str] = frozenset(get_args(WeightMeaning))
CACHES: frozenset[str] = frozenset(get_args(CacheMeaning))
STEPS: frozenset[str] = frozenset(get_args(StepMeaning))

DTYPES: Mapping[str, torch.dtype] = {
    "int32": torch.int32,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
}
_NEEDED: Mapping[ProgramName, frozenset[str]] = {
    "prefill": WEIGHTS
    | CACHES
    | {"tokens", "seq_lens", "chunk_lens", "chunk_offsets", "block_table", "slot_mapping"}
    | {"logits"},
    "decode": WEIGHTS
    | CACHES
    | {"tokens", "seq_lens", "block_table", "slot_mapping", "logits", "sampled", "next_hidden"},
    "topk_select": frozenset({"logits", "control", "topk_values", "topk_indices"}),
}
"""Meanings that a program takes, each once."""


class Argument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One argument of a program."""

    name: str
    dtype: Literal["int32", "fp32", "bf16"]
    shape: tuple[str, ...]
    """Dimensions, each a product of symbols and numbers such as `L*H`."""
    meaning: Meaning
    direction: Literal["in", "out", "inout"] = "in"
    split: str = ""
    """Symbol that is divided among the chips of a worker; empty where every chip has all of it."""
    fill: int = 0
    """Element where there is nothing to say: entries of block tables behind a sequence's pages."""
    pad: Literal["zeros", "first_row"] = "zeros"
    """Rows behind those of the real vocabulary."""

    def dims(self, sizes: Mapping[str, int], chips: int = 1) -> tuple[int, ...]:
        """The shape on one of `chips`."""
        own = dict(sizes)
        if self.split:
            own[self.split] //= chips
        return tuple(
            math.prod(own[part] if part in own else int(part) for part in dim.split("*"))
            for dim in self.shape
        )

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]


class Program(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One program of a contract."""

    args: tuple[Argument, ...]
    """Arguments in the order of a call."""

    def argument(self, meaning: str) -> Argument:
        """The argument of a meaning that the program has."""
        return next(arg for arg in self.args if arg.meaning == meaning)


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The most that a step may have."""

    window: Positive
    """Rows of a call are a multiple of this; those without a sequence are inactive."""
    max_batch: Positive
    """Sequences of a step."""
    max_seq: Positive
    """Tokens of a sequence; rows of the rotary tables."""
    page: Positive
    """Tokens of a page of KV."""
    prefill_tokens: Positive
    """Tokens of all chunks of a step."""
    topk: Positive
    """The most candidates that a selection gives of a row."""


class Topology(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A number of chips that the programs run on, and the rings that they take there."""

    chips: Positive
    ring_task_window: Positive
    ring_heap: Positive
    """Bytes."""
    ring_dep_pool: Positive


class Contract(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The programs of one model shape."""

    name: str
    sizes: dict[str, Positive]
    """Sizes by symbol: L layers, H hidden, QH query heads, KVH KV heads, D elements of a head, I inner elements of
    an MLP, V rows of the padded vocabulary, REAL_V those that are tokens."""
    eps: float
    """Number under the root of all norms."""
    limits: Limits
    programs: dict[ProgramName, Program]
    topologies: tuple[Topology, ...]

    @property
    def weight_dtype(self) -> torch.dtype:
        """Dtype of all maps, of keys and of values."""
        return self.programs["decode"].argument("w_q").torch_dtype

    @property
    def max_blocks(self) -> int:
        """Pages of the longest sequence."""
        return -(-self.limits.max_seq // self.limits.page)

    def environment(self, *, batch: int, tokens: int, pages: int) -> dict[str, int]:
        """Sizes of all symbols in a call: `batch` rows, `tokens` of all chunks, `pages` in the pool."""
        limits = self.limits
        return self.sizes | {
            "B": batch,
            "T": tokens,
            "PAGES": pages,
            "PAGE": limits.page,
            "S": limits.max_seq,
            "BLOCKS": self.max_blocks,
            "WINDOW": limits.window,
            "K": limits.topk,
        }

    def topology(self, chips: int) -> Topology:
        """Raises UnsupportedError: the programs do not run on so many chips."""
        for known in self.topologies:
            if known.chips == chips:
                return known
        counts = ", ".join(str(known.chips) for known in self.topologies)
        raise UnsupportedError(
            f"the programs of {self.name} run on {counts} chips, but --devices gives a rank {chips}."
        )

    def problem(self) -> str:
        """A fault of the contract in half a sentence; empty if there is none."""
        lacking = {"L", "H", "QH", "KVH", "D", "I", "V", "REAL_V"}.difference(self.sizes)
        if lacking:
            return f"names no size {', '.join(sorted(lacking))}"
        if self.limits.max_batch % self.limits.window:
            return f"takes {self.limits.max_batch} sequences, no multiple of {self.limits.window}"
        if self.sizes["REAL_V"] > self.sizes["V"]:
            return "has more tokens than rows of its vocabulary"
        if not self.topologies:
            return "has no topologies, so it runs on no number of chips"
        sizes = self.environment(batch=1, tokens=1, pages=1)
        for name, needed in _NEEDED.items():
            program = self.programs.get(name)
            if program is None:
                return f"has no program {name}"
            meanings = [arg.meaning for arg in program.args]
            if len(set(meanings)) < len(meanings) or needed != set(meanings):
                changed = sorted(needed.symmetric_difference(meanings)) or ["one of them twice"]
                return f"has a program {name} of other arguments ({', '.join(changed)})"
            for arg in program.args:
                if problem := self._problem_of(arg, sizes):
                    return f"has {name}.{arg.name} {problem}"
        return ""

    def _problem_of(self, arg: Argument, sizes: Mapping[str, int]) -> str:
        symbols = {part for dim in arg.shape for part in dim.split("*")}
        unknown = sorted(one for one in symbols if one not in sizes and not one.isdigit())
        if unknown:
            return f"with the unknown size {', '.join(unknown)}"
        if arg.split and arg.split not in symbols:
            return f"split by {arg.split}, which its shape lacks"
        odd = [one.chips for one in self.topologies if arg.split and sizes[arg.split] % one.chips]
        return f"of which {odd[0]} chips have no equal parts" if odd else ""


class Driver(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Driver versions that a library's programs run with, each such as `25.2`."""

    at_least: str
    below: str


class LibraryManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that a kernel library says of itself."""

    library: str
    """Name and version, for the operator."""
    driver: Driver
    contracts: tuple[Contract, ...]


def read_manifest(manifest: Mapping[str, object]) -> LibraryManifest:
    """The manifest of a library, which names its `schema_version` beside the fields of `LibraryManifest`.

    Raises ValueError, whose text is one sentence: it is of another version, or is not what that version says.
    """
    given = dict(manifest)
    name, version = given.get("library", "the kernel library"), given.pop("schema_version", None)
    if version != SCHEMA_VERSION:
        raise ValueError(
            f"{name} has contracts of version {version}, this Pagoda reads version {SCHEMA_VERSION}; "
            "install versions that go together"
        )
    try:
        read = msgspec.convert(given, LibraryManifest)
    except msgspec.ValidationError as error:
        raise ValueError(f"the contracts of {name} cannot be read: {error}") from None
    if not read.contracts:
        raise ValueError(f"{name} has no contracts")
    for contract in read.contracts:
        if problem := contract.problem():
            raise ValueError(f"the contract {contract.name} of {name} {problem}")
    return read
