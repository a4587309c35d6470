# SPDX-License-Identifier: Apache-2.0
"""The emulated device, which tells what was captured on it, and may refuse memory."""

from __future__ import annotations

import torch
from torch import Tensor

from pagoda.plugins.cuda.emulation import EmulatedDevice
from pagoda.plugins.cuda.runtime import Work


class CountingDevice(EmulatedDevice):
    """A device that counts the graphs that it has captured, and their replays."""

    def __init__(self) -> None:
        super().__init__()
        self.num_captured = self.num_replayed = 0
        self.fails = False
        """True lets it refuse memory."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if self.fails:
            raise RuntimeError("the launch was refused")
        return super().empty(shape, dtype)

    def capture(self, work: Work) -> Work:
        self.num_captured += 1
        captured = super().capture(work)

        def replay() -> None:
            self.num_replayed += 1
            captured()

        return replay
