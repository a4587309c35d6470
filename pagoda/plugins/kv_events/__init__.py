# SPDX-License-Identifier: Apache-2.0
"""KV events: which blocks the caches gain and lose, published for the subscribers that vLLM has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagoda.kv.publishing import PublisherPlugin
from pagoda.plugins.kv_events.address import KVEventsAddress

if TYPE_CHECKING:
    import zmq

    from pagoda.plugins.kv_events.publisher import KVEventPublisher


def _open(
    address: str, replica: int, num_replicas: int, context: zmq.Context[zmq.Socket[bytes]]
) -> KVEventPublisher:
    from pagoda.plugins.kv_events.publisher import KVEventPublisher  # by engines alone

    return KVEventPublisher(KVEventsAddress.parse(address), replica, num_replicas, context)


def _check(address: str, num_replicas: int) -> None:
    KVEventsAddress.parse(address).check_ports(num_replicas)


PUBLISHER = PublisherPlugin(_check, _open)
