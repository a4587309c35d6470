# SPDX-License-Identifier: Apache-2.0
"""All trials, in the order of the table."""

from __future__ import annotations

from benchmarks.chaos.deaths import (
    HANG_LOADING,
    KILL_ENGINE,
    KILL_WORKER,
    LOST_MESSAGES,
    OOM,
    POISON,
    STOP_ENGINE,
    STOP_WORKER,
)
from benchmarks.chaos.disk import DISK
from benchmarks.chaos.drop import DROP
from benchmarks.chaos.fuzz.trial import FUZZ
from benchmarks.chaos.hostile.trial import HOSTILE
from benchmarks.chaos.idle import IDLE
from benchmarks.chaos.overload import OVERLOAD
from benchmarks.chaos.ray_head import RAY_HEAD
from benchmarks.chaos.routers import ETCD, ROUTER
from benchmarks.chaos.shutdown import SIGKILL, SIGTERM
from benchmarks.chaos.simulation import SIMULATION
from benchmarks.chaos.soak import SOAK
from benchmarks.chaos.trial import Trial
from benchmarks.chaos.two_users import TWO_USERS

TRIALS: tuple[Trial, ...] = (
    KILL_WORKER,
    KILL_ENGINE,
    STOP_WORKER,
    STOP_ENGINE,
    HANG_LOADING,
    OOM,
    POISON,
    LOST_MESSAGES,
    DROP,
    OVERLOAD,
    SIGTERM,
    SIGKILL,
    SOAK,
    HOSTILE,
    SIMULATION,
    FUZZ,
    TWO_USERS,
    DISK,
    ETCD,
    RAY_HEAD,
    ROUTER,
    IDLE,
)
