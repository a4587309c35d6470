# SPDX-License-Identifier: Apache-2.0
"""The seam for a policy that lets another replica compute a prompt: plugins of `pagoda.kv_connectors` have one."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Protocol

from pagoda.fleet.placement import Counted, Placement, TrackedRequest
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
    ) -> AbstractContextManager[Counted | None]:
        """Counts the prompt of a request that somebody else brings to two replicas, at the one that is to compute
        it; `there` is where it is counted for the answer. It is work until `Counted.began`, as long as the context
        lasts. None if the prompt is computed where the answer comes from."""
