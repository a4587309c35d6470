# SPDX-License-Identifier: Apache-2.0
"""Overlap scheduling in backends: a step is launched before the results of the step before are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar, runtime_checkable

from torch import Tensor

from pagoda.backend.kv_store import DeviceEvent
from pagoda.backend.sampling import SampledRows
from pagoda.backend.sampling_table import SamplingTable

OutcomeT_co = TypeVar("OutcomeT_co", covariant=True)


class PendingOutput(Protocol[OutcomeT_co]):
    """Result that a device has been told to compute and copy to host memory."""

    @property
    def token_ids(self) -> Tensor:
        """[rows] int64 on the device, the token of each row; -1, or any, where there is none."""

    def read(self) -> OutcomeT_co:
        """Waits for it. Raises DeviceLostError: the device has failed."""


@runtime_checkable
class OverlapBackend(Protocol):
    """Part of a backend whose device computes by itself: a step is launched, and its results are read later.

    What steps write and read is in the order in which they were launched.
    """

    def launched(self) -> DeviceEvent:
        """The event of all that was launched so far."""

    def launch_sample(
        self, logits: Tensor, table: SamplingTable, slots: Sequence[int]
    ) -> PendingOutput[SampledRows]:
        """`Backend.sample` without its end; the table is what it is now."""

    def launch_read(self, found: Tensor) -> PendingOutput[Tensor]:
        """Copies a result `argmax` [rows, 3] int64 to host memory."""

    def launch_drain(self, counts: Tensor) -> Callable[[], Tensor]:
        """Copies counts [n] int64 of the device, to which steps add, to host memory, and sets them to 0.

        What it returns waits for the copy, and raises DeviceLostError: the device has failed."""
