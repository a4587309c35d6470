# SPDX-License-Identifier: Apache-2.0
"""All targets, by name."""

from __future__ import annotations

from benchmarks.chaos.fuzz.files import FILES
from benchmarks.chaos.fuzz.frames import FRAMES
from benchmarks.chaos.fuzz.native import NATIVE
from benchmarks.chaos.fuzz.sockets import SOCKETS
from benchmarks.chaos.fuzz.target import Target

TARGETS: dict[str, Target] = {
    target.name: target for target in (*FILES, *NATIVE, *SOCKETS, *FRAMES)
}
