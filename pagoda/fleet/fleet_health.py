# SPDX-License-Identifier: Apache-2.0
"""The health of several replicas as one."""

from __future__ import annotations

import asyncio
from itertools import islice

from pagoda.concurrency.async_utils import cancel_all
from pagoda.fleet.endpoint import Health
from pagoda.fleet.placement import ReplicaSlot
from pagoda.fleet.replica_set import ReplicaSet

_NUM_HEALTH_QUERIES = 16
"""Replicas that are asked for their health at a time."""
_HEALTH_PATIENCE_S = 0.1
"""Seconds without an answer after which the next replicas are asked too."""
_ASKING_S = 0.5
"""Seconds after which no further replicas are asked; each that was asked has its time to answer."""


async def health_of(slots: ReplicaSet) -> Health:
    """Ready as soon as one of the replicas says so, else why none is; those heard last are asked first."""
    reasons: dict[ReplicaSlot, str] = {}
    remaining = iter(sorted(slots, key=lambda slot: -slot.latest_ns))
    pending: dict[asyncio.Task[Health], ReplicaSlot] = {}
    asks_until = asyncio.get_running_loop().time() + _ASKING_S
    try:
        while True:
            if asyncio.get_running_loop().time() < asks_until:
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
