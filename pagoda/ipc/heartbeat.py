"""Heartbeats between hosts: they notice a cut line in seconds; the system alone would take minutes."""

from __future__ import annotations

from typing import Any

import zmq

HEARTBEAT_S = 1.25
SILENCE_S = 5.0
"""Seconds of silence after which a peer counts as gone."""


def notice_silence(socket: zmq.Socket[Any]) -> None:
    """Lets `socket` disconnect silent peers. Call before it is bound or connected; peers need not do the same."""
    socket.setsockopt(zmq.HEARTBEAT_IVL, round(HEARTBEAT_S * 1000))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, round(SILENCE_S * 1000))
