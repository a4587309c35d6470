# SPDX-License-Identifier: Apache-2.0
"""Idle time of a device is found out, wherever the host keeps it waiting."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from benchmarks.gpu.idle import busy_seconds, idle_share


@dataclass
class SlowHost:
    """A device, and a host that needs time to launch each of two pieces of a step."""

    host_seconds: float
    """Seconds of the host for each piece."""
    device_seconds: float
    waits: bool = False
    """The host waits for the device behind each step."""
    now: float = 0.0
    """Time of the host."""
    free: float = 0.0
    """Time at which the device will have done all that was launched."""

    def mark(self) -> float:
        return max(self.now, self.free)

    def passed(self, mark: float) -> bool:
        return self.now >= mark

    def seconds(self, first: float, last: float) -> float:
        return last - first

    def hold(self, seconds: float) -> None:
        self.free = max(self.now, self.free) + seconds

    def launch(self) -> bool:
        for _ in range(2):
            self.now += self.host_seconds
            self.free = max(self.now, self.free) + self.device_seconds
        if self.waits:
            self.finish()
        return True

    def finish(self) -> None:
        self.now = max(self.now, self.free)

    def decode(self) -> float:
        """Share of the time in which the device was idle, in steps of which one is launched ahead."""
        busy = busy_seconds(self, self.launch, self.finish)
        assert busy is not None
        ends, under_way = [], 0.0
        for _ in range(20):
            self.launch()
            ends.append(self.mark())
            self.now, under_way = max(self.now, under_way), ends[-1]  # the step before is read
        return idle_share(self, ends, busy)


def test_time_of_the_host_within_a_step_is_idle_time_of_the_device() -> None:
    """Marks around each launch would find no gap between steps."""
    assert SlowHost(host_seconds=0.004, device_seconds=0.001).decode() == pytest.approx(0.75)


def test_a_device_that_is_slower_than_the_host_is_never_idle() -> None:
    assert SlowHost(host_seconds=0.001, device_seconds=0.004).decode() == pytest.approx(0)


def test_the_device_is_held_up_until_the_host_has_launched_two_steps() -> None:
    device = SlowHost(host_seconds=0.1, device_seconds=0.001)
    assert busy_seconds(device, device.launch, device.finish) == pytest.approx(0.002)


def test_a_host_that_waits_for_the_device_cannot_launch_ahead() -> None:
    device = SlowHost(host_seconds=0.001, device_seconds=0.001, waits=True)
    assert busy_seconds(device, device.launch, device.finish) is None
    late = SlowHost(host_seconds=0.001, device_seconds=0.001)
    assert busy_seconds(late, lambda: late.launch() and False, late.finish) is None
