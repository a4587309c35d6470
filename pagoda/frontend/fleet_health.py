"""The health of several replicas as one."""

from __future__ import annotations

import asyncio
import contextlib
from itertools import islice

from pagoda.frontend.async_utils import cancel_all
from pagoda.frontend.endpoint import Health
from pagoda.frontend.placement import ReplicaSlot
from pagoda.frontend.replica_set import ReplicaSet

_NUM_HEALTH_QUERIES = 16
"""Replicas that are asked for their health at a time."""
_HEALTH_PATIENCE_S = 0.1
"""Seconds without an answer after which the next replicas are asked too."""
_HEALTH_TIMEOUT_S = 2.5
"""A little more than an engine has for its answer."""


async def health_of(slots: ReplicaSet) -> Health:
    """Ready as soon as one of the replicas says so, else why none is; those heard last are asked first."""
    reasons: dict[ReplicaSlot, str] = {}
    remaining = iter(sorted(slots, key=lambda slot: -slot.latest_ns))
    pending: dict[asyncio.Task[Health], ReplicaSlot] = {}
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_HEALTH_TIMEOUT_S):
                while True:
                    for slot in islice(remaining, _NUM_HEALTH_QUERIES):
                        pending[asyncio.ensure_future(slot.replica.health())] = slot
                    if not pending:
                        break
                    # Replicas that hang do not keep the others from being asked.
                    done, _ = await asyncio.wait(
                        pending, timeout=_HEALTH_PATIENCE_S, return_when=asyncio.FIRST_COMPLETED
                    )
                    for answer in done:
                        slot = pending.pop(answer)
                        if answer.result().ready:
                            return Health(True)
                        reasons[slot] = answer.result().reason
    finally:
        await cancel_all(list(pending))
    told = (f"{slots.prefix(slot)}{reasons.get(slot, 'it does not answer')}" for slot in slots)
    return Health(False, "; ".join(told) or "there is no replica")
