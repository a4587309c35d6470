# SPDX-License-Identifier: Apache-2.0
"""The seam for a policy that lets another replica compute a prompt: plugins of `pagoda.kv_connectors` have one."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Protocol

from pagoda.fleet.placement import Counted, Placement, ReplicaSlot, TrackedRequest
from pagoda.fleet.replica_set import ReplicaSet
from pagoda.messages.frontend import GenerateRequest


class Offload(Protocol):
    """Makes requests ready for the replicas that a `Dispatcher` chose."""

    def needs_prefixes(self, slots: ReplicaSet) -> bool:
        """True if it matters what replicas have cached, which costs a digest over each prompt."""

    def prepare(
        self, tracked: TrackedRequest, placement: Placement, slots: ReplicaSet
    ) -> AbstractAsyncContextManager[GenerateRequest]:
        """The request as its replica, one of `slots`, is to be given it; what was done for it lasts until the
        context ends.

        Never raises because something failed: then the request is as it was. Does not wait for long.
        """

    def counted(
        self, request: GenerateRequest, there: Counted
    ) -> AbstractContextManager[ReplicaSlot | None]:
        """The replica that is to compute the prompt of a request that somebody else brings to both, and to the
        one where it is counted `there` for the answer. The prompt counts as work of the replica that computes it,
        as long as the context lasts. None if that is where the answer comes from."""
