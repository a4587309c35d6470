# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import threading

import pytest

from pagoda.ipc.bounded import within


def test_what_a_call_returns_or_raises_is_passed_on() -> None:
    assert within(60, lambda: 7) == 7
    with pytest.raises(KeyError):
        within(60, lambda: {}["nothing"])


def test_a_call_that_hangs_is_left_behind() -> None:
    released = threading.Event()
    with pytest.raises(TimeoutError):
        within(0.01, released.wait)
    released.set()
