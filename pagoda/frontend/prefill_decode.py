"""A router over hosts that compute prompts, and hosts that take over their KV and go on.

The decode hosts have all requests. For one whose prompt is long enough, and would not wait too long there, a
prefill host gets the same request beside it, and the decode host is told where the KV will be as soon as the
prefill host has said so. All that a client sees comes from the decode host, which computes what it does not get;
so nothing that happens to prefill hosts is an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from pagoda.frontend.dispatcher import Dispatcher
from pagoda.frontend.policies import POLICIES, Policy
from pagoda.frontend.prefill_offload import DEFAULT_MIN_TOKENS, PrefillOffload
from pagoda.frontend.replica import Replica
from pagoda.messages.worker_config import Role
from pagoda.telemetry.tracer import Tracer


class PrefillDecodeRouter:
    """The hosts behind a router, by what they do."""

    def __init__(
        self,
        policy: Policy,
        min_tokens: int = DEFAULT_MIN_TOKENS,
        tracer: Tracer | None = None,
        *,
        no_replica_timeout_s: float = math.inf,
    ) -> None:
        """`policy` chooses among hosts that answer; prefill hosts are chosen by what waits for them.

        Prompts of which `min_tokens` or more are not cached where they are answered are computed by prefill hosts.
        `no_replica_timeout_s` is as in `Dispatcher`.
        """
        # Decode hosts compute what no prefill host does, so all prefill hosts may be left out.
        by_work = POLICIES["least-pending-tokens"]
        self.prefill = Dispatcher([], by_work, keeps_half=False, tracer=tracer)
        self.dispatcher = Dispatcher(
            [],
            policy,
            PrefillOffload(self.prefill, min_tokens),
            tracer=tracer,
            no_replica_timeout_s=no_replica_timeout_s,
        )
        self.prefill.watch(self.dispatcher.update_subscriptions)
        self._homes: dict[Replica, list[Dispatcher]] = {}
        self._unwatch: dict[Replica, Callable[[], None]] = {}

    def add(self, replica: Replica) -> None:
        """Takes in a host that has started. A prefill host also answers, as long as nobody else does."""
        self._homes[replica] = [self.dispatcher]
        self.dispatcher.add(replica)
        self._unwatch[replica] = replica.watch(lambda: self._sort(replica))
        self._sort(replica)

    def _sort(self, replica: Replica) -> None:
        """Follows the host's role: that of a router is the role of its hosts, which come and go."""
        homes = self._homes.get(replica, [])
        is_prefill = replica.limits.role is Role.PREFILL
        if homes and is_prefill and self.prefill not in homes:
            homes.append(self.prefill)
            self.prefill.add(replica)
        elif self.prefill in homes and not is_prefill:
            homes.remove(self.prefill)
            self.prefill.remove(replica)

    def set_leaving(self, replica: Replica, is_leaving: bool) -> None:
        """Gives a host that leaves nothing new; its requests go on there."""
        for home in self._homes[replica]:
            home.set_leaving(replica, is_leaving)

    def num_requests(self, replica: Replica) -> int:
        return sum(home.num_requests(replica) for home in self._homes[replica])

    async def emptied(self, replica: Replica) -> None:
        """Returns when a host that leaves has no requests any more."""
        for home in self._homes[replica]:
            await home.emptied(replica)

    def remove(self, replica: Replica) -> None:
        """Forgets a host; may be called twice."""
        if replica not in self._homes:
            return
        self._unwatch.pop(replica)()
        for home in self._homes.pop(replica):
            home.remove(replica)

    async def close(self) -> None:
        await self.dispatcher.close()
        await self.prefill.close()
