# SPDX-License-Identifier: Apache-2.0
"""The Ray actor that holds one worker process, on whichever node it was placed."""

from __future__ import annotations

import os
import select

import msgspec
import ray

from pagoda.executor.launcher import WORKER_MODULE
from pagoda.ipc.lifeline import ChildProcess
from pagoda.ipc.machine import available_memory_bytes
from pagoda.messages.worker import PROTOCOL_VERSION
from pagoda.telemetry.logging import LOG_LEVEL_ENV
from pagoda.version import __version__


class HostFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about the node that an actor was placed on."""

    node_id: str
    memory_bytes: int
    version: str = __version__
    protocol_version: int = PROTOCOL_VERSION


class RankEnd(msgspec.Struct, frozen=True):
    """The end of a worker."""

    how: str
    """A clause without a subject: `was killed by SIGKILL`."""
    is_from_outside: bool = False
    """A person or another program ended it (`ChildProcess.was_ended_from_outside`)."""


class RankActor:
    """Lives as long as its worker process may. What it says is msgpack: Ray's own pickling sees only bytes."""

    def describe(self) -> bytes:
        facts = HostFacts(
            node_id=ray.get_runtime_context().get_node_id(),
            memory_bytes=available_memory_bytes(),
        )
        return msgspec.msgpack.encode(facts)

    def run(self, config: bytes, address: str, log_level: str) -> bytes:
        """Runs the worker until it ends, and returns its `RankEnd`."""
        os.environ[LOG_LEVEL_ENV] = log_level
        raylet = os.pidfd_open(os.getppid())
        child = ChildProcess(WORKER_MODULE, [address], config=config)
        try:
            # An actor outlives a raylet that was killed, and would hold the worker's memory for ever.
            poll = select.poll()
            poll.register(raylet, select.POLLIN)
            poll.register(child, select.POLLIN | select.POLLHUP)
            ended = [fd for fd, _ in poll.poll()]
            if raylet in ended:
                end = RankEnd("lost the Ray node it ran on")
            else:
                how = child.describe_end()
                end = RankEnd(how, child.was_ended_from_outside())
            return msgspec.msgpack.encode(end)
        finally:
            child.kill()
            os.close(raylet)
