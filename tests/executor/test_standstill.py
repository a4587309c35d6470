# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pagoda.executor.standstill import LOOK_S, Standstill


def test_looks_are_due_often_while_something_is_awaited() -> None:
    standstill = Standstill(10.0)
    assert standstill.next_look_at(None) is None
    assert standstill.next_look_at(300.0) == 10 + LOOK_S
    assert standstill.look(10.2) == 0
    assert standstill.next_look_at(10.5) == 10.5


def test_what_passes_beyond_a_look_that_was_due_is_a_standstill() -> None:
    standstill = Standstill(0.0)
    standstill.next_look_at(300.0)
    assert standstill.look(LOOK_S + 0.1) == 0, "a busy machine is a little late"
    standstill.next_look_at(300.0)
    assert standstill.look(42.1) == 41.0 - LOOK_S
    standstill.next_look_at(None)
    assert standstill.look(1000.0) == 0, "nothing was awaited"
