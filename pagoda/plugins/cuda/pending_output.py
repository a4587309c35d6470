# SPDX-License-Identifier: Apache-2.0
"""Results of the device on their way to host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from torch import Tensor

from pagoda.plugins.cuda.lost import device_errors
from pagoda.plugins.cuda.runtime import Runtime
from pagoda.plugins.cuda.staging import Parcel, Pinned, PinnedPool

OutcomeT = TypeVar("OutcomeT")


class Copied:
    """Tensors of the device that are copied to pinned memory, behind the steps so far."""

    def __init__(self, runtime: Runtime, pool: PinnedPool, tensors: Sequence[Tensor]) -> None:
        parcel = Parcel([(tuple(each.shape), each.dtype) for each in tensors])
        self._pinned: Pinned = pool.take(parcel.num_bytes)
        self._views = parcel.views(self._pinned.memory)
        copies = list(zip(self._views, tensors, strict=True))

        def work() -> None:
            for target, source in copies:
                target.copy_(source, non_blocking=True)

        runtime.steps.run(work)
        self._runtime, self._done = runtime, runtime.steps.record()
        self._pinned.used_until(self._done)

    def read(self) -> list[Tensor]:
        """The tensors in host memory, once they are there. Raises DeviceLostError: the device has failed."""
        with device_errors(self._runtime):
            self._done.wait()
        return [view.clone() for view in self._views]


class CopiedOutput(Generic[OutcomeT]):
    """A `PendingOutput` of some copies."""

    def __init__(
        self, copied: Copied, token_ids: Tensor, outcome: Callable[[Sequence[Tensor]], OutcomeT]
    ) -> None:
        """`outcome` makes the result of the tensors that were copied."""
        self._copied, self._outcome = copied, outcome
        self.token_ids = token_ids

    def read(self) -> OutcomeT:
        return self._outcome(self._copied.read())
