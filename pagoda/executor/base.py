# SPDX-License-Identifier: Apache-2.0
"""Executors: the interface between an engine and the workers that compute its steps."""

from __future__ import annotations

from typing import Protocol

import msgspec

from pagoda.messages.adapters import Adapter, AdapterLoaded
from pagoda.messages.tracing import TraceStopped
from pagoda.messages.transfers import TierWord, TransferEnd, Transfers
from pagoda.messages.worker import StepPlan, StepResult, TokenMasks, WorkerReady
from pagoda.telemetry.tracer import TraceSession

STEP_TIMEOUT_SUSPICION = 2


class WorkerLost(msgspec.Struct, frozen=True):
    """The workers are gone, and with them all KV and every step under way."""

    reason: str
    """A clause: `the worker was killed by SIGKILL`."""
    is_user_error: bool = False
    """The worker could not start for a reason that trying again does not mend; `reason` is a sentence."""
    suspicion: int = 1
    """Weight of the loss against the requests in the steps in flight: 0 if it is no fault of theirs, 2 if all have
    waited long for it (`STEP_TIMEOUT_SUSPICION`)."""


ExecutorEvent = (
    WorkerReady | StepResult | TransferEnd | TierWord | AdapterLoaded | TraceStopped | WorkerLost
)


class Executor(Protocol):
    """One set of workers that executes step plans in order.

    Nothing here blocks for long: what happens is collected by `poll`. After `WorkerLost`, the executor does
    nothing until `start` is called again.
    """

    max_in_flight: int

    def start(self, num_blocks: int | None = None) -> None:
        """Begins to start the workers; a `WorkerReady` or `WorkerLost` event follows.

        `num_blocks` is the size of the KV cache that workers before these had: theirs must be the same.
        """
        ...

    def submit(self, plan: StepPlan) -> None:
        """Hands over a plan; a `StepResult` or `WorkerLost` event follows."""
        ...

    def submit_masks(self, masks: TokenMasks) -> None:
        """Hands over what a plan with `masked_slots` waits for before it samples; once for each such plan."""
        ...

    def submit_transfers(self, message: Transfers) -> None:
        """Begins transfers, which go on beside the steps; for each, a `TransferEnd` or `WorkerLost` follows."""
        ...

    def load_adapter(self, adapter: Adapter) -> None:
        """The workers load an adapter, these between two plans and those after them at their start.

        An `AdapterLoaded` follows, also where workers are lost meanwhile.
        """
        ...

    def unload_adapter(self, digest: str) -> None:
        """The workers forget an adapter behind all plans before; unknown digests are ignored."""
        ...

    def start_trace(self, session: TraceSession) -> None:
        """The workers trace, these and those after them, until `stop_trace`."""
        ...

    def stop_trace(self) -> None:
        """A `TraceStopped` or `WorkerLost` event follows."""
        ...

    def poll(self) -> list[ExecutorEvent]:
        """Returns the events since the last call. Never waits."""
        ...

    def pollables(self) -> list[object]:
        """File descriptors and sockets (as `zmq.Poller` takes them) that become readable with news."""
        ...

    def pids(self) -> dict[str, int]:
        """The workers on this host that run now, by role: `worker dp0 tp1 pp0`."""
        ...

    def next_event_at(self) -> float | None:
        """Time on the engine's clock at which to call `poll` even if nothing became readable; None: never."""
        ...

    def close(self) -> None: ...


def max_in_flight(num_stages: int) -> int:
    """Number of plans that keep workers busy: one at each stage, and one that waits for the first stage.

    Of decoding requests there is at most one step at each stage, since each waits for its sample; the one more is
    then a prompt's, whose chunks follow each other without waiting.
    """
    return num_stages + 1
