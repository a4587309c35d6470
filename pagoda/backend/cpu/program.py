"""A forward pass of the cpu backend as one native call; see csrc/program.h."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from pagoda.backend.base import Experts, ForwardPass, HeadNorms, KVCache, StepInput
from pagoda.backend.cpu.weights import UNLIMITED, AttentionMetadata, PackedLinear, address
from pagoda.backend.low_rank import LowRankMaps
from pagoda.backend.operation import Kind, Operation, OperationNamer, WeightNames
from pagoda.telemetry.tracer import Tracer

if TYPE_CHECKING:
    from pagoda.backend import _native
    from pagoda.backend.cpu.backend import CpuBackend


@dataclass(frozen=True)
class Value:
    """Stands for the activations that an operation will compute, a row of float32 for each token."""

    index: int
    width: int


_TOKEN_IDS = Value(-1, 1)
_COSINES = Value(-2, 0)
_SINES = Value(-3, 0)
_ROWS = Value(-4, 1)
_ADAPTERS = Value(-5, 1)
_ALWAYS, _PLAIN, _ADAPTED = range(3)
"""Steps in which an operation is computed: all, those without adapters, those with some."""


class _Recorder:
    """Takes operations down instead of computing them."""

    def __init__(
        self,
        ops: CpuBackend,
        program: _native.Program,
        group: _native.Collectives | None,
        names: WeightNames,
    ) -> None:
        self._ops = ops
        self._program = program
        self._group = group
        self._namer = OperationNamer(names)
        self.operations: list[Operation] = []
        """One for each of the program's."""
        self.kept: list[object] = []
        """Objects that the program has only addresses of."""
        self.selects = False
        """True where the result has the rows of `StepInput.rows` only."""

    def input(self, width: int) -> Value:
        return Value(self._program.input(width), width)

    def linear(self, x: Value, weight: PackedLinear) -> Value:
        out = self._value(weight.outputs)
        self._multiply(x, weight, out)
        return out

    def _multiply(self, x: Value, weight: PackedLinear, out: Value, *, counts: bool = True) -> None:
        """Records a product; one in place of another operation, in other steps, `counts` no weights again."""
        _expect(x, weight.inputs)
        self.kept.append(weight)
        column = 0
        for segment in weight.segments:
            multiply = segment.bind(
                self._program.linear, self._program.quantized_linear, x.index, out.index, column
            )
            multiply(address(segment.bias))
            flops = 2 * segment.outputs * weight.inputs
            self._note("linear", weight, *((segment.num_bytes, flops) if counts else ()))
            column += segment.outputs

    def embedding(
        self,
        token_ids: Value,
        weight: PackedLinear,
        first_id: int = 0,
        vocab_size: int | None = None,
    ) -> Value:
        if token_ids != _TOKEN_IDS:
            raise ValueError("Rows are looked up by the token ids of the step only.")
        (segment,) = weight.segments
        self.kept.append(weight)
        out = self._value(weight.inputs)
        look_up = segment.bind(
            self._program.embedding, self._program.quantized_embedding, out.index
        )
        look_up(first_id, first_id + weight.outputs if vocab_size is None else vocab_size)
        self._note("embedding", weight)
        return out

    def all_reduce(self, x: Value) -> Value:
        if self._group is not None:
            self._program.all_reduce(x.index, self._group)
            self._note("all_reduce")
            self.kept.append(self._group)
        return x

    def add_low_rank(self, out: Value, x: Value, maps: LowRankMaps, adapters: Value) -> Value:
        if adapters != _ADAPTERS:
            raise ValueError("Rows have the adapters of the step only.")
        _expect(x, maps.inputs)
        _expect(out, sum(maps.outputs))
        native = self._ops.native_maps(maps)
        self.kept += (maps, native)
        self._program.record_when(_ADAPTED)
        self._program.add_low_rank(x.index, out.index, native)
        self._program.record_when(_ALWAYS)
        self._note("low_rank")
        return out

    def select_rows(self, x: Value, rows: Value) -> Value:
        if rows != _ROWS:
            raise ValueError("Rows are selected by those of the step only.")
        if x == _ADAPTERS:
            return x  # the program knows which rows are selected
        index = self._program.select_rows(x.index)
        self.selects = True
        self._note("select")
        return Value(index, x.width)

    def add(self, x: Value, delta: Value) -> Value:
        _expect(delta, x.width)
        index = self._program.add(x.index, delta.index)
        self._note("add")
        return Value(index, x.width)

    def rms_norm(self, x: Value, weight: Tensor, eps: float) -> Value:
        _expect(x, len(weight))
        index = self._program.rms_norm(x.index, self._keep(weight), eps)
        self._note("norm", weight, weight.nbytes)
        return Value(index, x.width)

    def add_rms_norm(
        self, x: Value, delta: Value, weight: Tensor, eps: float
    ) -> tuple[Value, Value]:
        _expect(x, len(weight))
        _expect(delta, len(weight))
        total, out = self._program.add_rms_norm(x.index, delta.index, self._keep(weight), eps)
        self._note("norm", weight, weight.nbytes)
        return Value(total, x.width), Value(out, x.width)

    def gated_linear(
        self,
        x: Value,
        weight: PackedLinear,
        maps: LowRankMaps | None = None,
        adapters: Value | None = None,
    ) -> Value:
        is_fused = len(weight.segments) == 1 and not weight.outputs % (2 * self._ops.panel_outputs)
        if not is_fused:
            both = self.linear(x, weight)
            if maps is not None and adapters is not None:
                self.add_low_rank(both, x, maps, adapters)
            index = self._program.silu_and_mul(both.index)
            self._note("activation")
            return Value(index, both.width // 2)
        if maps is None or adapters is None:
            return self._fused_gates(x, weight)
        # In one where no token has an adapter, else in three.
        self._program.record_when(_PLAIN)
        out = self._fused_gates(x, weight)
        self._program.record_when(_ADAPTED)
        both = self._value(weight.outputs)
        self._multiply(x, weight, both, counts=False)
        self.add_low_rank(both, x, maps, adapters)
        self._program.record_when(_ADAPTED)
        self._program.silu_and_mul_to(both.index, out.index)
        self._note("activation")
        self._program.record_when(_ALWAYS)
        return out

    def _fused_gates(self, x: Value, weight: PackedLinear) -> Value:
        _expect(x, weight.inputs)
        self.kept.append(weight)
        (segment,) = weight.segments
        out = self._value(weight.outputs // 2)
        multiply = segment.bind(
            self._program.gated_linear, self._program.quantized_gated_linear, x.index, out.index
        )
        multiply(address(segment.bias))
        self._note("linear", weight, segment.num_bytes, 2 * weight.outputs * weight.inputs)
        return out

    def experts(self, x: Value, logits: Value, experts: Experts[PackedLinear]) -> Value:
        _expect(x, experts.gate[0].inputs)
        _expect(logits, experts.routing.num_experts)
        self.kept.append(experts)
        index = self._program.experts(x.index, logits.index, self._ops.native_experts(experts))
        maps = [m for part in (experts.gate, experts.up, experts.down) for m in part]
        flops = sum(2 * m.outputs * m.inputs for m in maps) * experts.routing.experts_per_token
        num_bytes = sum(segment.num_bytes for m in maps for segment in m.segments)
        self._note("experts", None, num_bytes, flops // experts.routing.num_experts)
        return Value(index, x.width)

    def rotate_and_cache(
        self,
        qkv: Value,
        cache: KVCache,
        plan: AttentionMetadata,  # noqa: ARG002 - it comes with every step
        table: tuple[Value, Value],
        norms: HeadNorms | None,
    ) -> Value:
        if table != (_COSINES, _SINES):
            raise ValueError("The rotary table of the step is the only one.")
        _, num_kv_heads, _, head_dim, _ = cache.values.shape
        width = qkv.width - 2 * num_kv_heads * head_dim
        index = self._program.rotate_and_cache(
            qkv.index,
            self._native_cache(cache),
            width,
            self._keep(norms.queries) if norms else 0,
            self._keep(norms.keys) if norms else 0,
            norms.eps if norms else 0.0,
        )
        norm_bytes = norms.queries.nbytes + norms.keys.nbytes if norms else 0
        self._note("rotary", None, norm_bytes)
        return Value(index, width)

    def attention(
        self,
        queries: Value,
        cache: KVCache,
        plan: AttentionMetadata,  # noqa: ARG002 - it comes with every step
        *,
        scale: float,
        window: int | None,
    ) -> Value:
        index = self._program.attention(
            queries.index, self._native_cache(cache), scale, UNLIMITED if window is None else window
        )
        self._note("attention")
        return Value(index, queries.width)

    def _note(
        self, kind: Kind, weight: object = None, weight_bytes: int = 0, flops_per_token: int = 0
    ) -> None:
        """Describes the operation that was recorded last."""
        name = self._namer.name(kind, weight)
        self.operations.append(Operation(name, kind, weight_bytes, flops_per_token))

    def _value(self, width: int) -> Value:
        return Value(self._program.value(width), width)

    def _native_cache(self, cache: KVCache) -> _native.Cache:
        self.kept.append(cache)
        return self._ops.native_cache(cache)

    def _keep(self, tensor: Tensor) -> int:
        """The address of a tensor that must stay where it is."""
        if not tensor.is_contiguous() or tensor.dtype != torch.float32:
            raise ValueError("Weights of norms must be contiguous float32.")
        self.kept.append(tensor)
        return tensor.data_ptr()


def _expect(x: Value, width: int) -> None:
    if x.width != width:
        raise ValueError(f"Rows of {x.width} do not fit a weight of {width} inputs.")


def _checked_adapters(adapters: Tensor | None, num_tokens: int) -> Tensor | None:
    """Numbers of the tokens' adapters as the program reads them."""
    if adapters is None:
        return None
    if adapters.dtype != torch.int64 or len(adapters) != num_tokens:
        raise ValueError(f"{num_tokens} tokens need as many numbers of adapters, of torch.int64.")
    return adapters.contiguous()


class CompiledForward:
    def __init__(
        self,
        ops: CpuBackend,
        program: _native.Program,
        group: _native.Collectives | None,
        forward: ForwardPass[PackedLinear, AttentionMetadata],
        hidden: int | None,
        names: WeightNames,
    ) -> None:
        """Records `forward` of a rank of the group, or alone, in the empty `program`.

        `hidden` and `names` are as in `Backend.compile`.
        """
        self._program = program
        recorder = _Recorder(ops, program, group, names)
        self._hidden = None if hidden is None else recorder.input(hidden)
        no_plan = cast("AttentionMetadata", None)
        step = StepInput(_TOKEN_IDS, (_COSINES, _SINES), no_plan, self._hidden, _ROWS, _ADAPTERS)
        self._result = forward(recorder, step)
        self._kept = recorder.kept
        program.finish(self._result.index)
        self._selects = recorder.selects
        self.operations: Sequence[Operation] = recorder.operations
        self._times = torch.empty(program.size, dtype=torch.int64)

    def __call__(self, step: StepInput[Tensor, AttentionMetadata]) -> Tensor:
        return self._run(step, None)

    def traced(
        self,
        step: StepInput[Tensor, AttentionMetadata],
        tracer: Tracer,  # noqa: ARG002 - the program keeps the time
    ) -> tuple[Tensor, Sequence[int]]:
        out = self._run(step, self._times)
        times: list[int] = self._times.tolist()
        return out, times

    def _run(self, step: StepInput[Tensor, AttentionMetadata], times: Tensor | None) -> Tensor:
        num_tokens = len(step.token_ids)
        cosines, sines = (part.contiguous() for part in step.rotary_table)
        if num_tokens != step.plan.native.num_tokens or len(cosines) != num_tokens:
            raise ValueError(f"{num_tokens} tokens do not fit the plan or the rotary table.")
        token_ids = step.token_ids.contiguous()
        hidden = self._checked_hidden(step.hidden, num_tokens)
        rows = self._checked_rows(step.rows)
        adapters = _checked_adapters(step.adapters, num_tokens)
        num_results = num_tokens if rows is None else len(rows)
        out = torch.empty((num_results, self._result.width))
        self._program.run(
            num_tokens,
            step.plan.native,
            token_ids.data_ptr(),
            address(hidden),
            cosines.data_ptr(),
            sines.data_ptr(),
            address(rows),
            0 if rows is None else num_results,
            address(adapters),
            out.data_ptr(),
            address(times),
        )
        return out

    def _checked_rows(self, rows: Tensor | None) -> Tensor | None:
        """Numbers of the wanted rows as the program reads them; None where it gives all rows."""
        if not self._selects:
            return None
        if rows is None or rows.dtype != torch.int64:
            raise ValueError(
                "A step of a pass that selects rows needs their numbers, of torch.int64."
            )
        return rows.contiguous()

    def _checked_hidden(self, hidden: Tensor | None, num_tokens: int) -> Tensor | None:
        """Hidden states as the program reads them."""
        if self._hidden is None:
            return None
        if hidden is None:
            raise ValueError(
                "A step without hidden states does not fit a stage that starts from them."
            )
        if hidden.dtype != torch.float32:
            raise ValueError(f"Hidden states are {hidden.dtype}, but torch.float32 is needed.")
        _expect(Value(-1, hidden.shape[1]), self._hidden.width)
        if len(hidden) != num_tokens:
            raise ValueError(f"Hidden states of {len(hidden)} tokens do not fit {num_tokens}.")
        return hidden.contiguous()
