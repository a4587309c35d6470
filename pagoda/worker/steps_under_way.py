# SPDX-License-Identifier: Apache-2.0
"""Steps that were submitted and are not computed."""

from __future__ import annotations

from pagoda.worker.input_batch import MAX_STEPS


class StepsUnderWay:
    """Numbers of steps: `MAX_STEPS` at most, each computed once and in its turn."""

    def __init__(self) -> None:
        self._under_way: list[int] = []

    def check_room(self, step: int) -> None:
        """Raises RuntimeError: too many steps are under way."""
        if len(self._under_way) >= MAX_STEPS:
            raise RuntimeError(f"{MAX_STEPS} steps are under way; step {step} came too early.")

    def submitted(self, step: int) -> None:
        self._under_way.append(step)

    def begin(self, step: int) -> None:
        if not self._under_way or self._under_way[0] != step:
            raise RuntimeError(f"Step {step} is not the next one to be computed.")

    def is_next(self, step: int, launched: int) -> bool:
        """True if a step comes right behind so many that are launched."""
        return self._under_way[launched : launched + 1] == [step]

    def end(self) -> None:
        del self._under_way[0]
