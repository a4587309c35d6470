"""The operations as native kernels for x86-64 CPUs; see csrc/.

The kernels keep one order of summation whatever the step holds: a linear map adds up along its inputs, attention
over cached tokens in tiles and splits at fixed positions. Threads share out panels of outputs and parts of
contexts, never a sum.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pagoda.backend.base import HeadNorms, KVCache, TokenBatch
from pagoda.backend.reference import ReferenceBackend
from pagoda.backend.weights import LinearWeight, dequantize
from pagoda.engine.messages import Capabilities
from pagoda.errors import ConfigError

if TYPE_CHECKING:
    from pagoda.backend import _native

INSTRUCTION_SET_ENV = "PAGODA_CPU_ISA"
"""Environment variable that forces a lower instruction set: `avx2`, `avx512` or `avx512_bf16`."""

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_KV_DTYPES = {**_DTYPES, torch.int8: 3}
_UNLIMITED = 2**62
"""A window that no context is longer than."""


class BackendUnavailableError(Exception):
    """This machine or installation has no such backend; the message says why."""


@dataclass(frozen=True)
class PackedLinear:
    panels: Tensor
    """Bytes of the weight [out, in] in panels of 32 outputs; see csrc/kernels.h."""
    bias: Tensor | None
    """[out rounded up to whole panels] float32."""
    dtype: torch.dtype
    outputs: int
    inputs: int


@dataclass(frozen=True)
class AttentionPlan:
    native: _native.AttentionPlan
    num_heads: int
    head_dim: int


def available_instruction_sets() -> list[str]:
    """Those that kernels exist for on this CPU, from the lowest to the highest.

    Raises:
        BackendUnavailableError: the kernels are not installed, or the CPU has none of their instruction sets.
    """
    # A process has one OpenMP library when torch, which brings one along, is loaded first.
    names: list[str] = _load().instruction_sets()
    if not names:
        raise BackendUnavailableError("this CPU has no AVX2")
    return names


def choose_instruction_set() -> str:
    """The highest one, or what the environment says.

    Raises:
        BackendUnavailableError: as above.
        ConfigError: the environment names one that this CPU does not have.
    """
    names = available_instruction_sets()
    wanted = os.environ.get(INSTRUCTION_SET_ENV)
    if wanted is None:
        return names[-1]
    if wanted not in names:
        known = ", ".join(names)
        raise ConfigError(
            f"{INSTRUCTION_SET_ENV} must be one of {known} on this CPU, got {wanted!r}."
        )
    return wanted


class CpuBackend:
    """Native kernels of one instruction set."""

    def __init__(self, instruction_set: str) -> None:
        """Raises:
        BackendUnavailableError: the kernels are not installed.
        ValueError: the CPU does not have the instruction set.
        """
        self._native = _load()
        self._kernels: _native.Kernels = self._native.Kernels(instruction_set)
        self._instruction_set = instruction_set
        self._reference = ReferenceBackend()
        self.device = torch.device("cpu")
        self.capabilities: Capabilities = self._reference.capabilities

    @property
    def summary(self) -> str:
        threads = torch.get_num_threads()
        return f"cpu ({self._instruction_set}), {threads} thread{'s' if threads > 1 else ''}"

    def allocate_kv_cache(
        self,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None = None,
    ) -> KVCache:
        """Keys are [num_blocks, num_kv_heads, head_dim / p, block_size, p]: vectors hold an element of many keys.

        Values are [num_blocks, num_kv_heads, block_size / q, head_dim, q]. p and q are 2 where one instruction
        multiplies pairs, else 1.

        Raises:
            ConfigError: no kernel takes heads of this size.
        """
        if head_dim % 2 or head_dim > self._native.MAX_HEAD_DIM:
            raise ConfigError(
                f"the cpu backend takes even head sizes up to {self._native.MAX_HEAD_DIM}, "
                f"not {head_dim}; --backend reference takes any."
            )
        kv_dtype = kv_dtype or dtype
        dtypes = _DTYPES[dtype], _KV_DTYPES[kv_dtype]
        p = self._kernels.key_pair(*dtypes)
        q = self._kernels.value_pair(*dtypes, block_size)
        blocks = (num_blocks, num_kv_heads)
        keys = torch.empty((*blocks, head_dim // p, block_size, p), dtype=kv_dtype)
        values = torch.empty((*blocks, block_size // q, head_dim, q), dtype=kv_dtype)
        for part in (keys, values):
            self._native.advise_large_pages(part.data_ptr(), part.nbytes)
        if kv_dtype != torch.int8:
            return KVCache(keys, values)
        scales = (torch.empty((*blocks, block_size)) for _ in range(2))
        return KVCache(keys, values, *scales)

    # ---- token by token

    def prepare_linear(
        self, parts: Sequence[LinearWeight], bias: Tensor | None, dtype: torch.dtype
    ) -> PackedLinear:
        return self._pack(torch.cat([dequantize(part).to(dtype) for part in parts]), bias)

    def _pack(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        outputs, inputs = weight.shape
        weight, dtype = weight.contiguous(), _DTYPES[weight.dtype]
        size = self._native.packed_bytes(dtype, outputs, inputs)
        panels = torch.empty(size, dtype=torch.uint8)
        self._kernels.pack_weight(dtype, outputs, inputs, weight.data_ptr(), panels.data_ptr())
        if bias is not None:
            bias = torch.nn.functional.pad(bias.float(), (0, -outputs % 32))
        return PackedLinear(panels, bias, weight.dtype, outputs, inputs)

    def linear(self, x: Tensor, weight: PackedLinear) -> Tensor:
        dtype = self._checked(x, weight.dtype)
        if x.stride(1) != 1:
            x = x.contiguous()
        num_tokens, inputs = x.shape
        if inputs != weight.inputs:
            raise ValueError(f"Rows of {inputs} do not fit a weight of {weight.inputs} inputs.")
        out = x.new_empty((num_tokens, weight.outputs))
        self._kernels.linear(
            dtype,
            weight.outputs,
            inputs,
            weight.panels.data_ptr(),
            0 if weight.bias is None else weight.bias.data_ptr(),
            x.data_ptr(),
            x.stride(0),
            num_tokens,
            out.data_ptr(),
        )
        return out

    def linear_rows(self, token_ids: Tensor, weight: PackedLinear) -> Tensor:
        if (
            len(token_ids)
            and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < weight.outputs
        ):
            raise IndexError(f"A token id is not from 0 to {weight.outputs - 1}.")
        ids = token_ids.contiguous()
        out = torch.empty((len(ids), weight.inputs), dtype=weight.dtype)
        self._kernels.weight_rows(
            _DTYPES[weight.dtype],
            weight.outputs,
            weight.inputs,
            weight.panels.data_ptr(),
            ids.data_ptr(),
            len(ids),
            out.data_ptr(),
        )
        return out

    def embedding(self, token_ids: Tensor, weight: Tensor) -> Tensor:
        return self._reference.embedding(token_ids, weight)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        dtype, x = self._checked(x, weight.dtype), x.contiguous()
        out = torch.empty_like(x)
        width = x.shape[-1]
        self._kernels.add_rms_norm(
            dtype,
            x.data_ptr(),
            0,
            weight.data_ptr(),
            eps,
            x.numel() // width,
            width,
            0,
            out.data_ptr(),
        )
        return out

    def add_rms_norm(
        self, x: Tensor, delta: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        dtype, x, delta = self._checked(x, weight.dtype), x.contiguous(), delta.contiguous()
        self._checked(delta, weight.dtype)
        total, out = torch.empty_like(x), torch.empty_like(x)
        width = x.shape[-1]
        self._kernels.add_rms_norm(
            dtype,
            x.data_ptr(),
            delta.data_ptr(),
            weight.data_ptr(),
            eps,
            x.numel() // width,
            width,
            total.data_ptr(),
            out.data_ptr(),
        )
        return total, out

    def rotary_table(
        self, positions: Tensor, frequencies: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        return self._reference.rotary_table(positions, frequencies, scale)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        dtype, gate_up = self._checked(gate_up, gate_up.dtype), gate_up.contiguous()
        num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty((num_tokens, width))
        self._kernels.silu_and_mul(dtype, gate_up.data_ptr(), num_tokens, width, out.data_ptr())
        return out

    # ---- attention

    def plan_attention(self, batch: TokenBatch, num_heads: int, cache: KVCache) -> AttentionPlan:
        _, num_kv_heads, block_pairs, head_dim, pair = cache.values.shape
        query_lens, context_lens, block_tables = (
            part.contiguous() for part in (batch.query_lens, batch.context_lens, batch.block_tables)
        )
        native = self._native.AttentionPlan(
            num_heads,
            num_kv_heads,
            head_dim,
            block_pairs * pair,
            len(query_lens),
            query_lens.data_ptr(),
            context_lens.data_ptr(),
            block_tables.data_ptr(),
            block_tables.shape[1],
        )
        return AttentionPlan(native, num_heads, head_dim)

    def _native_cache(self, cache: KVCache) -> _native.Cache:
        scales = (cache.key_scales, cache.value_scales)
        native: _native.Cache = self._native.Cache(
            _KV_DTYPES[cache.keys.dtype],
            cache.keys.data_ptr(),
            cache.values.data_ptr(),
            *(0 if part is None else part.data_ptr() for part in scales),
        )
        return native

    def rotate_and_cache(
        self,
        qkv: Tensor,
        cache: KVCache,
        plan: AttentionPlan,
        table: tuple[Tensor, Tensor],
        norms: HeadNorms | None,
    ) -> Tensor:
        qkv = qkv.contiguous()
        self._check_tokens(qkv, plan)
        cosines, sines = (part.contiguous() for part in table)
        queries = qkv.new_empty((len(qkv), plan.num_heads, plan.head_dim))
        self._kernels.rotate_and_cache(
            plan.native,
            self._checked_for(cache, qkv),
            self._native_cache(cache),
            qkv.data_ptr(),
            0 if norms is None else norms.queries.data_ptr(),
            0 if norms is None else norms.keys.data_ptr(),
            0.0 if norms is None else norms.eps,
            cosines.data_ptr(),
            sines.data_ptr(),
            queries.data_ptr(),
        )
        return queries

    def attention(
        self,
        queries: Tensor,
        cache: KVCache,
        plan: AttentionPlan,
        *,
        scale: float,
        window: int | None,
    ) -> Tensor:
        queries = queries.contiguous()
        self._check_tokens(queries, plan)
        out = torch.empty_like(queries)
        self._kernels.attention(
            plan.native,
            self._checked_for(cache, queries),
            self._native_cache(cache),
            queries.data_ptr(),
            scale,
            _UNLIMITED if window is None else window,
            out.data_ptr(),
        )
        return out

    def _checked(self, x: Tensor, expected: torch.dtype) -> int:
        """The number that kernels know a dtype by."""
        if x.dtype != expected:
            raise ValueError(f"Values are {x.dtype}, but {expected} is needed.")
        return _DTYPES[expected]

    def _checked_for(self, cache: KVCache, x: Tensor) -> int:
        """The number of activations' dtype, for which the cache was laid out."""
        dtype = _DTYPES[x.dtype]
        pair = cache.keys.shape[4]
        if self._kernels.key_pair(dtype, _KV_DTYPES[cache.keys.dtype]) != pair:
            raise ValueError(f"This cache of {cache.keys.dtype} is not for values of {x.dtype}.")
        return dtype

    def _check_tokens(self, x: Tensor, plan: AttentionPlan) -> None:
        if len(x) != plan.native.num_tokens:
            raise ValueError(f"{len(x)} tokens do not fit a plan of {plan.native.num_tokens}.")


def _load() -> ModuleType:
    try:
        return importlib.import_module("pagoda.backend._native")
    except ModuleNotFoundError:
        raise BackendUnavailableError(
            "the kernels were not built when Pagoda was installed; "
            "that takes a C++20 compiler with OpenMP and Python's header files, on x86-64"
        ) from None
    except ImportError as error:
        raise BackendUnavailableError(f"the kernels cannot be loaded: {error}") from None
