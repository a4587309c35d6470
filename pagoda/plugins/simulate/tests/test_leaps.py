# SPDX-License-Identifier: Apache-2.0
from hypothesis import given
from hypothesis import strategies as st

from pagoda.messages.worker import StepPlan
from pagoda.plugins.simulate.leaps import Leap

_TIMES = st.floats(1e-4, 1.0)


@given(_TIMES, _TIMES, st.floats(0.0, 1e-3), st.integers(1, 300), st.floats(0.0, 1.0))
def test_the_step_under_way_is_found(
    begin: float, first_s: float, more_s: float, num_steps: int, part: float
) -> None:
    leap = Leap(StepPlan(0, [0], [1]), begin, first_s, more_s, num_steps)
    now = begin + part * (leap.end(num_steps) - begin)
    begun = leap.num_begun(now)
    assert 1 <= begun <= num_steps
    assert begun == num_steps or leap.end(begun) > now
    assert begun == 1 or leap.end(begun - 1) <= now


@given(_TIMES, st.floats(0.0, 1e-2), st.integers(1, 50))
def test_each_step_is_longer_than_the_one_before_by_as_much(
    first_s: float, more_s: float, num_steps: int
) -> None:
    leap = Leap(StepPlan(0, [0], [1]), 0.0, first_s, more_s, num_steps)
    total = sum(first_s + number * more_s for number in range(num_steps))
    assert abs(leap.end(num_steps) - total) < 1e-9 * max(1.0, total)
