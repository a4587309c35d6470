# SPDX-License-Identifier: Apache-2.0
"""The reference behind a device that computes when somebody looks, and not before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from pagoda.backend.base import UNNAMED, StepInput
from pagoda.backend.graph import Graph
from pagoda.backend.kv_store import DeviceEvent
from pagoda.backend.operation import WeightNames
from pagoda.backend.overlap import PendingOutput
from pagoda.backend.reference.backend import ReferenceBackend
from pagoda.backend.sampling import SampledRows, ScoredRows
from pagoda.backend.sampling_table import SamplingTable
from pagoda.plugins.backend_check.sampling import table_of
from pagoda.plugins.cuda.emulation import EmulatedDevice
from pagoda.telemetry.tracer import Tracer

OutcomeT = TypeVar("OutcomeT")


class LateBackend:
    def __init__(self) -> None:
        self._own = ReferenceBackend()
        self.future_tokens = EmulatedDevice()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def compile(self, graph: Graph, names: WeightNames = UNNAMED) -> LateGraph:
        return LateGraph(self.future_tokens, self._own.compile(graph, names), graph)

    def launched(self) -> DeviceEvent:
        return self.future_tokens.steps.record()

    def launch_read(self, found: Tensor) -> PendingOutput[Tensor]:
        here = _held(self.future_tokens, found)
        token_ids = self.future_tokens.empty((len(here),), torch.int64)
        self.future_tokens.steps.run(lambda: token_ids.copy_(here[:, 0]))
        return _LateOutput(self.future_tokens, token_ids, here.clone)

    def launch_drain(self, counts: Tensor) -> Callable[[], Tensor]:
        drained = self.future_tokens.empty(tuple(counts.shape), counts.dtype)

        def work() -> None:
            drained.copy_(counts)
            counts.zero_()

        self.future_tokens.steps.run(work)
        done = self.future_tokens.steps.record()

        def read() -> Tensor:
            done.wait()
            return drained.clone()

        return read

    def launch_sample(
        self, logits: Tensor, table: SamplingTable, slots: Sequence[int]
    ) -> PendingOutput[SampledRows]:
        table.check(logits, slots)
        here, rows = _held(self.future_tokens, logits), [table.row(slot) for slot in slots]
        token_ids = self.future_tokens.empty((len(slots),), torch.int64)
        outcome: list[SampledRows] = []

        def work() -> None:
            own = table_of(table.vocab_size, rows)
            outcome.append(self._own.sample(here.clone(), own, range(len(rows))))
            token_ids.copy_(outcome[0].token_ids)

        self.future_tokens.steps.run(work)
        return _LateOutput(self.future_tokens, token_ids, lambda: outcome[0])

    def sample(self, logits: Tensor, table: SamplingTable, slots: Sequence[int]) -> SampledRows:
        return self.launch_sample(logits, table, slots).read()

    def score(self, logits: Tensor, token_ids: Tensor, num_top: int) -> ScoredRows:
        return self._own.score(logits.clone(), token_ids, num_top)


class _LateOutput(Generic[OutcomeT]):
    def __init__(
        self, device: EmulatedDevice, token_ids: Tensor, outcome: Callable[[], OutcomeT]
    ) -> None:
        self._done = device.steps.record()
        self.token_ids = token_ids
        self._outcome = outcome

    def read(self) -> OutcomeT:
        self._done.wait()
        return self._outcome()


class LateGraph:
    def __init__(self, device: EmulatedDevice, own: Any, graph: Graph) -> None:
        self._device, self._own, self._graph = device, own, graph

    def operations(self, results: Sequence[str]) -> Sequence[Any]:
        found: Sequence[Any] = self._own.operations(results)
        return found

    def profile(self, step: StepInput[Any], results: Sequence[str]) -> int:
        num_bytes: int = self._own.profile(step, results)
        return num_bytes

    def __call__(self, step: StepInput[Any], results: Sequence[str]) -> tuple[Tensor, ...]:
        given = {
            name: tensor.clone()
            if self._device.held(tensor) is None
            else _held(self._device, tensor)
            for name, tensor in step.tensors.items()
        }
        count = len(given["rows"] if "rows" in given else next(iter(given.values())))
        values = [self._graph.results[name] for name in results]
        outs = [
            self._device.empty((count, value.width), getattr(torch, value.dtype))
            for value in values
        ]

        def work() -> None:
            for future_tokens in step.future_tokens:
                chosen = future_tokens.token_ids[list(future_tokens.places)]
                given["token_ids"][list(future_tokens.rows)] = chosen.clamp(
                    min=0
                )  # -1 of what failed
            computed = self._own(StepInput(given, step.metadata), results)
            for out, own in zip(outs, computed, strict=True):
                out.copy_(own)

        self._device.steps.run(work)
        return tuple(map(self._device.shown, outs))

    def traced(
        self,
        step: StepInput[Any],
        results: Sequence[str],
        tracer: Tracer,  # noqa: ARG002
    ) -> tuple[tuple[Tensor, ...], Sequence[int]]:
        return self(step, results), ()


def _held(device: EmulatedDevice, tensor: Tensor) -> Tensor:
    held = device.held(tensor)
    return tensor if held is None else held
