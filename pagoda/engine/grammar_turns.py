# SPDX-License-Identifier: Apache-2.0
"""Grammars that give way: no step waits long for masks, and requests whose masks are slow take turns."""

from __future__ import annotations

import math

from pagoda.engine.request import Request

SLOW_MASK_S = 0.001
"""Processor time of a token from which on the masks of a request are slow."""

STEP_MASKS_S = 0.008
"""Processor time that the masks of slow grammars take of a step, as far as more than one request has one."""


class GrammarTurns:
    """The requests with slow grammars in one plan."""

    def __init__(self, step: int, before_s: float, *, in_turn: bool) -> None:
        """`before_s` is `slow_masks_s` of the plan before; with `in_turn`, requests await their turns."""
        self.slow_masks_s = 0.0
        """Processor time of the masks of all that run, whether or not they are in the plan."""
        self.gave_way = False
        self._step, self._before_s, self.in_turn = step, before_s, in_turn
        self._masks_s = 0.0
        """The part of `slow_masks_s` that the plan takes."""
        self._has_start = False

    def gives_way(self, request: Request) -> bool:
        """True if others of the step, who would wait for the mask of this running request, go first. A request
        whose turn was in a step gives way until all others can have had theirs."""
        if request.constraint is None or (cost := request.constraint.cost_s) <= SLOW_MASK_S:
            return False
        self.slow_masks_s += cost
        is_full = self._masks_s > 0 and self._masks_s + cost > STEP_MASKS_S
        if is_full or (self.in_turn and self._step < request.mask_turn):
            self.gave_way = True
            return True
        self._masks_s += cost
        # A step that has no room for requests like this one is as full as that, and half full at least.
        room_s = max(STEP_MASKS_S - cost, STEP_MASKS_S / 2)
        request.mask_turn = self._step + math.ceil(self._before_s / room_s)
        return False

    def may_start(self, request: Request) -> bool:
        """False if another request with a slow grammar begins in the plan, as this one would."""
        if request.constraint is None or request.constraint.cost_s <= SLOW_MASK_S:
            return True
        may_start, self._has_start = not self._has_start, True
        return may_start
